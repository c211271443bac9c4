"""One way to call a peer: the end that calls.

A peer opens a WebSocket (`rpc_client.Client`) and opens it again whenever it is lost: it needs no port
of its own, and a process that dies is a closed connection, seen at once and not by polling. Its
first frame says who it is; the server answers with a welcome of its own protocol, or with
`Refused`. From then on the server sends `Envelope`s, the peer answers each of them with one `Reply`, and
either may send what else their protocol has.

The id of a call is (epoch, round, seq), which only grows. A peer carries out a call once, however
often it is sent: it stores its replies, sends them again over its next connection, and drops them when a
call of a later round shows that they have been received.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Generic, Protocol, TypeVar

import msgspec
from aiohttp import WSMessage, WSMsgType, web

from windlass.errors import PeerUnreachable, PlanError, ProtocolError
from windlass.net.messages import CallId, Codec, Envelope, Garbled, MustWait, Refused, encode
from windlass.net.server import OPEN_SOCKETS
from windlass.net.sockets import (
    MAX_PART_NBYTES,
    SEND_DEADLINE_S,
    PartJoiner,
    close_socket,
    send_frame,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
CommandT = TypeVar("CommandT")
ResultT = TypeVar("ResultT")


class Session(Generic[CommandT, ResultT]):
    """Calls one peer, and matches replies to whoever waits for them.

    Args:
        peer: its name, for errors.
        socket: of its connection; None before the first.
        keeps_calls: calls outlive a connection, and are sent again over the next one (`attach`).
            Otherwise they fail with it.
        send_deadline_s: for the peer to take a frame, or a part of a large one; the connection of
            one that does not is cut.

    Attributes:
        was_cut: the connection was cut because the peer did not read; its process may live.
    """

    def __init__(
        self,
        peer: str,
        socket: web.WebSocketResponse | None = None,
        *,
        keeps_calls: bool = False,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        self.peer = peer
        self.was_cut = False
        self._socket, self._send_deadline_s = socket, send_deadline_s
        self._keeps_calls = keeps_calls
        self._calls: dict[CallId, tuple[CommandT, asyncio.Future[ResultT]]] = {}

    @property
    def num_waiting(self) -> int:
        """Calls that are not answered."""
        return len(self._calls)

    async def send(self, frame: msgspec.Struct, *, within_s: float | None = None) -> None:
        """Send a frame, all of it within `within_s` if that is given.

        Raises:
            PeerUnreachable: the connection is closed, or the peer does not read from it.
        """
        if self._socket is None:
            raise PeerUnreachable(f"{self.peer}: is not connected")
        try:
            await send_frame(
                self._socket,
                encode(frame),
                self._send_deadline_s,
                within_s=within_s,
                on_cut=self._note_cut,
            )
        except (ConnectionError, RuntimeError) as error:
            raise PeerUnreachable(f"{self.peer}: connection is closed: {error}") from error

    def _note_cut(self) -> None:
        self.was_cut = True

    async def call(
        self, call_id: CallId, command: CommandT, *, within_s: float | None = None
    ) -> asyncio.Future[ResultT]:
        """Send a command, within `within_s` if that is given.

        Returns:
            Resolves with the result; fails with PeerUnreachable if the connection is lost, unless
            calls are kept.

        Raises:
            PeerUnreachable: as `send`, unless calls are kept.
        """
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = command, future
        try:
            await self.send(Envelope(*call_id, command), within_s=within_s)
        except PeerUnreachable as error:
            if not self._keeps_calls:
                del self._calls[call_id]
                raise
            _log.info("call waits for the next connection: %s", error)
        return future

    async def attach(self, socket: web.WebSocketResponse) -> None:
        """Go on over another connection of the same process: what is not answered is sent again.

        Raises:
            PeerUnreachable: as `send`.
        """
        if self._socket is socket:
            return
        self._socket, self.was_cut = socket, False
        for call_id, (command, _) in list(self._calls.items()):
            await self.send(Envelope(*call_id, command))

    def detach(self, socket: web.WebSocketResponse, reason: str) -> None:
        """This connection is gone, and with it every call that is not kept."""
        if self._socket is socket and not self._keeps_calls:
            self.fail_calls(reason)

    def forget(self, call_id: CallId) -> None:
        """Drop a call: nobody waits for its answer."""
        self._calls.pop(call_id, None)

    def on_reply(self, call_id: CallId, result: ResultT) -> None:
        """Resolve whoever waits; an answer that nobody waits for is dropped."""
        _, future = self._calls.pop(call_id, (None, None))
        if future is not None and not future.done():
            future.set_result(result)

    def fail_calls(self, reason: str) -> None:
        """The peer is gone: nobody will answer."""
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(PeerUnreachable(f"{self.peer}: {reason}"))
                future.exception()  # seen; whoever still waits gets it all the same
        self._calls.clear()

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            await close_socket(self._socket)


SessionT = TypeVar("SessionT", bound=Session)  # type: ignore[type-arg]  # of any commands
FrameT_contra = TypeVar("FrameT_contra", contravariant=True)


class Owner(Protocol[FrameT_contra, SessionT]):
    """Who the connections of a route belong to."""

    async def admit(
        self, first: FrameT_contra, socket: web.WebSocketResponse
    ) -> tuple[SessionT, msgspec.Struct] | None:
        """Let in a peer that has sent its first frame.

        Returns:
            Its session, and the welcome that it is sent; None when that frame was all it had to say.

        Raises:
            ProtocolError: it does not belong here, or not yet (`MustWait`).
            PlanError: what it says of itself contradicts itself.
        """
        ...

    async def admitted(self, session: SessionT) -> None:
        """The peer has been sent its welcome, and what it has not answered yet."""
        ...

    async def received(self, session: SessionT, frame: FrameT_contra) -> None:
        """Take a frame.

        Raises:
            ProtocolError: it does not belong here.
        """
        ...

    async def lost(self, session: SessionT, reason: str, *, ended: bool) -> None:
        """The connection is over. May come more than once.

        `ended` by the peer's side, as it is when a process ends; not because of its silence.
        """
        ...


async def serve(
    request: web.Request,
    owner: Owner[T, SessionT],
    codec: Codec[T],
    *,
    heartbeat_s: float,
    max_nbytes: int,
) -> web.WebSocketResponse:
    """Serve one connection until it ends; what one peer does wrong touches no other.

    Args:
        request: of the connection.
        owner: of the connections of this route.
        codec: of what its peers send.
        heartbeat_s: for the first frame to come, each part of it; and for a ping to be answered.
        max_nbytes: of a frame.
    """
    # Large frames come in parts; and compressed ones would be a thousandth of what they become.
    socket = web.WebSocketResponse(
        heartbeat=heartbeat_s, max_msg_size=min(MAX_PART_NBYTES, max_nbytes), compress=False
    )
    await socket.prepare(request)
    request.app[OPEN_SOCKETS].add(socket)
    session: SessionT | None = None
    parts = PartJoiner(max_nbytes)
    reason, ended = "connection closed", False
    try:
        admitted = await owner.admit(await _first_frame(socket, parts, codec, heartbeat_s), socket)
        if admitted is None:
            return socket
        session, welcome = admitted
        await send_frame(socket, encode(welcome))
        _log.info("%s connected", session.peer)
        await session.attach(socket)
        await owner.admitted(session)
        async for message in socket:
            if message.type is WSMsgType.ERROR:
                break
            frame = _decode(parts, codec, message, session.peer)
            if frame is not None:
                await owner.received(session, frame)
        if socket.exception() is not None:
            reason = f"connection broke: {socket.exception()}"
        # Not by its silence: TimeoutError is what a heartbeat raises, and one that did not read was cut off.
        ended = not (session.was_cut or isinstance(socket.exception(), TimeoutError))
    except MustWait as error:  # whose owner says so to a person, where it is not in order
        reason = str(error)
        await _refuse(socket, reason, final=False, level=logging.INFO)
    except ProtocolError as error:
        reason = str(error)
        await _refuse(socket, reason, final=not isinstance(error, Garbled))
    except PlanError as error:
        reason = f"{type(error).__name__}: {error}"
        await _refuse(socket, reason)
    except (ConnectionError, PeerUnreachable) as error:
        reason = f"connection broke: {error}"
    finally:
        if session is not None:
            session.detach(socket, reason)
            await owner.lost(session, reason, ended=ended)
        await close_socket(socket)
    return socket


async def _first_frame(
    socket: web.WebSocketResponse, parts: PartJoiner, codec: Codec[T], deadline_s: float
) -> T:
    """Each part of it by the deadline."""
    try:
        first = None
        while first is None:
            message = await socket.receive(timeout=deadline_s)
            first = _decode(parts, codec, message, "the first frame must be a binary Hello")
    except TimeoutError as error:
        raise Garbled(f"the first frame must be Hello, got none in {deadline_s} s") from error
    return first


def _decode(parts: PartJoiner, codec: Codec[T], message: WSMessage, what: str) -> T | None:
    if message.type is not WSMsgType.BINARY:
        raise ProtocolError(f"{what}: frames must be binary, got {message.type.name}")
    try:
        whole = parts.add(message.data)
        return None if whole is None else codec.decode(whole)
    except ProtocolError as error:
        raise Garbled(f"{what}: {error}") from error


async def _refuse(
    socket: web.WebSocketResponse, reason: str, *, final: bool = True, level: int = logging.WARNING
) -> None:
    _log.log(level, "refused: %s", reason)
    try:
        await send_frame(socket, encode(Refused(reason, final)))
    except ConnectionError:
        return  # it is gone already


def host_of(socket: web.WebSocketResponse) -> str:
    """The address that a connection comes from; empty where that is the server's own."""
    peer, own = (socket.get_extra_info(name) for name in ("peername", "sockname"))
    return "" if peer is None or own is None or peer[0] == own[0] else str(peer[0])
