"""Which process of this host is behind an endpoint, and whether it is still the same one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import secrets
import socket
import struct
import threading
from pathlib import Path
from typing import final

from windlass.errors import PeerUnreachable, TransferFailed
from windlass.transports.base import PeerEndpoint

PROVE_S = 5.0
ACCEPT_AGAIN_S = 0.1
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2**64 - 1


@functools.cache
def host_identity() -> str:
    """Return what is the same for two processes that can reach each other by pid and by abstract sockets.

    Boot of the kernel, namespace of pids, namespace of networks.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox that hides it
        boot = socket.gethostname()
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join((boot, *namespaces))


def process_start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started; empty when there is none, or it is ending.

    Raises:
        TransferFailed: this process has no descriptor or memory left to find out.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        raise TransferFailed(f"whether pid {pid} lives cannot be read: {error}") from error
    fields = stat.rpartition(")")[2].split()
    # A process that ends gives back its memory (size 0), and only then its descriptors.
    return "" if fields[0] in {"Z", "X"} or fields[20] == "0" else fields[19]


def own_endpoint(transport: str) -> PeerEndpoint:
    """This process, under a new secret; `OwnProcess` proves it."""
    pid = os.getpid()
    incarnation = f"{process_start_time(pid)}-{secrets.token_hex(16)}"
    return PeerEndpoint(transport, str(pid), incarnation)


def check_alive(peer: PeerEndpoint) -> int:
    """Return the pid behind `peer`.

    Raises:
        PeerUnreachable: no pid, no such process, or another one under that pid.
    """
    if not peer.address.isascii() or not peer.address.isdigit():
        raise PeerUnreachable(f"{peer.transport}: address must be a pid, got {peer.address!r}")
    started = process_start_time(int(peer.address))
    if not started:
        raise PeerUnreachable(f"{peer.transport}: pid {peer.address} is gone")
    if started != peer.incarnation.partition("-")[0]:
        raise PeerUnreachable(
            f"{peer.transport}: pid {peer.address} must have started at {peer.incarnation!r}, is "
            f"another process started at {started}"
        )
    return int(peer.address)


_OWN: set[PeerEndpoint] = set()
"""Of the transports of this process that are open."""


def is_own_process(peer: PeerEndpoint) -> bool:
    """Return whether `peer` is an open transport of the process that asks, this one or another.

    Its secret is compared as well: who only names this process is not believed.
    """
    return peer in _OWN


@final
class OwnProcess:
    """This process as the endpoint of a transport, which it proves until `close`.

    The incarnation is the process's start time and a secret. An abstract unix socket whose name is
    a digest of both listens for as long as the transport lives. Whoever is told the endpoint
    connects there, and the kernel says which process listens: not one that was only named, since
    that one would have to listen under a name that it does not know.

    Attributes:
        endpoint: what peers are told.
    """

    def __init__(self, transport: str) -> None:
        self.endpoint = own_endpoint(transport)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_name_of(self.endpoint))
        self._listener.listen(128)
        self._closed = threading.Event()
        _OWN.add(self.endpoint)
        threading.Thread(target=self._serve, name=f"windlass-{transport}", daemon=True).start()

    def close(self) -> None:
        """Prove nothing any more. Idempotent."""
        self._closed.set()
        _OWN.discard(self.endpoint)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        """Accept and close: the kernel tells a client who listens, as soon as it has connected."""
        while not self._closed.is_set():
            try:
                self._listener.accept()[0].close()
            except OSError:  # closed; or out of descriptors, which may change
                self._closed.wait(ACCEPT_AGAIN_S)


@final
class PeerProcesses:
    """Peers that have been proven to be the processes that their endpoints name; thread-safe."""

    def __init__(self) -> None:
        self._proven: frozenset[PeerEndpoint] = frozenset()

    def check(self, peer: PeerEndpoint) -> int:
        """Return the pid behind `peer`.

        Raises:
            PeerUnreachable: see `check_alive`; or that process does not say that it is this peer.
        """
        pid = check_alive(peer)
        if peer not in self._proven:
            _prove(peer, pid)
            living = {known for known in self._proven if process_start_time(int(known.address))}
            self._proven = frozenset(living | {peer})
        return pid


def let_peers_write() -> None:
    """Under Yama's default (ptrace_scope=1) only a parent may write here; name all peers instead.

    The kernel still wants the same user. Without Yama the call fails, and nothing is needed.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def _prove(peer: PeerEndpoint, pid: int) -> None:
    what = f"{peer.transport}: pid {pid} must prove that it is this endpoint"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PROVE_S)
        try:
            client.connect(_name_of(peer))
        except OSError as error:
            raise PeerUnreachable(f"{what}, nobody listens for it: {error}") from error
        asked = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    listening, _, _ = _CREDENTIALS.unpack(asked)
    if listening != pid:
        raise PeerUnreachable(f"{what}, it is pid {listening} that listens for it")


def _name_of(peer: PeerEndpoint) -> str:
    digest = hashlib.sha256(f"{peer.transport} {peer.incarnation}".encode()).hexdigest()
    return f"\0windlass-{digest}"
