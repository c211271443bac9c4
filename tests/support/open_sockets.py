"""TCP connections of tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["connected_sockets", "read_to_end", "remote_ports"]


def connected_sockets() -> Iterator[tuple[socket.socket, int, int]]:
    """Yield a duplicate of each connected TCP socket of this process, with its own port and its peer's."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if not entry.is_socket():
            continue
        with (
            suppress(OSError),
            socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM) as own,
        ):
            here, there = own.getsockname(), own.getpeername()
            if isinstance(here, tuple) and isinstance(there, tuple):
                yield own, here[1], there[1]


def remote_ports() -> set[int]:
    """Return the ports to which this process is connected."""
    return {there for _, _, there in connected_sockets()}


async def read_to_end(reader: asyncio.StreamReader) -> None:
    """Read until the peer has closed or reset the connection, or has cut it within TLS."""
    try:
        while await reader.read(1024):
            pass
    except OSError:
        return
