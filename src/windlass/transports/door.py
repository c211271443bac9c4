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
from typing import final

from windlass.errors import ConfigError, PeerUnreachable, TransportUnavailable
from windlass.telemetry.clock import Deadline
from windlass.transports.addresses import is_wildcard, split_host_port
from windlass.transports.base import PeerEndpoint

__all__ = ["INCARNATION_NBYTES", "Door", "Doorway"]

INCARNATION_NBYTES = 16
"""Characters of an incarnation, all ASCII."""
_MAX_VISITORS = 4096
ACCEPT_AGAIN_S = 0.1

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
            if _has_ended(visitor):
                visitor.close()
            else:
                staying.append(visitor)
        self._visitors = staying


@final
class Doorway:
    """The other side: a connection to the door of one incarnation of one peer.

    Raises:
        PeerUnreachable: nobody listens, somebody else does, or no answer by the deadline.
    """

    def __init__(self, endpoint: PeerEndpoint, deadline: Deadline) -> None:
        try:
            host, port = split_host_port(endpoint.address)
        except ConfigError as error:
            raise PeerUnreachable(f"{endpoint.transport}: {error}") from error
        try:
            self._socket = socket.create_connection(
                (host, port), timeout=max(deadline.remaining_s, 0.001)
            )
        except OSError as error:
            raise PeerUnreachable(f"{deadline.purpose}: nothing answers: {error}") from error
        try:
            self._check(endpoint, deadline)
        except BaseException:  # whatever it was: no socket may be left behind
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def has_ended(self) -> bool:
        """Whether the peer's process, or its transport, is gone."""
        return _has_ended(self._socket)

    def wait_ended(self, timeout_s: float) -> bool:
        """As `has_ended`, but waits for it."""
        try:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            return bool(waiting.poll(max(timeout_s, 0.0) * 1e3)) and self.has_ended()
        except (OSError, ValueError):  # closed by this side
            return True

    def watch(self) -> None:
        """Return once the peer has ended or this side has called `close`."""
        waiting = select.poll()
        try:
            waiting.register(self._socket, select.POLLIN)
            while not self.has_ended():
                waiting.poll()
        except (OSError, ValueError):  # closed by this side
            return

    def close(self) -> None:
        """Let go of the peer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `watch`
        self._socket.close()

    def _check(self, endpoint: PeerEndpoint, deadline: Deadline) -> None:
        if self._read(deadline) != endpoint.incarnation.encode():
            raise PeerUnreachable(
                f"{deadline.purpose}: another process than {endpoint.incarnation!r} is there; "
                "nothing was sent"
            )

    def _read(self, deadline: Deadline) -> bytes:
        answer = b""
        try:
            while len(answer) < INCARNATION_NBYTES:
                self._socket.settimeout(max(deadline.remaining_s, 0.001))
                more = self._socket.recv(INCARNATION_NBYTES - len(answer))
                if not more:
                    break
                answer += more
        except OSError as error:
            raise PeerUnreachable(
                f"{deadline.purpose}: no answer within {deadline.seconds} s; nothing was sent"
            ) from error
        return answer


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
