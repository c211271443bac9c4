"""Close inbound TCP connections of peers, including sockets owned by a library in this process.

After a process dies, its kernel still sends the bytes in the process's send buffers. After a network
partition, these bytes may arrive minutes later. To be sure that no old bytes arrive, a TCP receiver
must close the connection. Transport libraries such as Mooncake and UCX have no function for that, but
their sockets belong to this process, and the kernel lists them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

from windlass.errors import TransferFailed
from windlass.net.clock import Backoff, Deadline

Connection = tuple[Hashable, Hashable]
"""Address of this process and address of the peer, as the kernel returns them."""

OPENING = threading.Lock()
"""Lock that a transport holds while it starts. A port that opens while the lock is held belongs to this transport."""
BACKOFF = Backoff(0.001, 0.1)
"""Pauses between two checks of the sockets that a library must close."""
MAX_SYN_RETRIES = 127
"""Largest number of SYN retries that Linux accepts."""


def listening_ports() -> frozenset[int]:
    """Return the TCP ports on which this process listens."""
    found = set()
    for own in _sockets():
        with contextlib.suppress(OSError):
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(own.getsockname()[1]))
    return frozenset(found)


def connections_to(ports: frozenset[int]) -> frozenset[Connection]:
    """Return the TCP connections of this process whose remote port is in `ports`."""
    found = set()
    for own in _sockets():
        # Unconnected sockets have no peer.
        with contextlib.suppress(OSError):
            here, there = own.getsockname(), own.getpeername()
            if there[1] in ports:
                found.add((here, there))
    return frozenset(found)


def new_mark() -> int:
    """Return a value of TCP_SYNCNT (number of SYN retries) that differs from the system's default.

    The caller sets this value for a library that accepts no other socket option. It marks all sockets of the library, so
    that `end_connections` can find them.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as fresh:
        default: int = fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT)
    return default + 1 if default < MAX_SYN_RETRIES else default - 1


def end_connections(is_meant: Callable[[socket.socket], bool], deadline: Deadline) -> int:
    """Shut down TCP connections of this process, and wait until the libraries that own the sockets have closed them.

    Args:
        is_meant: returns whether to shut down the connection of a socket.
        deadline: deadline of the wait.

    Returns:
        Number of connections that were shut down.

    Raises:
        TransferFailed: a library still has a socket open after `deadline`.
    """
    cut = set()
    for own in _sockets():
        # Skip unconnected sockets, which have no peer.
        with contextlib.suppress(OSError):
            listens = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens and is_meant(own):
                own.getpeername()
                own.shutdown(socket.SHUT_RDWR)
                cut.add(os.fstat(own.fileno()).st_ino)
    pauses = BACKOFF.pauses()
    while held := cut & {os.fstat(own.fileno()).st_ino for own in _sockets()}:
        if deadline.remaining_s == 0:
            raise TransferFailed(
                f"{deadline.purpose}: the transport's library must close all connections within {deadline.seconds} s, but "
                f"{len(held)} of {len(cut)} are open"
            )
        # No event reports that a library closed its socket.
        threading.Event().wait(next(pauses))
    return len(cut)


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket of this process, one at a time."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:
            # This descriptor is closed already, for example the descriptor with which the folder was listed.
            continue
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as own:
            if own.type == socket.SOCK_STREAM and own.family in {socket.AF_INET, socket.AF_INET6}:
                yield own
