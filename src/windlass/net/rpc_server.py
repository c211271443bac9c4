"""Server side of the connections of an HTTP route: admits peers and receives their frames.

See `rpc` for the protocol. Before the first frame is checked, the server does not know the peer. So
the server limits the size and the time of each first frame, and the total size of all first frames.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, TypeVar

import msgspec
from aiohttp import WSMessage, WSMsgType, web

from windlass.errors import PeerUnreachable, PlanError, ProtocolError
from windlass.net.messages import Codec, Garbled, MustWait, OwnerClosed, Refused, encode
from windlass.net.rpc import Session
from windlass.net.server import FIRST_FRAMES, OPEN_SOCKETS
from windlass.net.sockets import MAX_PART_NBYTES, PartJoiner, close_socket, send_frame
from windlass.wording import counted

_log = logging.getLogger(__name__)

FIRST_FRAME_S = 120.0
"""Seconds within which the whole first frame of a connection must arrive."""
MAX_WAITING_NBYTES = 1 << 29
"""Largest size in bytes of the incomplete first frames of all connections together."""
_CLOSED = frozenset({WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED})

T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=Session)  # type: ignore[type-arg]  # of any commands
FrameT_contra = TypeVar("FrameT_contra", contravariant=True)


class Owner(Protocol[FrameT_contra, SessionT]):
    """Object that handles the peers of a route: `serve` calls it for each connection."""

    async def admit(
        self, first: FrameT_contra, socket: web.WebSocketResponse
    ) -> tuple[SessionT, msgspec.Struct] | None:
        """Decide whether to admit a peer that has sent `first`, the first frame of the connection `socket`.

        Returns:
            Session of the peer, and the welcome that `serve` then sends. None to close the connection without a welcome.

        Raises:
            ProtocolError: the peer is refused and must not connect again.
            MustWait: the peer is refused, but may connect again later.
            PlanError: the peer's description of itself is inconsistent; it must not connect again.
        """
        ...

    async def admitted(self, session: SessionT) -> None:
        """React to a new connection of an admitted peer. Called after `serve` has sent welcome and unanswered calls."""
        ...

    async def received(self, session: SessionT, frame: FrameT_contra) -> None:
        """Handle a frame that arrived after the first frame.

        Raises:
            ProtocolError: the peer must not send this frame. `serve` then ends the connection.
        """
        ...

    async def lost(self, session: SessionT, reason: str, *, ended: bool) -> None:
        """React to the end of a connection. May be called more than once for a session.

        Args:
            session: session of the peer.
            reason: why the connection ended, in one line.
            ended: True if the peer's side closed the connection, for example because the peer's process ended. False if
                the peer only missed a heartbeat or did not read: its process may still run.
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
    """Serve one connection until it ends. An error of one peer does not affect other peers.

    Args:
        request: request that opens the WebSocket.
        owner: object that handles the peers of the route.
        codec: decoder of the peers' frames.
        heartbeat_s: seconds within which the answer to each ping, and each part of the first frame, must arrive.
        max_nbytes: largest size of a frame.
    """
    # Large frames arrive in parts. Compression is off, because a small compressed frame could expand
    # to a thousand times its size.
    socket = web.WebSocketResponse(
        heartbeat=heartbeat_s, max_msg_size=min(MAX_PART_NBYTES, max_nbytes), compress=False
    )
    await socket.prepare(request)
    request.app[OPEN_SOCKETS].add(socket)
    session: SessionT | None = None
    parts = PartJoiner(max_nbytes)
    waiting = request.app[FIRST_FRAMES]
    reason, ended = "connection closed", False
    try:
        first = await _first_frame(socket, parts, codec, heartbeat_s, waiting)
        admitted = await owner.admit(first, socket)
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
        # The peer's process may still run if it only missed a heartbeat (TimeoutError), or if this server
        # cut the connection because the peer did not read.
        ended = not (session.was_cut or isinstance(socket.exception(), TimeoutError))
    except MustWait as error:
        # This refusal needs no warning in the log. If its reason is an error, `Owner.admit` has logged this error.
        reason = str(error)
        level = logging.DEBUG if isinstance(error, OwnerClosed) else logging.INFO
        await _refuse(socket, reason, final=False, level=level)
    except ProtocolError as error:
        reason = str(error)
        await _refuse(socket, reason, final=not isinstance(error, Garbled))
    except PlanError as error:
        reason = f"{type(error).__name__}: {error}"
        await _refuse(socket, reason)
    except (ConnectionError, PeerUnreachable) as error:
        reason = f"connection broke: {error}"
        if session is None:
            _log.info("%s", reason)
    finally:
        if session is not None:
            session.detach(socket, reason)
            await owner.lost(session, reason, ended=ended)
        await close_socket(socket)
    return socket


async def _first_frame(
    socket: web.WebSocketResponse,
    parts: PartJoiner,
    codec: Codec[T],
    deadline_s: float,
    waiting: set[PartJoiner],
) -> T:
    """Receive the first frame: each part within `deadline_s`, and the whole frame within `FIRST_FRAME_S`.

    Refuse the connection if the incomplete first frames of all connections together exceed `MAX_WAITING_NBYTES`, and this
    connection's frame exceeds an equal share of that limit.

    Args:
        socket: connection.
        parts: joiner of the connection's parts.
        codec: decoder of the peers' frames.
        deadline_s: seconds for each part.
        waiting: joiners of all connections whose first frame is incomplete.

    Raises:
        ConnectionResetError: the peer closed the connection.
        Garbled: the frame did not arrive in time, or cannot be decoded.
        MustWait: the server has too many incomplete first frames; the peer may try again.
        ProtocolError: the message is not a binary frame.
    """
    waiting.add(parts)
    try:
        async with asyncio.timeout(FIRST_FRAME_S):
            while True:
                message = await socket.receive(timeout=deadline_s)
                if message.type in _CLOSED:
                    raise ConnectionResetError("closed before the first frame")
                first = _decode(parts, codec, message, "the first frame")
                if first is not None:
                    return first
                share = MAX_WAITING_NBYTES // len(waiting)
                if parts.nbytes > share and sum(p.nbytes for p in waiting) > MAX_WAITING_NBYTES:
                    raise MustWait(
                        f"the incomplete first frames of {counted(len(waiting), 'connection')} exceed "
                        f"{MAX_WAITING_NBYTES} bytes in total; try again"
                    )
    except TimeoutError as error:
        raise Garbled(
            f"the first frame must arrive within {deadline_s} s per part and "
            f"{FIRST_FRAME_S} s in total"
        ) from error
    finally:
        waiting.discard(parts)


def _decode(parts: PartJoiner, codec: Codec[T], message: WSMessage, what: str) -> T | None:
    """Add a message to `parts`. Return the decoded frame if this message completes it, otherwise None.

    Raises:
        ProtocolError: the message is not binary.
        Garbled: the frame is damaged.
    """
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
    """Log the reason, and send the peer a refusal."""
    _log.log(level, "refused: %s", reason)
    try:
        await send_frame(socket, encode(Refused(reason, final)))
    except ConnectionError:
        # The peer has already disconnected.
        return


def host_of(socket: web.WebSocketResponse) -> str:
    """Return the IP address of a connection's peer.

    Return "" if the peer's or the server's address is unknown, or if both are the same.
    """
    peer, own = (socket.get_extra_info(name) for name in ("peername", "sockname"))
    return "" if peer is None or own is None or peer[0] == own[0] else str(peer[0])
