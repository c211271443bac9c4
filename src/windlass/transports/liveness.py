"""A door: proves which process is behind an address, and tells at once when it ends.

Verbs have neither: a write to a dead peer stays in progress for seconds, for ever where the device
retries for ever, and a queue pair says nothing about the process behind it. Each transport listens
on a port; who connects is told its incarnation and keeps the connection, which the kernel ends
with the process.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from enum import Enum, auto
from typing import final

from windlass.errors import ConfigError, PeerUnreachable, TransportUnavailable
from windlass.net.addresses import is_wildcard, split_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import PeerEndpoint

__all__ = ["INCARNATION_NBYTES", "Door", "Doorway"]

INCARNATION_NBYTES = 16
"""Characters of an incarnation, all ASCII."""
_MAX_VISITORS = 4096
ACCEPT_AGAIN_S = 0.1
KNOCK_S = 1.0
"""How long to wait at a door when the connection to it broke, and until it is tried again."""

_log = logging.getLogger(__name__)


@final
class Door:
    """Listens on `host` at a port that the kernel picks, until `close`.

    Args:
        host: the address to listen on.
        incarnation: 16 ASCII characters that tell this transport from any other.
        transport: registry name, for messages.

    Raises:
        ConfigError: `host` is every address.
        TransportUnavailable: `host` is no address of this machine.
    """

    def __init__(self, host: str, incarnation: str, transport: str) -> None:
        if is_wildcard(host):
            raise ConfigError(
                f"{transport}: host must be one address of this machine, got {host!r}"
            )
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransportUnavailable(
                f"{transport}: host must be an address of this machine, got {host!r}: {error}"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._incarnation = incarnation.encode()
        self._closed = threading.Event()
        self._visitors: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name=f"{transport}-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; peers see this transport as gone. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)
        for visitor in self._visitors:
            visitor.close()
        self._visitors.clear()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:
                # Too many open files, or a visitor that left at once, is no reason to stop.
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                _log.warning("door at port %s: %s", self.port, error)
                continue
            self._see_out()
            if len(self._visitors) >= _MAX_VISITORS:
                visitor.close()
                continue
            try:
                visitor.setblocking(False)
                visitor.send(self._incarnation)
            except OSError:
                visitor.close()
                continue
            self._visitors.append(visitor)

    def _see_out(self) -> None:
        """Close the connections of visitors that have left."""
        staying = []
        for visitor in self._visitors:
            if _line_of(visitor) is _Line.WHOLE:
                staying.append(visitor)
            else:
                visitor.close()
        self._visitors = staying


@final
class Doorway:
    """The other side: a connection to the door of one incarnation of one peer. Thread-safe.

    Only the peer's kernel ends it in order, with the process. A connection that was broken proves
    nothing, because the network may have done it: so the door is gone to once more.

    Raises:
        PeerUnreachable: nobody listens, somebody else does, or no answer by the deadline.
    """

    def __init__(self, endpoint: PeerEndpoint, deadline: Deadline) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._is_broken = self._gone = False
        self._again_s = 0.0
        self._broken: list[socket.socket] = []
        """Closed at the end: a thread may be waiting with one."""
        try:
            self._socket = _enter(endpoint, deadline)
        except _SomebodyElseError as error:
            raise PeerUnreachable(f"{deadline.purpose}: {error}; nothing was sent") from error
        except OSError as error:
            raise PeerUnreachable(
                f"{deadline.purpose}: nothing answers: {error}; nothing was sent"
            ) from error

    def has_ended(self, *, knock: bool = True) -> bool:
        """Whether the peer's process, or its transport, is gone. May take `KNOCK_S`, once in a while.

        Without `knock` never: a connection that was broken tells nothing then. For callers that
        others wait for.
        """
        if self._gone or self._closed.is_set():
            return True
        match self._look():
            case _Line.WHOLE:
                return False
            case _Line.ENDED:
                return True
            case _Line.BROKEN:
                return knock and self._knock_again()

    def _look(self) -> _Line:
        """A socket tells of its error once, and from then on as if it had ended in order."""
        with self._looking:
            line = _Line.BROKEN if self._is_broken else _line_of(self._socket)
            self._is_broken = line is _Line.BROKEN
            return line

    def wait_ended(self, timeout_s: float) -> bool:
        """As `has_ended`, but waits for it."""
        self._wait(max(timeout_s, 0.0))
        return self._look() is not _Line.WHOLE and self.has_ended()

    def watch(self) -> None:
        """Return once the peer has ended or this side has called `close`."""
        while not self.has_ended():
            self._wait(None)

    def close(self) -> None:
        """Let go of the peer."""
        self._closed.set()
        with self._lock:
            for connection in (*self._broken, self._socket):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes `watch`
                connection.close()

    def _wait(self, timeout_s: float | None) -> None:
        """Until something happens to the connection."""
        connection = self._socket
        if self._look() is _Line.BROKEN:
            self._closed.wait(KNOCK_S if timeout_s is None else min(timeout_s, KNOCK_S))
            return
        waiting = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed by this side
            waiting.register(connection, select.POLLIN)
            waiting.poll(None if timeout_s is None else timeout_s * 1e3)

    def _knock_again(self) -> bool:
        """Whether nobody is at the door any more, or somebody else. Silence is no answer."""
        with self._lock:
            if self._gone or self._closed.is_set() or time.monotonic() < self._again_s:
                return self._gone or self._closed.is_set()
            if self._look() is not _Line.BROKEN:
                return False  # another thread has
            purpose = f"door of {self._endpoint.address}"
            try:
                fresh = _enter(self._endpoint, Deadline.after(KNOCK_S, purpose))
            except (ConnectionRefusedError, _SomebodyElseError):
                self._gone = True
            except OSError as error:
                self._again_s = time.monotonic() + KNOCK_S
                _log.warning("%s: the connection broke, and no answer: %s", purpose, error)
            else:
                self._broken.append(self._socket)
                with self._looking:
                    self._socket, self._is_broken = fresh, False
            return self._gone


class _SomebodyElseError(Exception):
    """Another process is at the door."""


class _Line(Enum):
    """What became of a connection."""

    WHOLE = auto()
    ENDED = auto()
    BROKEN = auto()


def _enter(endpoint: PeerEndpoint, deadline: Deadline) -> socket.socket:
    """A connection to the door of `endpoint`.

    Raises:
        PeerUnreachable: the endpoint has no address.
        OSError: nobody listens, or no answer by the deadline.
    """
    try:
        host, port = split_host_port(endpoint.address)
    except ConfigError as error:
        raise PeerUnreachable(f"{endpoint.transport}: {error}") from error
    connection = socket.create_connection((host, port), timeout=max(deadline.remaining_s, 0.001))
    try:
        _check(connection, endpoint, deadline)
        connection.setblocking(False)
    except BaseException:  # whatever it was: no socket may be left behind
        connection.close()
        raise
    return connection


def _check(connection: socket.socket, endpoint: PeerEndpoint, deadline: Deadline) -> None:
    answer = b""
    while len(answer) < INCARNATION_NBYTES:
        connection.settimeout(max(deadline.remaining_s, 0.001))
        more = connection.recv(INCARNATION_NBYTES - len(answer))
        if not more:
            raise ConnectionResetError("the connection was closed before an answer")
        answer += more
    if answer != endpoint.incarnation.encode():
        raise _SomebodyElseError(f"another process than {endpoint.incarnation!r} is there")


def _line_of(connection: socket.socket) -> _Line:
    try:
        ended = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return _Line.WHOLE
    except OSError:
        return _Line.BROKEN
    return _Line.ENDED if ended else _Line.WHOLE
