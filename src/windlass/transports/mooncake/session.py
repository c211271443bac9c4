"""Memory that another process has registered with a Mooncake engine of its own.

That process runs no code of ours. This one, on the same host, stands in for it: its liveness listener closes
when either of the two ends, so that peers notice, and it reads back what peers have written. The
registration cannot be taken back: fencing is by looking at who is still connected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import msgspec
import numpy as np

from windlass.errors import TransferFailed, TransportUnavailable
from windlass.net.addresses import split_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    RemoteRegion,
    TransportTraits,
    WireReport,
    WriteBatch,
)
from windlass.transports.inbound import dialled
from windlass.transports.liveness import LivenessListener
from windlass.transports.mooncake.config import MooncakeConfig
from windlass.transports.mooncake.peer import TOKEN_NBYTES, format_incarnation, liveness_name
from windlass.transports.mooncake.transport import MooncakeTransport

FIRST_BACKOFF_S = 0.001
_LISTENING = "0A"
_MAY_DELIVER = frozenset({"01", "03", "08"})
"""Established, half open, and closed by the peer with bytes that may be unread."""
_MAPPED = "0000000000000000FFFF0000"


@final
class MooncakeSession(OneSidedTransport):
    """`OneSidedTransport` whose endpoint is another process's engine.

    What is registered here is local memory, for `read`; peers write `regions`.

    Args:
        config: of the local engine; its host becomes the session's.
        session: `host:port` of the other engine, a process of this host and user.
        spans: (address, nbytes) of what that process has registered; at least one of 16 bytes.

    Raises:
        TransportUnavailable: Mooncake does not start, or the other process cannot be looked into.
    """

    def __init__(
        self, config: MooncakeConfig, session: str, spans: Sequence[tuple[int, int]]
    ) -> None:
        host, self._session_port = split_host_port(session)
        self._owner = owner_of(self._session_port)
        self._process = os.pidfd_open(self._owner)
        self._closed = False
        self._inner = MooncakeTransport(msgspec.structs.replace(config, host=host))
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._listener = LivenessListener(host, liveness_name(token), "mooncake")
        probe = next(address for address, nbytes in spans if nbytes >= TOKEN_NBYTES)
        incarnation = format_incarnation(token, probe, self._listener.port, proxied=True)
        self._endpoint = PeerEndpoint("mooncake", session, incarnation)
        self.regions = tuple(
            RemoteRegion(self._endpoint, address, nbytes) for address, nbytes in spans
        )

    @property
    def process(self) -> int:
        """A descriptor that is readable once the other process has ended."""
        return self._process

    @property
    def traits(self) -> TransportTraits:
        return self._inner.traits

    def report(self) -> WireReport:
        found = self._inner.report()
        detail = f"{found.detail}, session {self._endpoint.address} of another process"
        return msgspec.structs.replace(found, detail=detail)

    def endpoint(self) -> PeerEndpoint:
        """Of the other process, for which this one answers."""
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Make local memory usable for `read`."""
        return self._inner.register(address, nbytes)

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        self._inner.unregister(region, released)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        self._inner.write(batch, deadline_s=deadline_s)

    def read(self, batch: WriteBatch, *, deadline_s: float) -> None:
        self._inner.read(batch, deadline_s=deadline_s)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`.

        Over TCP bytes of a process that has ended may still come, and the connection is not ours
        to cut: it must be gone, or lead to a living process of this host. A sender on another
        host, alive or not, cannot be told from one that a partition has cut off.

        Raises:
            TransferFailed: such a connection is there after `deadline_s`.
        """
        self._wait_alone(Deadline.after(deadline_s, f"fence of {self._endpoint.address}"), True)

    def require_alone(self, *, deadline_s: float) -> None:
        """As `fence`, for a process that has just come and does not know who wrote before it.

        Raises:
            TransferFailed: somebody else is connected after `deadline_s`, alive or not.
        """
        self._wait_alone(Deadline.after(deadline_s, f"join of {self._endpoint.address}"), False)

    def close(self) -> None:
        """See `OneSidedTransport.close`; the other process keeps its registration."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        self._inner.close()
        os.close(self._process)

    def _wait_alone(self, deadline: Deadline, trust_the_living: bool) -> None:
        if self._inner.report().protocol == "rdma":
            return
        self._connect(deadline)
        backoff_s = FIRST_BACKOFF_S
        while num := self._num_others(trust_the_living):
            if deadline.remaining_s == 0:
                raise TransferFailed(
                    f"{deadline.purpose}: {num} connections are open over which bytes may come; end "
                    "the trainers that made them, or start the engine anew"
                )
            threading.Event().wait(backoff_s)  # nothing tells when another process closes a socket
            backoff_s *= 2

    def _num_others(self, trust_the_living: bool) -> int:
        """Return how many connections there are to where the other engine takes bytes."""
        listening = listening_ports_of(self._owner) - {self._session_port}
        own = {mine: theirs for mine, theirs in dialled() if theirs in listening}
        rows = tuple(_rows())
        of_the_living = {(row.local, row.remote) for row in rows if row.inode != "0"}
        return sum(
            _port(row.remote) not in own
            and not (trust_the_living and (row.remote, row.local) in of_the_living)
            for row in rows
            if _port(row.local) in own.values() and row.state in _MAY_DELIVER
        )

    def _connect(self, deadline: Deadline) -> None:
        """Read something, so that this process is connected to where the other takes bytes."""
        page = np.zeros(TOKEN_NBYTES, np.uint8)
        region = self._inner.register(int(page.ctypes.data), page.nbytes)
        target = next(r for r in self.regions if r.nbytes >= TOKEN_NBYTES)
        batch = WriteBatch(
            endpoint=self._endpoint,
            local_addresses=np.array([region.address], np.uint64),
            remote_addresses=np.array([target.address], np.uint64),
            nbytes=np.array([TOKEN_NBYTES], np.uint64),
            regions=(target,),
        )
        try:
            self._inner.read(batch, deadline_s=deadline.remaining_s)
        finally:
            # A read that is late still fills the page.
            self._inner.unregister(region, partial(_let_go, page))


def _let_go(_: object) -> None:
    """Nothing refers to the memory any more."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A TCP socket of this host, as the kernel spells its two ends; inode 0 where no process has it."""

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
