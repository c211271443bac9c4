"""Requests of one kind, answered one after another over a connection that stays open.

A lane is a WebSocket on the same route as the plain POST, with the same bodies: a message is
the request, the next message back is its answer. It exists because a POST costs both sides
several hundred microseconds of HTTP. Where an upgrade is refused (a proxy, another worker) the
lane posts; whoever uses it sees no difference. Nothing may depend on the connection: what was
sent when it broke is sent again by the caller, and bodies are idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, final

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from windlass.errors import ProtocolError
from windlass.net.sockets import close_socket
from windlass.rollout._http import MAX_BODY_NBYTES, post, read_body, reply
from windlass.rollout.messages import Body, BodyT, decode, encode

__all__ = ["Lane", "LaneRoutes"]

UPGRADE_AGAIN_S = 10.0
CLOSE_S = 0.1
MAX_REASON_NBYTES = 120


@final
class Lane(Generic[BodyT]):
    """The side that asks; one call at a time.

    Args:
        session: carries the token; closing it ends the lane.
        url: of the route.
        answer: kind of the answers.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, answer: type[BodyT]) -> None:
        self._session = session
        self._url = url
        self._answer = answer
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._upgrade_at = 0.0

    async def call(self, body: Body, *, deadline_s: float) -> BodyT:
        """Send a body and return the answer.

        Raises:
            aiohttp.ClientError: no connection, or the peer refused.
            TimeoutError: no answer within `deadline_s`.
            ProtocolError: an answer of another kind.
        """
        async with asyncio.timeout(deadline_s):
            socket = self._socket or await self._upgrade()
            if socket is None:
                return await post(
                    self._session, self._url, body, self._answer, deadline_s=deadline_s
                )
            try:
                await socket.send_bytes(encode(body))
                return decode(_data(await socket.receive()), self._answer)
            except BaseException:
                # An answer that is still under way would be taken for that of the next call.
                await self.close()
                raise

    async def close(self) -> None:
        """Close the connection. Idempotent; a later call opens another one."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await close_socket(socket, deadline_s=2 * CLOSE_S)

    async def _upgrade(self) -> aiohttp.ClientWebSocketResponse | None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._upgrade_at:
            return None
        try:
            self._socket = await self._session.ws_connect(
                self._url,
                max_msg_size=MAX_BODY_NBYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError:
            # A POST says whether only the upgrade was refused.
            self._upgrade_at = loop.time() + UPGRADE_AGAIN_S
        return self._socket


def _data(message: aiohttp.WSMessage) -> bytes:
    if message.type is not WSMsgType.BINARY:
        raise aiohttp.ClientConnectionError(
            f"lane closed: {message.type.name} {message.data} {message.extra or ''}"
        )
    data: bytes = message.data
    return data


@final
class LaneRoutes(Generic[BodyT]):
    """The side that answers: one route, for POSTs and for lanes.

    Args:
        path: of the route.
        kind: of the requests.
        handle: makes the answer at once; may raise `web.HTTPException`.
        status: of the answer to a POST.
    """

    def __init__(
        self, path: str, kind: type[BodyT], handle: Callable[[BodyT], Body], *, status: int = 200
    ) -> None:
        self._path = path
        self._kind = kind
        self._handle = handle
        self._status = status
        self._open: set[asyncio.BaseTransport] = set()

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application that authenticates."""
        return [web.post(self._path, self._on_post), web.get(self._path, self._on_upgrade)]

    async def close(self, _: web.Application) -> None:
        """End all lanes, so that the server need not wait for them; for `on_shutdown`."""
        for transport in self._open:
            transport.close()

    async def _on_post(self, request: web.Request) -> web.Response:
        return reply(self._handle(await read_body(request, self._kind)), status=self._status)

    async def _on_upgrade(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_BODY_NBYTES, compress=False)
        await socket.prepare(request)
        transport = request.transport
        if transport is None:
            return socket
        self._open.add(transport)
        try:
            async for message in socket:
                await self._on_message(socket, message)
        except ConnectionError:
            pass  # the peer left before its answer; it asks again
        finally:
            self._open.discard(transport)
        return socket

    async def _on_message(self, socket: web.WebSocketResponse, message: aiohttp.WSMessage) -> None:
        if message.type is not WSMsgType.BINARY:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA)
            return
        try:
            answer = self._handle(decode(message.data, self._kind))
        except ProtocolError as error:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=_reason(str(error)))
        except web.HTTPException as error:
            await socket.close(
                code=WSCloseCode.TRY_AGAIN_LATER, message=_reason(error.text or error.reason)
            )
        else:
            await socket.send_bytes(encode(answer))


def _reason(text: str) -> bytes:
    return text.encode("ascii", "replace")[:MAX_REASON_NBYTES]
