"""Processes on this host that own endpoints: prove their identity, and check that they are alive."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

from windlass.errors import PeerUnreachable, TransferFailed
from windlass.transports.peers import PeerEndpoint

_log = logging.getLogger(__name__)
PROVE_S = 5.0
"""A peer's process must accept a connection within this many seconds, to prove its identity."""
ACCEPT_AGAIN_S = 0.1
"""Pause in seconds after a failed `accept`."""
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2**64 - 1


@functools.cache
def host_identity() -> str:
    """Return a text that is equal in two processes if they can reach each other by pid and by abstract sockets.

    The text consists of the kernel's boot id, the PID namespace and the network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # A sandbox may hide the file.
    except OSError:
        boot = socket.gethostname()
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join((boot, *namespaces))


def process_start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, or "" if it has ended or is ending.

    Raises:
        TransferFailed: this process has too few descriptors or too little memory to read the start time.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        raise TransferFailed(f"cannot find out whether pid {pid} is alive: {error}") from error
    fields = stat.rpartition(")")[2].split()
    # A process that ends frees its memory (size 0) before it closes its descriptors.
    return "" if fields[0] in {"Z", "X"} or fields[20] == "0" else fields[19]


def own_endpoint(transport: str) -> PeerEndpoint:
    """Return a new endpoint of this process: its pid as the address, and its start time and a secret as incarnation.

    Raises:
        TransferFailed: the start time of this process cannot be read.
    """
    pid = os.getpid()
    incarnation = f"{process_start_time(pid)}-{secrets.token_hex(16)}"
    return PeerEndpoint(transport, str(pid), incarnation)


def check_alive(peer: PeerEndpoint) -> int:
    """Check that a peer's process is alive, and return its pid.

    Raises:
        PeerUnreachable: the address is not a pid, the process has ended, or another process has the pid.
        TransferFailed: see `process_start_time`.
    """
    if not peer.address.isascii() or not peer.address.isdigit():
        raise PeerUnreachable(f"{peer.transport}: address must be a pid, got {peer.address!r}")
    started = process_start_time(int(peer.address))
    if not started:
        raise PeerUnreachable(f"{peer.transport}: pid {peer.address} is gone")
    # The other part of the incarnation is a secret.
    expected = peer.incarnation.partition("-")[0]
    if started != expected:
        raise PeerUnreachable(
            f"{peer.transport}: pid {peer.address} is another process now: its start time must be "
            f"{expected} (clock ticks since boot), got {started}"
        )
    return int(peer.address)


_OWN: set[PeerEndpoint] = set()
"""Endpoints of this process's open transports."""


def is_own_process(peer: PeerEndpoint) -> bool:
    """Return whether `peer` is an open transport of this process.

    The incarnation contains a secret, so a forged endpoint with the pid of this process does not match.
    """
    return peer in _OWN


@final
class OwnProcess:
    """Endpoint of a transport of this process, with a proof that this process owns the endpoint.

    The incarnation is the process's start time and a secret. Until `close`, this process listens at an
    abstract Unix socket. The name of the socket is a digest of the incarnation. A peer that has the endpoint connects
    to this socket, and the kernel tells the peer the pid of the listening process. A forged endpoint with the pid of
    another process fails, because that process does not listen at a socket of this name.

    Args:
        transport: registry name of the transport.
        endpoint: endpoint of the transport; None for a new one.
        serve: function that gets each connection and closes it. By default each connection is closed at once: a client
            only needs the listener's pid, which it gets from the kernel.

    Attributes:
        endpoint: address and identity that peers receive.
    """

    def __init__(
        self,
        transport: str,
        endpoint: PeerEndpoint | None = None,
        serve: Callable[[socket.socket], None] = socket.socket.close,
    ) -> None:
        self.endpoint = own_endpoint(transport) if endpoint is None else endpoint
        self._serve_one = serve
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_name_of(self.endpoint))
        self._listener.listen(128)
        self._closed = threading.Event()
        _OWN.add(self.endpoint)
        threading.Thread(target=self._serve, name=f"windlass-{transport}", daemon=True).start()

    def close(self) -> None:
        """Stop listening, so that no peer can verify this endpoint any more. Idempotent."""
        self._closed.set()
        _OWN.discard(self.endpoint)
        with contextlib.suppress(OSError):
            # Wakes the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        """Accept connections, and pass each of them to `serve`."""
        while not self._closed.is_set():
            try:
                line = self._listener.accept()[0]
            # Either the listener is closed, or this process has no descriptor left for the moment.
            except OSError:
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            try:
                self._serve_one(line)
            # Continue after any error, for example if no thread can be started, so that later connections are served.
            except Exception:  # noqa: BLE001
                _log.exception("%s: a connection was not served", self.endpoint.transport)
                line.close()


@final
class PeerProcesses:
    """Peers that have proven to be the processes that their endpoints name; thread-safe."""

    def __init__(self) -> None:
        self._proven: frozenset[PeerEndpoint] = frozenset()

    def check(self, peer: PeerEndpoint) -> int:
        """Check that the process of `peer` is alive, and return its pid.

        The first check of a peer also asks the process to prove that it owns the endpoint; see `OwnProcess`.

        Raises:
            PeerUnreachable: the process has ended, another process has the pid, or the process did not prove that it
                owns the endpoint.
            TransferFailed: see `process_start_time`.
        """
        pid = check_alive(peer)
        if peer not in self._proven:
            _prove(peer, pid)
            living = {known for known in self._proven if process_start_time(int(known.address))}
            self._proven = frozenset(living | {peer})
        return pid


class Credentials(NamedTuple):
    """Identity of the process at the other end of a Unix socket, from the kernel (`struct ucred`)."""

    pid: int
    uid: int
    gid: int


def credentials_of(line: socket.socket) -> Credentials:
    """Return the identity of the process at the other end of a Unix socket."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(found))


def is_same_user(line: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket has this process's user, or is root's."""
    return credentials_of(line).uid in {0, os.geteuid()}


def let_peers_write() -> None:
    """Allow other processes of the same user to write and read this process even if Yama has its default settings.

    By default (ptrace_scope=1), Yama allows only a parent process to do so. So declare all processes as permitted
    tracers. The kernel still requires the same user. Without Yama the call fails and is not needed.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def _prove(peer: PeerEndpoint, pid: int) -> None:
    """Check that process `pid` listens at the socket of `peer`; see `OwnProcess`.

    Raises:
        PeerUnreachable: no process listens there, or the process that listens has another pid.
    """
    what = f"{peer.transport}: pid {pid} must prove that it owns this endpoint"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            connect_within(client, peer, PROVE_S)
        except OSError as error:
            raise PeerUnreachable(f"{what}, but its socket cannot be reached: {error}") from error
        listening = credentials_of(client).pid
    if listening != pid:
        raise PeerUnreachable(f"{what}, but pid {listening} listens at its socket")


def connect_within(line: socket.socket, peer: PeerEndpoint, seconds: float) -> None:
    """Connect a Unix socket to the listener of `peer`. Wait while the listener's backlog is full.

    Later calls on the socket have the timeout `seconds`, too.

    Raises:
        TimeoutError: the listener did not accept the connection within `seconds`.
        OSError: no process listens there.
    """
    # `settimeout` would make the socket non-blocking, and `connect` would then fail at once (EAGAIN) while the listener's
    # backlog is full. With SO_SNDTIMEO the kernel waits.
    line.setblocking(True)
    whole_s = int(seconds)
    wait = _TIMEVAL.pack(whole_s, max(int((seconds - whole_s) * 1e6), 1))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    try:
        line.connect(socket_name_of(peer))
    except BlockingIOError as error:
        raise TimeoutError(
            f"the listener did not accept the connection within {seconds:.3g} s"
        ) from error
    line.settimeout(seconds)


def socket_name_of(peer: PeerEndpoint) -> str:
    """Return the name of the abstract Unix socket on which a process proves that it is `peer`."""
    digest = hashlib.sha256(f"{peer.transport} {peer.incarnation}".encode()).hexdigest()
    return f"\0windlass-{digest}"
