"""The WebSocket end of the control channel: bytes in, typed frames out, errors as refusals."""

from __future__ import annotations

import logging
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import WSMessage, WSMsgType, web

from windlass.config import ControlConfig
from windlass.errors import PlanError, ProtocolError
from windlass.layout.manifest import Role
from windlass.net.access import Access
from windlass.net.addresses import HOST_VARIABLE, is_loopback, is_wildcard
from windlass.net.server import CALLER, OPEN_SOCKETS
from windlass.net.sockets import PartJoiner, close_socket, send_frame
from windlass.updates.fleet import MustWait
from windlass.updates.messages import (
    PROTOCOL_VERSION,
    AgentFrame,
    Announce,
    CannotJoin,
    Hello,
    Refused,
    Reply,
    Welcome,
    Withdraw,
    decode_agent_frame,
    encode,
)
from windlass.updates.session import AgentSession

__all__ = ["AgentOwner", "check_published", "serve_agent"]

_log = logging.getLogger(__name__)


class _Garbled(ProtocolError):
    """The fault may be the connection's and not the agent's: it may come again."""


class AgentOwner(Protocol):
    """Who the connections belong to."""

    async def admit(self, hello: Hello, socket: web.WebSocketResponse) -> AgentSession:
        """Take in a rank.

        Raises:
            ProtocolError: it does not belong here, or not yet (`MustWait`).
            PlanError: its manifest contradicts itself.
        """
        ...

    def failed_to_join(self, frame: CannotJoin) -> None:
        """An engine will not come, as its own side says."""
        ...

    async def admitted(self, session: AgentSession) -> None:
        """The rank has been told that it is welcome."""
        ...

    async def received(self, session: AgentSession, frame: Announce | Withdraw | Reply) -> None:
        """A frame has arrived.

        Raises:
            ProtocolError: it does not belong here.
        """
        ...

    async def lost(self, session: AgentSession, reason: str, *, ended: bool = False) -> None:
        """The connection is over. May come more than once.

        `ended` by the agent's side, as it is when a process ends; not because of its silence.
        """
        ...


async def serve_agent(
    request: web.Request, owner: AgentOwner, config: ControlConfig, welcome: Welcome
) -> web.WebSocketResponse:
    """Serve one connection until it ends; what one agent does wrong touches no other."""
    socket = web.WebSocketResponse(
        heartbeat=config.heartbeat_s, max_msg_size=config.max_message_nbytes
    )
    await socket.prepare(request)
    request.app[OPEN_SOCKETS].add(socket)
    session: AgentSession | None = None
    parts = PartJoiner(config.max_message_nbytes)
    reason, ended = "connection closed", False
    try:
        hello = await _read_hello(socket, parts, config.heartbeat_s)
        if isinstance(hello, CannotJoin):
            _check_role(hello.group, Role.ENGINE, CALLER.get())
            owner.failed_to_join(hello)
            return socket
        _check_role(hello.worker, hello.role, CALLER.get())
        session = await owner.admit(hello, socket)
        await send_frame(socket, encode(welcome))
        _log.info("agent %s connected", session.worker)
        await owner.admitted(session)
        async for message in socket:
            if message.type is WSMsgType.ERROR:
                break
            frame = _take(session, parts, message)
            if frame is not None:
                await owner.received(session, frame)
        if socket.exception() is not None:
            reason = f"connection broke: {socket.exception()}"
        # Not by its silence: TimeoutError is what a heartbeat raises, and a deaf one was cut off.
        ended = not (session.is_deaf or isinstance(socket.exception(), TimeoutError))
    except (_Garbled, MustWait) as error:
        reason = str(error)
        await _refuse(socket, reason, final=False)
    except ProtocolError as error:
        reason = str(error)
        await _refuse(socket, reason)
    except PlanError as error:
        reason = f"{type(error).__name__}: {error}"
        await _refuse(socket, reason)
    except ConnectionError as error:
        reason = f"connection broke: {error}"
    finally:
        if session is not None:
            await owner.lost(session, reason, ended=ended)
        await close_socket(socket)
    return socket


async def _read_hello(
    socket: web.WebSocketResponse, parts: PartJoiner, deadline_s: float
) -> Hello | CannotJoin:
    """Each part of it by the deadline."""
    try:
        hello = None
        while hello is None:
            hello = _decode(parts, await socket.receive_bytes(timeout=deadline_s))
    except TypeError as error:
        raise ProtocolError(f"the first frame must be a binary Hello: {error}") from error
    except TimeoutError as error:
        raise _Garbled(f"the first frame must be Hello, got none in {deadline_s} s") from error
    if isinstance(hello, CannotJoin) and hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{hello.group}: protocol_version must be {PROTOCOL_VERSION}, "
            f"got {hello.protocol_version}"
        )
    if not isinstance(hello, Hello | CannotJoin):
        raise ProtocolError(f"the first frame must be Hello, got {type(hello).__name__}")
    return hello


def _check_role(who: str, role: Role, access: Access) -> None:
    if access is not Access.OWNER and access.value != role.value:
        raise ProtocolError(f"{who}: /v1/agents: a token of role {access} may not join as {role}")


def check_published(hello: Hello, host: str) -> None:
    """An engine on another host must not send us to ourselves.

    Raises:
        ProtocolError: the URL that it publishes names no other host.
    """
    try:
        named = urlsplit(hello.url).hostname or ""
    except ValueError as error:
        raise ProtocolError(f"{hello.worker}: url must be a URL: {error}") from error
    if hello.url and (is_loopback(named) or is_wildcard(named)):
        raise ProtocolError(
            f"{hello.worker} on host {host}: url must be reachable from other hosts, got "
            f"{hello.url!r}; --host, --advertise-host or {HOST_VARIABLE} sets it"
        )


def _take(
    session: AgentSession, parts: PartJoiner, message: WSMessage
) -> Announce | Withdraw | Reply | None:
    if message.type is not WSMsgType.BINARY:
        raise ProtocolError(f"{session.worker}: frames must be binary")
    frame = _decode(parts, message.data)
    if isinstance(frame, Hello | CannotJoin):
        raise _Garbled(f"{session.worker}: Hello may be sent only once")
    return frame


def _decode(parts: PartJoiner, data: bytes) -> AgentFrame | None:
    try:
        whole = parts.take(data)
        return None if whole is None else decode_agent_frame(whole)
    except ProtocolError as error:
        raise _Garbled(str(error)) from error


async def _refuse(socket: web.WebSocketResponse, reason: str, *, final: bool = True) -> None:
    _log.warning("refused: %s", reason)
    try:
        await send_frame(socket, encode(Refused(reason, final)))
    except ConnectionError:
        return  # it is gone already
