"""Ends connections over which others write into this process, whoever in it reads them.

A process that dies leaves the bytes in its kernel's send buffers behind, and that kernel goes on
delivering them: after a partition minutes later. A TCP receiver that must be sure that nothing old
arrives any more has to end the connection itself. The library that reads it has no call for that,
but its sockets are this process's, and the kernel lists them.
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
from windlass.net.clock import Deadline

Connection = tuple[Hashable, Hashable]
"""Own and the peer's address, as the kernel gives them."""

OPENING = threading.Lock()
"""Held by whatever transport starts to listen, so that the ports that appear meanwhile are its own."""
FIRST_BACKOFF_S = 0.001
MAX_SYN_RETRIES = 127


def listening_ports() -> frozenset[int]:
    """Return TCP ports on which this process listens."""
    found = set()
    for own in _sockets():
        with contextlib.suppress(OSError):
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(own.getsockname()[1]))
    return frozenset(found)


def connections_to(ports: frozenset[int]) -> frozenset[Connection]:
    """Return TCP connections that this process has begun to one of `ports`."""
    found = set()
    for own in _sockets():
        with contextlib.suppress(OSError):  # not connected
            here, there = own.getsockname(), own.getpeername()
            if there[1] in ports:
                found.add((here, there))
    return frozenset(found)


def new_mark() -> int:
    """Return a number of SYN retries that sockets do not have by themselves.

    A library that can be told this number, and nothing else by which its sockets are known, marks
    them by it: those that it opens and those that it accepts.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as fresh:
        default: int = fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT)
    return default + 1 if default < MAX_SYN_RETRIES else default - 1


def end_connections(is_meant: Callable[[socket.socket], bool], deadline: Deadline) -> int:
    """End every TCP connection that is meant; return how many, once their readers let go.

    Raises:
        TransferFailed: a reader still holds one after `deadline`.
    """
    cut = set()
    for own in _sockets():
        with contextlib.suppress(OSError):  # of another family, or not connected
            listens = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens and is_meant(own):
                own.getpeername()
                own.shutdown(socket.SHUT_RDWR)
                cut.add(os.fstat(own.fileno()).st_ino)
    backoff_s = FIRST_BACKOFF_S
    while held := cut & {os.fstat(own.fileno()).st_ino for own in _sockets()}:
        if deadline.remaining_s == 0:
            raise TransferFailed(
                f"{deadline.purpose}: {len(held)} connections are still read after "
                f"{deadline.seconds} s"
            )
        threading.Event().wait(backoff_s)  # nothing tells when a library closes a socket
        backoff_s *= 2
    return len(cut)


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every socket of this process, one at a time."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue  # closed meanwhile: the listing's own descriptor is
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as own:
            if own.type == socket.SOCK_STREAM and own.family in {socket.AF_INET, socket.AF_INET6}:
                yield own
