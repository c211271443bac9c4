"""Another process of this host, as the kernel shows it: who listens at a port, who is connected.

For memory that its owner has registered itself and that this process only publishes: its sockets
are not ours to close, but they can be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import TransportUnavailable

_LISTENING = "0A"
_MAY_DELIVER = frozenset({"01", "03", "08"})
"""Established, half open, and closed by the peer with bytes that may be unread."""
_MAPPED = "0000000000000000FFFF0000"


@dataclass(frozen=True, slots=True)
class Connection:
    """One that was made to a port of this host.

    Attributes:
        peer: the other end, as the kernel spells it; for comparison.
        port: of the other end.
        peer_lives: whether the other end is a socket of a living process of this host.
    """

    peer: str
    port: int
    peer_lives: bool


@dataclass(frozen=True, slots=True)
class _Row:
    local: str
    remote: str
    state: str
    inode: str


def owner_of(port: int) -> int:
    """The process that listens on a TCP port of this host.

    Raises:
        TransportUnavailable: nobody does, or a process that this one may not look into.
    """
    wanted = {
        f"socket:[{row.inode}]"
        for row in _rows()
        if row.state == _LISTENING and _port(row.local) == port
    }
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _sockets_of(process) & wanted:
            return int(process.name)
    raise TransportUnavailable(
        f"port {port}: must be that of a process of this host and of this user, found "
        f"{'one that may not be looked into' if wanted else 'none that listens there'}"
    )


def listening_ports_of(process: int) -> frozenset[int]:
    """TCP ports on which a process of this user listens; none once it has ended."""
    held = _sockets_of(Path("/proc", str(process)))
    return frozenset(
        _port(row.local)
        for row in _rows()
        if row.state == _LISTENING and f"socket:[{row.inode}]" in held
    )


def connections_to(port: int) -> tuple[Connection, ...]:
    """Those to a port of this host over which bytes may still come."""
    rows = tuple(_rows())
    owned = {(row.local, row.remote) for row in rows if row.inode != "0"}
    return tuple(
        Connection(row.remote, _port(row.remote), (row.remote, row.local) in owned)
        for row in rows
        if _port(row.local) == port and row.state in _MAY_DELIVER
    )


def _sockets_of(process: Path) -> frozenset[str]:
    found = set()
    with contextlib.suppress(OSError):  # ended, or of another user
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(str(entry.readlink()))
    return frozenset(found)


def _rows() -> Iterator[_Row]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # a kernel without that family
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                yield _Row(_plain(words[1]), _plain(words[2]), words[3], words[9])


def _plain(address: str) -> str:
    """IPv4 in the guise of IPv6 is IPv4."""
    return address.removeprefix(_MAPPED)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
