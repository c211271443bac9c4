"""Accepting connections of a server, so that whoever has no token costs it next to nothing.

A connection is a stranger's until a request of it has shown a token. Strangers are few, short-lived,
and the first to go when there is no room: none of them can hold up who belongs here, and no flood
of them fills a disk with errors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from typing import final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["Listener", "RateLimit", "request_log", "stop_accepting"]

BACKLOG = 16
"""Connections that the kernel completes and nobody has accepted: accepting is quick."""
STRANGER_S = 10.0
"""From a connection to its first request with a token."""
MAX_STRANGERS = 256
STRANGERS_SHARE = 4
"""Of the descriptors that this process may have open, strangers get one in so many."""
ACCEPT_TURNS = 3
"""Of the loop, from a connection that asyncio has accepted to one that aiohttp knows."""
SETTLED_S = 1.0
"""By then a connection that was accepted has a transport, unless it has lost it again."""
ACCEPT_ERROR = "socket.accept() out of system resource"
LOG_PERIOD_S = 60.0
MAX_LOGS = 20


@final
class RateLimit(logging.Filter):
    """Lets `max_records` of a logger's records through in a period, and says how many it has left out.

    What a peer sends that is not even HTTP is one line, and no traceback of ours.
    """

    def __init__(self, max_records: int = MAX_LOGS, period_s: float = LOG_PERIOD_S) -> None:
        super().__init__()
        self._max_records, self._period_s = max_records, period_s
        self._began_s, self._num_seen = -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        left_out = 0
        if now_s - self._began_s >= self._period_s:
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
"""For `web.AppRunner(logger=...)`: errors of single requests."""
request_log.addFilter(RateLimit())


@final
class _AcceptErrors(logging.Filter):
    """Of what asyncio logs, only that no connection can be accepted, which it does without end."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit(max_records=1)

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(ACCEPT_ERROR) or self._limit.filter(record)


_accept_errors = _AcceptErrors()


@final
class Listener:
    """Accepts connections for an aiohttp application.

    Args:
        runner: of the application; set up.
        bound: owned by the listener from here on.
        stranger_s: for a connection to be `known`; it is closed otherwise.
        max_strangers: beyond which the oldest stranger makes room for the next; at most a quarter of
            the file descriptors that this process may have.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        bound: socket.socket,
        *,
        stranger_s: float = STRANGER_S,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._runner, self._socket, self._stranger_s = runner, bound, stranger_s
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files != resource.RLIM_INFINITY:
            max_strangers = max(min(max_strangers, num_files // STRANGERS_SHARE), 1)
        self._max_strangers = max_strangers
        self._strangers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Begin to accept."""
        logging.getLogger("asyncio").addFilter(_accept_errors)
        self._server = await asyncio.get_running_loop().create_server(
            self._make_protocol, sock=self._socket, backlog=BACKLOG
        )

    def known(self, request: web.Request) -> None:
        """The request's connection has shown a token: it is no stranger's."""
        self._forget(request.protocol)

    async def stop(self) -> None:
        """Accept nobody more. Idempotent."""
        await stop_accepting(self._socket)
        if self._server is not None:
            self._server.close()

    def _make_protocol(self) -> web.RequestHandler:
        if self._runner.server is None:
            raise ConnectionAbortedError("the server is closed")
        if len(self._strangers) >= self._max_strangers:
            self._make_room()
        protocol = self._runner.server()
        self._strangers[protocol] = asyncio.get_running_loop().call_later(
            self._stranger_s, self._drop, protocol
        )
        return protocol

    def _make_room(self) -> None:
        """Who has gone by itself is forgotten; if nobody has, the oldest stranger must go."""
        made_before_s = asyncio.get_running_loop().time() - SETTLED_S
        gone = [
            stranger
            for stranger, timer in self._strangers.items()
            if stranger.transport is None and timer.when() - self._stranger_s < made_before_s
        ]
        for stranger in gone or list(self._strangers)[:1]:
            self._drop(stranger)

    def _drop(self, stranger: web.RequestHandler) -> None:
        self._forget(stranger)
        if stranger.transport is not None:
            stranger.transport.abort()

    def _forget(self, protocol: web.RequestHandler) -> None:
        timer = self._strangers.pop(protocol, None)
        if timer is not None:
            timer.cancel()


async def stop_accepting(bound: socket.socket) -> None:
    """Have the loop accept nobody more; return once whoever was is known to aiohttp. Idempotent.

    A server that is closed between accepting a connection and making its transport drops it without
    closing it (asyncio, `Server._attach` of Python 3.11 to 3.13).
    """
    if bound.fileno() >= 0:
        asyncio.get_running_loop().remove_reader(bound)
    for _ in range(ACCEPT_TURNS):
        await asyncio.sleep(0)
