"""Accept the connections of a server, so that clients without a token cost it very little.

A connection is a *stranger* until one of its requests has presented a valid token; from then on, it is
a *member*. The server keeps few strangers, each for a short time. If the server runs out of file
descriptors, it closes strangers first. So strangers cannot keep members out, and a flood of strangers
cannot fill a disk with error logs. If there are too many members, a further member gets an error
response. Some file descriptors are reserved for files that this process opens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast, final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from windlass.net.sockets import keep_alive

BACKLOG = 16
"""Largest number of connections that wait in the kernel to be accepted. A small number is enough,
because this process accepts quickly."""
STRANGER_S = 10.0
"""Seconds that a connection has to send a request with a valid token; otherwise the server closes it."""
MAX_STRANGERS = 256
"""Largest number of strangers. A new stranger replaces the oldest."""
STRANGERS_SHARE = 4
"""Strangers get at most 1/`STRANGERS_SHARE` of the file descriptors of this process."""
RESERVED_FILES = 32
"""Number of file descriptors, at most 1/`RESERVED_SHARE` of all, that members do not get. Larger than
`BACKLOG`, because asyncio accepts up to `BACKLOG` connections at once."""
RESERVED_SHARE = 4
ACCEPT_TURNS = 3
"""Iterations of the event loop after which aiohttp has all connections that asyncio has accepted."""
NO_ROOM = "no file descriptor is left for another connection (ulimit -n)"
ACCEPT_ERROR = "socket.accept() out of system resource"
LOG_PERIOD_S = 60.0
MAX_LOGS = 20


@final
class RateLimit(logging.Filter):
    """Filter that passes `max_records` log records per `LOG_PERIOD_S` and reports how many it dropped.

    An error caused by data that is not HTTP becomes one line without a traceback.
    """

    def __init__(self, max_records: int = MAX_LOGS) -> None:
        super().__init__()
        self._max_records = max_records
        self._began_s, self._num_seen = -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a record, and return whether to log it.

        The first record of a period also contains the number of records that the filter dropped in the previous period.
        """
        now_s = time.monotonic()
        left_out = 0
        if now_s - self._began_s >= LOG_PERIOD_S:
            left_out = max(self._num_seen - self._max_records, 0)
            self._began_s, self._num_seen = now_s, 0
        self._num_seen += 1
        if self._num_seen > self._max_records:
            return False
        error = record.exc_info[1] if record.exc_info else None
        notes = [f"{left_out} more were not logged"] if left_out else []
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            notes.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]!r}")
        if notes:
            record.msg = f"{record.getMessage()} ({'; '.join(notes)})"
            record.args = ()
        return True


request_log = logging.getLogger("windlass.net.requests")
"""Logger of errors of single requests, for `web.AppRunner(logger=...)`."""
request_log.addFilter(RateLimit())


@final
class _AcceptErrors(logging.Filter):
    """Filter for asyncio's logger, which otherwise logs again and again that it cannot accept connections."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit(max_records=1)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record: at most one error of accepting per period."""
        return not str(record.msg).startswith(ACCEPT_ERROR) or self._limit.filter(record)


_accept_errors = _AcceptErrors()


@final
class Listener:
    """Bound socket that accepts connections and passes them to an aiohttp application.

    Args:
        runner: runner of the application, after its `setup`.
        bound: bound socket; the listener closes it.
        tls: TLS context; None for plain connections.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        bound: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._runner, self._socket, self._tls = runner, bound, tls
        self._max_strangers = MAX_STRANGERS
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files != resource.RLIM_INFINITY:
            self._max_strangers = max(min(MAX_STRANGERS, num_files // STRANGERS_SHARE), 1)
        self._strangers: dict[object, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Start to accept connections."""
        logging.getLogger("asyncio").addFilter(_accept_errors)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Accepted(self._on_accepted), sock=self._socket, backlog=BACKLOG
        )

    def admit(self, request: web.Request) -> bool:
        """Stop treating the connection of a request as a stranger. Call this after the request has shown a valid token.

        Return False if the connection is a stranger and has a file descriptor that is reserved for files. This happens
        when all other descriptors are in use. The connection then stays a stranger, and the caller must refuse the
        request.
        """
        key = request.get_extra_info("socket")
        if key in self._strangers and _takes_reserved(key):
            request_log.warning("%s is refused: %s", request.remote, NO_ROOM)
            return False
        self._forget(key)
        return True

    async def stop(self) -> None:
        """Stop accepting, and cancel TLS handshakes. Connections that aiohttp serves stay open. Idempotent."""
        await stop_accepting(self._socket)
        for handshake in self._handshakes:
            handshake.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def _on_accepted(self, transport: asyncio.Transport, accepted: _Accepted) -> None:
        """Record a new connection as a stranger, and start a timer that drops it. Then serve it or begin its handshake.

        If there are too many strangers, or the connection has a reserved file descriptor, first drop strangers.
        """
        key = transport.get_extra_info("socket")
        keep_alive(key)
        if len(self._strangers) >= self._max_strangers or _takes_reserved(key):
            self._make_room()
        timer = asyncio.get_running_loop().call_later(STRANGER_S, self._drop, key)
        self._strangers[key] = transport, timer
        if self._tls is None:
            self._serve(transport, accepted)
            return
        # Read nothing before TLS is set up to decrypt the bytes.
        transport.pause_reading()
        handshake = asyncio.get_running_loop().create_task(
            self._shake_hands(transport, accepted, self._tls)
        )
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(
        self, transport: asyncio.Transport, accepted: _Accepted, tls: ssl.SSLContext
    ) -> None:
        """Make the TLS handshake of a connection, and pass the connection to aiohttp. Forget the connection if this fails."""
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, accepted, tls, server_side=True, ssl_handshake_timeout=STRANGER_S
            )
        # ssl.SSLError, a lost connection and TimeoutError are all OSErrors.
        except OSError as error:
            request_log.info("TLS: %s: %s", type(error).__name__, error)
            return
        finally:
            if transport.is_closing():
                self._forget(transport.get_extra_info("socket"))
        if secured is not None and not secured.is_closing():
            self._serve(secured, accepted)

    def _serve(self, transport: asyncio.Transport, accepted: _Accepted) -> None:
        """Pass a connection, and the bytes that have arrived over it, to aiohttp. Abort it if the application has ended."""
        if self._runner.server is None:
            transport.abort()
            return
        handler = self._runner.server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        if accepted.received:
            handler.data_received(bytes(accepted.received))

    def _make_room(self) -> None:
        """Drop all strangers with closed connections. If there are none, drop the oldest stranger."""
        gone = [key for key, (transport, _) in self._strangers.items() if transport.is_closing()]
        for key in gone or list(self._strangers)[:1]:
            self._drop(key)

    def _drop(self, key: object) -> None:
        """Close the connection of a stranger at once, and remove it from the strangers."""
        transport, _ = self._strangers[key]
        self._forget(key)
        transport.abort()

    def _forget(self, key: object) -> None:
        """Remove a connection from the strangers, if it is one, and cancel its timer."""
        _, timer = self._strangers.pop(key, (None, None))
        if timer is not None:
            timer.cancel()


def _takes_reserved(connection: socket.socket) -> bool:
    """Return whether a connection has one of the reserved file descriptors, which have the highest numbers.

    Linux assigns the lowest free number, so a connection gets a reserved number only if all lower numbers are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    return connection.fileno() >= limit - min(RESERVED_FILES, limit // RESERVED_SHARE)


@final
class _Accepted(asyncio.Protocol):
    """Connection before aiohttp takes it over. This object keeps the bytes that arrive before that."""

    def __init__(self, on_accepted: Callable[[asyncio.Transport, _Accepted], None]) -> None:
        self._on_accepted = on_accepted
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the new connection to `on_accepted`."""
        self._on_accepted(cast("asyncio.Transport", transport), self)

    def data_received(self, data: bytes) -> None:
        """Keep bytes until aiohttp takes the connection over."""
        self.received += data


async def stop_accepting(bound: socket.socket) -> None:
    """Stop accepting connections on `bound`, and wait until aiohttp has all connections that were accepted. Idempotent.

    asyncio first accepts a connection, and creates its transport some turns of the event loop later. If the server closed
    between these two steps, asyncio would drop the connection without closing it (`Server._attach` of Python 3.11 to
    3.13).
    """
    if bound.fileno() >= 0:
        asyncio.get_running_loop().remove_reader(bound)
    for _ in range(ACCEPT_TURNS):
        await asyncio.sleep(0)
