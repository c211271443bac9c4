"""Liveness of peers: identify the process behind an address, and detect its end at once.

RDMA verbs can do neither of these. A queue pair does not identify the process that owns it. A write to
a dead peer stays in progress for seconds, or for ever if the device retries without limit. Therefore
each transport between hosts listens on a TCP port. A peer that connects receives the transport's
incarnation and keeps the connection open. The kernel closes the connection when the process ends.
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
from windlass.transports.inbound import OPENING
from windlass.transports.peers import PeerEndpoint

INCARNATION_NBYTES = 16
"""Number of ASCII characters of an incarnation."""
_MAX_CLIENTS = 4096
"""Maximum number of connections of a listener. The listener closes additional connections at once."""
ACCEPT_AGAIN_S = 0.1
"""Pause in seconds after a failed `accept`."""
RECONNECT_S = 1.0
"""Longest duration in seconds of one attempt to reconnect, and pause in seconds after a failed attempt."""

_log = logging.getLogger(__name__)


def listen_on(host: str, transport: str) -> socket.socket:
    """Return a socket that listens on `host` at a port that the kernel chooses. The caller closes the socket.

    Raises:
        ConfigError: `host` is a wildcard address.
        TransportUnavailable: `host` is not an address of this machine.
    """
    if is_wildcard(host):
        raise ConfigError(f"{transport}: host must be one address of this machine, got {host!r}")
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with OPENING:
            return socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        raise TransportUnavailable(
            f"{transport}: host must be an address of this machine, got {host!r}: {error}"
        ) from error


@final
class LivenessListener:
    """TCP listener that sends this transport's incarnation to every peer that connects.

    Args:
        host: address to listen on; the kernel chooses the port.
        incarnation: 16 ASCII characters that identify this transport.
        transport: registry name, for messages.

    Raises:
        ConfigError, TransportUnavailable: see `listen_on`.
    """

    def __init__(self, host: str, incarnation: str, transport: str) -> None:
        self._listener = listen_on(host, transport)
        self.port = int(self._listener.getsockname()[1])
        self._incarnation = incarnation.encode()
        self._closed = threading.Event()
        self._clients: list[socket.socket] = []
        self._thread = threading.Thread(
            target=self._serve, name=f"{transport}-liveness", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections; peers then see that this transport has ended. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)
        for client in self._clients:
            client.close()
        self._clients.clear()

    def _serve(self) -> None:
        """Accept connections, and send the incarnation over each. Return after `close` is called.

        This method runs in the listener's thread.
        """
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                # The listener must continue after an error such as too many open files, or a client
                # that disconnected at once.
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                _log.warning(
                    "the liveness listener at port %s could not accept a connection: %s",
                    self.port,
                    error,
                )
                continue
            self._drop_closed()
            if len(self._clients) >= _MAX_CLIENTS:
                client.close()
                continue
            try:
                client.setblocking(False)
                client.send(self._incarnation)
            except OSError:
                client.close()
                continue
            self._clients.append(client)

    def _drop_closed(self) -> None:
        """Close connections that the peer has closed."""
        open_ones = []
        for client in self._clients:
            if _state_of(client) is _State.OPEN:
                open_ones.append(client)
            else:
                client.close()
        self._clients = open_ones


@final
class PeerLiveness:
    """Connection to the liveness listener of one incarnation of one peer. Thread-safe.

    When the peer's process or transport ends, the connection is closed normally. If the connection fails
    with an error, the cause may be the network. This class then reconnects, to find out whether the peer has ended.

    Args:
        endpoint: address and incarnation of the peer's listener.
        deadline: deadline of the first connection.

    Raises:
        PeerUnreachable: no process listens at the address, another process does, or the peer did not
            answer by the deadline.
    """

    def __init__(self, endpoint: PeerEndpoint, deadline: Deadline) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._is_broken = self._gone = False
        self._again_s = 0.0
        self._broken: list[socket.socket] = []
        """Broken connections. `close` closes them; until then a thread may still wait with one of them."""
        try:
            self._socket = _connect(endpoint, deadline)
        except _OtherProcessError as error:
            raise PeerUnreachable(f"{deadline.purpose}: {error}; nothing was sent") from error
        except OSError as error:
            raise PeerUnreachable(
                f"{deadline.purpose}: the peer does not answer: {error}; nothing was sent"
            ) from error

    def has_ended(self, *, reconnect: bool = True) -> bool:
        """Return True if the peer's process has ended, or the peer or this process has closed its transport.

        Args:
            reconnect: whether to reconnect if the connection is broken. The call may then take `RECONNECT_S`
                seconds. With False, the call does not block, and returns False for a broken connection. Pass
                False if the caller holds a lock that other threads need.
        """
        if self._gone or self._closed.is_set():
            return True
        match self._look():
            case _State.OPEN:
                return False
            case _State.ENDED:
                return True
            case _State.BROKEN:
                return reconnect and self._reconnect()

    def _look(self) -> _State:
        """Return the state of the connection. If it is BROKEN, record this, because a socket reports an error only once."""
        with self._looking:
            state = _State.BROKEN if self._is_broken else _state_of(self._socket)
            self._is_broken = state is _State.BROKEN
            return state

    def wait_ended(self, timeout_s: float, wake: int = -1) -> bool:
        """Wait until the peer has ended, `wake` is readable, or `timeout_s` has passed. Return whether the peer has ended.

        If the connection is broken, wait at most `RECONNECT_S`, and then try to reconnect, to find out whether the peer
        has ended.

        Args:
            timeout_s: longest wait for an event, in seconds.
            wake: file descriptor; -1 for none.
        """
        waiting = select.poll()
        if wake >= 0:
            waiting.register(wake, select.POLLIN)
        if self._look() is _State.BROKEN:
            timeout_s = min(timeout_s, RECONNECT_S)
        else:
            try:
                waiting.register(self._socket, select.POLLIN)
            # `close` has closed the socket, so no event would end the wait.
            except (OSError, ValueError):
                timeout_s = 0.0
        waiting.poll(max(timeout_s, 0.0) * 1e3)
        return self._look() is not _State.OPEN and self.has_ended()

    def close(self) -> None:
        """Close the connection and wake every waiting thread."""
        self._closed.set()
        with self._lock:
            for connection in (*self._broken, self._socket):
                with contextlib.suppress(OSError):
                    # Wakes threads that wait on this socket.
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _reconnect(self) -> bool:
        """Try to connect again, unless another thread has done so. Return True if the peer has ended or `close` was called.

        The peer has ended if its address refuses the connection or belongs to another process.
        If the attempt times out, return False, because the peer may still be alive.
        """
        with self._lock:
            if self._gone or self._closed.is_set() or time.monotonic() < self._again_s:
                return self._gone or self._closed.is_set()
            if self._look() is not _State.BROKEN:
                # Another thread has reconnected.
                return False
            purpose = f"liveness of {self._endpoint.address}"
            try:
                fresh = _connect(self._endpoint, Deadline.after(RECONNECT_S, purpose))
            except (ConnectionRefusedError, _OtherProcessError):
                self._gone = True
            except OSError as error:
                self._again_s = time.monotonic() + RECONNECT_S
                _log.warning(
                    "%s: the connection broke, and the peer does not answer: %s", purpose, error
                )
            else:
                self._broken.append(self._socket)
                with self._looking:
                    self._socket, self._is_broken = fresh, False
            return self._gone


class _OtherProcessError(Exception):
    """Another process listens at the address."""


class _State(Enum):
    """State of a connection."""

    OPEN = auto()
    ENDED = auto()
    BROKEN = auto()


def _connect(endpoint: PeerEndpoint, deadline: Deadline) -> socket.socket:
    """Connect to the listener of `endpoint`, check its incarnation, and return the connection.

    Raises:
        PeerUnreachable: the endpoint's address is malformed.
        _OtherProcessError: the listener sent another incarnation.
        OSError: the connection failed, or no answer arrived by the deadline.
    """
    try:
        host, port = split_host_port(endpoint.address)
    except ConfigError as error:
        raise PeerUnreachable(f"{endpoint.transport}: {error}") from error
    connection = socket.create_connection((host, port), timeout=max(deadline.remaining_s, 0.001))
    try:
        _check_incarnation(connection, endpoint, deadline)
        connection.setblocking(False)
    # Close the socket after every exception, including KeyboardInterrupt.
    except BaseException:
        connection.close()
        raise
    return connection


def _check_incarnation(
    connection: socket.socket, endpoint: PeerEndpoint, deadline: Deadline
) -> None:
    """Receive the listener's incarnation, and compare it with the endpoint's.

    Raises:
        _OtherProcessError: the incarnations differ.
        OSError: the incarnation did not arrive by the deadline.
    """
    answer = b""
    while len(answer) < INCARNATION_NBYTES:
        connection.settimeout(max(deadline.remaining_s, 0.001))
        more = connection.recv(INCARNATION_NBYTES - len(answer))
        if not more:
            raise ConnectionResetError(
                "the peer closed the connection before it sent its incarnation"
            )
        answer += more
    if answer != endpoint.incarnation.encode():
        raise _OtherProcessError(
            f"the process at {endpoint.address} must have the incarnation {endpoint.incarnation!r}, got another one"
        )


def _state_of(connection: socket.socket) -> _State:
    """Return the state of a connection on which the other end sends no more data. Never block."""
    try:
        ended = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return _State.OPEN
    except OSError:
        return _State.BROKEN
    return _State.ENDED if ended else _State.OPEN
