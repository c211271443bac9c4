"""Ends connections that others have opened to ports of this process, whoever in it accepted them.

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
from collections.abc import Iterator
from pathlib import Path

from windlass.errors import TransferFailed
from windlass.telemetry.clock import Deadline

__all__ = ["cut_inbound", "listening_ports"]

FIRST_BACKOFF_S = 0.001


def listening_ports() -> frozenset[int]:
    """TCP ports on which this process listens."""
    found = set()
    for own in _sockets():
        with contextlib.suppress(OSError):
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(own.getsockname()[1]))
    return frozenset(found)


def cut_inbound(ports: frozenset[int], deadline: Deadline) -> int:
    """End every connection accepted on `ports`; returns how many, once their readers let go.

    Raises:
        TransferFailed: a reader still holds one after `deadline`.
    """
    cut = set()
    for own in _sockets():
        with contextlib.suppress(OSError):  # of another family, or not connected
            listens = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens and own.getsockname()[1] in ports:
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
    """A duplicate of every socket of this process, one at a time."""
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
