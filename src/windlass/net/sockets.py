"""Frames over a WebSocket to a peer that may be slow or may have stopped reading.

A large frame is sent in parts, each with its own deadline. So a connection that still moves bytes
is kept, however large the frame is, and pings can be sent between parts. Without parts, a ping would
wait behind the whole frame, and the missing answer would end the connection.

aiohttp waits for space in a connection's buffer without a deadline, even when it closes the
connection, and a failed heartbeat does not end that wait. Without the deadlines of this module, a
stopped or hanging process would block its peer for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
import types
from asyncio.trsock import TransportSocket
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import SimpleNamespace
from typing import Self, final
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import WSCloseCode, web

from windlass.errors import PeerUnreachable, ProtocolError
from windlass.net.access import authorization
from windlass.net.tls import client_context

PART_NBYTES = 1 << 20
"""Largest frame in bytes that is sent whole."""
MAX_PART_NBYTES = PART_NBYTES + 3
"""Limit for aiohttp, which ends a connection when a WebSocket message of this size or more arrives."""
OTHER_DESCRIPTORS = 24
"""Number of file descriptors that a process needs besides its connections for rollouts."""
SEND_DEADLINE_S = 30.0
"""Seconds within which a part must be sent, so a peer that reads less than 35 kB/s counts as stopped.

A ping of the heartbeat waits behind one part and the buffers of both kernels, some MB in total.
"""
CLOSE_DEADLINE_S = 12.0
"""Seconds for closing a connection; more than the 10 s that aiohttp waits for the peer's close frame."""

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 20, 10, 6
"""Seconds of silence after which the kernel probes the peer, seconds between probes, and number of
unanswered probes that end a connection. Load balancers drop connections after 60 s of silence, and
address translation (NAT) after 350 s."""

_FIRST, _MIDDLE, _LAST = b"\xc1\x00", b"\xc1\x01", b"\xc1\x02"
"""Marks in front of the first, middle and last part of a frame. No frame begins like this, because
MessagePack never uses the byte c1."""

WebSocket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse

_locks: WeakKeyDictionary[WebSocket, asyncio.Lock] = WeakKeyDictionary()
"""Connection that has sent a frame in parts -> lock for each send. With the lock, frames keep their
order, and no frame is sent between the parts of another frame."""


def connection_error(error: BaseException) -> str:
    """Return a readable text for an error of a connection.

    aiohttp's own text for a refused connection is misleading, because it contains `ssl:default` even for http URLs.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        why = error.os_error.strerror or error.os_error
        return f"no connection to {error.host}:{error.port}: {why}"
    return f"{type(error).__name__}: {error}"


async def send_frame(
    websocket: WebSocket,
    data: bytes,
    deadline_s: float = SEND_DEADLINE_S,
    *,
    within_s: float | None = None,
    on_cut: Callable[[], None] | None = None,
) -> None:
    """Send a MessagePack frame, in parts of `PART_NBYTES` if it is longer. The receiver joins them with `PartJoiner`.

    Args:
        websocket: connection.
        data: the frame.
        deadline_s: seconds within which each part must be sent; otherwise this function cuts the connection.
        within_s: seconds within which the whole frame must be sent; None for no limit.
        on_cut: function that is called just before this function cuts the connection.

    Raises:
        ConnectionError: the connection is closed or was cut.
        aiohttp.ClientError, RuntimeError: aiohttp reports that the connection is closed.
    """
    if len(data) <= PART_NBYTES and not (_locks and websocket in _locks):
        within_s = deadline_s if within_s is None else min(deadline_s, within_s)
        await _send_part(websocket, data, _Cutter(websocket, within_s, on_cut))
        return
    loop = asyncio.get_running_loop()
    end = None if within_s is None else loop.time() + within_s
    lock = _locks.get(websocket)
    if lock is None:
        lock = _locks[websocket] = asyncio.Lock()
    async with lock:
        for part in _parts_of(data):
            left_s = deadline_s if end is None else min(deadline_s, max(end - loop.time(), 0.0))
            await _send_part(websocket, part, _Cutter(websocket, left_s, on_cut))


async def _send_part(websocket: WebSocket, part: bytes, cutter: _Cutter) -> None:
    """Send one WebSocket message. Raise ConnectionError if `cutter` cuts the connection during the send."""
    try:
        await _within(cutter, websocket.send_bytes(part))
    except (ConnectionError, aiohttp.ClientError):
        if not cutter.has_cut:
            raise
    if cutter.has_cut:
        raise ConnectionError(f"the peer did not read within {cutter.deadline_s:g} s")


@types.coroutine
def _within(
    cutter: _Cutter, sending: Coroutine[object, object, None]
) -> Generator[object, object, None]:
    """Await the coroutine `sending`. Start the timer of `cutter` only if the send has to wait (rare for small frames)."""
    with contextlib.suppress(StopIteration):
        waits_for = sending.send(None)
        with cutter:
            while True:
                try:
                    resumed_with = yield waits_for
                # Also pass a cancellation on to the send.
                except BaseException as error:  # noqa: BLE001
                    waits_for = sending.throw(error)
                else:
                    waits_for = sending.send(resumed_with)


def _parts_of(data: bytes) -> Iterator[bytes]:
    """Yield a frame in parts, each with its mark; yield a short frame whole and without a mark."""
    if len(data) <= PART_NBYTES:
        yield data
        return
    for begin in range(0, len(data), PART_NBYTES):
        end = begin + PART_NBYTES
        mark = _FIRST if begin == 0 else _LAST if end >= len(data) else _MIDDLE
        yield mark + data[begin:end]


@final
class PartJoiner:
    """Buffer that joins the parts that `send_frame` has sent over one connection.

    Attributes:
        nbytes: size of the parts of the incomplete frame.
    """

    __slots__ = ("_max_nbytes", "_parts", "nbytes")

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._parts: list[bytes] = []
        self.nbytes = 0

    def _drop(self) -> None:
        """Remove the parts of an incomplete frame."""
        self._parts.clear()
        self.nbytes = 0

    def add(self, data: bytes) -> bytes | None:
        """Add a WebSocket message. Return the whole frame if this message completes it; otherwise None.

        If the message begins a new frame while another frame is incomplete, drop the incomplete frame, because its
        sender has given it up.

        Raises:
            ProtocolError: the part is out of order or has a wrong size, or the frame is too large.
        """
        if data[:1] != _FIRST[:1]:
            self._drop()
            return data
        mark, part = data[:2], data[2:]
        if mark == _FIRST:
            self._drop()
        elif mark not in {_MIDDLE, _LAST} or not self._parts:
            raise ProtocolError(
                f"frame: must have its parts in order, got mark {mark.hex()} after {len(self._parts)} parts"
            )
        if mark != _LAST and len(part) != PART_NBYTES:
            raise ProtocolError(f"frame: a part must have {PART_NBYTES} bytes, got {len(part)}")
        if self.nbytes + len(part) > self._max_nbytes:
            raise ProtocolError(f"frame: must have at most {self._max_nbytes} bytes, got more")
        self._parts.append(part)
        self.nbytes += len(part)
        if mark != _LAST:
            return None
        whole = b"".join(self._parts)
        self._drop()
        return whole


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit if the system allows it.

    Return the soft limit afterwards; `sys.maxsize` if there is none.

    The usual soft limit of 1024 exists for programs that use `select`; a fleet may need more files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Another thread or process may have lowered the hard limit in the meantime.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def keep_alive(connection: socket.socket | TransportSocket) -> None:
    """Enable TCP keepalive, so that no load balancer or NAT drops an idle connection. Skip sockets that are not TCP."""
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _kept_alive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a new socket for aiohttp, with TCP keepalive."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    keep_alive(connection)
    return connection


def open_http(
    token: str, *, to_controller: bool, many_connections: bool = False
) -> aiohttp.ClientSession:
    """Return an HTTP session that sends `token` with each request. The caller must close the session.

    If a server redirects a request, the request raises PeerUnreachable: otherwise the token could reach another server.

    Args:
        token: token for the server; empty for none.
        to_controller: see `client_context`.
        many_connections: whether to allow as many connections as the limit of file descriptors permits, and
            to set no default deadline. Otherwise, the session has at most 100 connections, and a request may take
            300 s. Requests beyond the limit wait for a connection.

    Raises:
        ConfigError: see `client_context`.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    tls = client_context(to_controller=to_controller)
    # Use only half of the descriptors, because aiohttp may keep one idle connection for each connection in use.
    limit = max((raise_file_limit() - OTHER_DESCRIPTORS) // 2, 1) if many_connections else 100
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=limit, ssl=True if tls is None else tls, socket_factory=_kept_alive_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None if many_connections else 300),
        headers=authorization(token),
        trace_configs=[trace],
    )


async def _refuse_redirect(
    _http: aiohttp.ClientSession,
    _context: SimpleNamespace,
    redirected: aiohttp.TraceRequestRedirectParams,
) -> None:
    """Raise `PeerUnreachable`, so that the session follows no redirect. aiohttp calls this for each redirect."""
    where = redirected.response.headers.get("Location", "")[:200]
    raise PeerUnreachable(f"{redirected.url} redirects to {where!r}, which is not followed")


async def close_socket(
    websocket: WebSocket,
    *,
    code: int = WSCloseCode.OK,
    deadline_s: float = CLOSE_DEADLINE_S,
) -> None:
    """Close a connection with WebSocket close code `code`; cut the connection after `deadline_s`. Idempotent."""
    with _Cutter(websocket, deadline_s):
        await websocket.close(code=code)


@final
class _Cutter:
    """Context manager that cuts a connection if its block has not ended by the deadline.

    After the cut, a coroutine that waits for space in the connection's buffer gets a `ConnectionError`. Cancelling
    the coroutine would also cancel other coroutines, because in aiohttp all coroutines that wait for this space share
    one future. `Transport.close` is no alternative, because it also waits for the space.
    """

    __slots__ = ("_on_cut", "_timer", "_websocket", "deadline_s", "has_cut")

    def __init__(
        self, websocket: WebSocket, deadline_s: float, on_cut: Callable[[], None] | None = None
    ) -> None:
        self._websocket, self._on_cut = websocket, on_cut
        self.deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None
        self.has_cut = False

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self.deadline_s, self._cut)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        """Call `on_cut`, and shut the connection down in both directions."""
        self.has_cut = True
        if self._on_cut is not None:
            self._on_cut()
        connection = self._websocket.get_extra_info("socket")
        if connection is not None:
            # The connection may have ended by itself.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
