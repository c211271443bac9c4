"""The reference transport: several endpoints in one process, and every check that there is.

Endpoints of one `MemoryFabric` reach each other. It checks more than a wire can: a write must
lie in memory that the target has registered at that moment.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections.abc import Callable
from typing import final

from windlass.errors import ConfigError, PeerUnreachable
from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    PeerEndpoint,
    RemoteRegion,
    WireReport,
    WriteBatch,
)
from windlass.transports.regions import RegionTable, check_batch, check_inside

__all__ = ["MemoryFabric", "MemoryTransport"]


@final
class MemoryFabric:
    """The endpoints that can reach each other; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._endpoints: dict[str, MemoryTransport] = {}

    def join(self, transport: MemoryTransport, address: str) -> str:
        """Enter under `address`, or under a new name for ''.

        Raises:
            ConfigError: a live endpoint has that address.
        """
        with self._lock:
            name = address or f"memory-{next(self._names)}"
            if name in self._endpoints:
                raise ConfigError(f"MemoryTransport: address must be free, got {name!r}")
            self._endpoints[name] = transport
            return name

    def leave(self, address: str) -> None:
        """Forget an endpoint; later writes to it raise `PeerUnreachable`."""
        with self._lock:
            self._endpoints.pop(address, None)

    def find(self, endpoint: PeerEndpoint) -> MemoryTransport:
        """The transport behind `endpoint`.

        Raises:
            PeerUnreachable: nobody there, or another incarnation.
        """
        with self._lock:
            found = self._endpoints.get(endpoint.address)
        if found is None:
            raise PeerUnreachable(f"memory: nobody is at {endpoint.address!r}")
        now = found.endpoint().incarnation
        if now != endpoint.incarnation:
            raise PeerUnreachable(
                f"memory: {endpoint.address!r} is incarnation {now}, not {endpoint.incarnation}"
            )
        return found


_PROCESS_FABRIC = MemoryFabric()


@final
class MemoryTransport:
    """`OneSidedTransport` by `memmove` inside this process.

    Args:
        fabric: whom it reaches; None for the one of this process.
        address: name of this endpoint; '' for a new one.

    Raises:
        ConfigError: `address` is in use.
    """

    def __init__(self, fabric: MemoryFabric | None = None, address: str = "") -> None:
        self._fabric = _PROCESS_FABRIC if fabric is None else fabric
        self._table = RegionTable()
        self._lock = threading.Lock()
        name = self._fabric.join(self, address)
        self._endpoint = PeerEndpoint("memory", name, secrets.token_hex(8))

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        return WireReport("memory", "memory", f"endpoint {self._endpoint.address}", True)

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`; bookkeeping only."""
        region = MemoryRegion(address, nbytes, RemoteRegion(self._endpoint, address, nbytes))
        self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """See `OneSidedTransport.unregister`; waits for a write that is under way."""
        with self._lock:
            self._table.remove(region)
        if released is not None:
            released()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`; the outcome is never unknown."""
        check_batch(self._table, batch, "memory")
        peer = self._fabric.find(batch.endpoint)
        peer.receive(
            batch, Deadline.after(deadline_s, f"memory write to {peer.endpoint().address}")
        )

    def receive(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Copy a checked batch of another endpoint into memory registered here.

        Raises:
            RegionError: outside what is registered now.
            TransferFailed: the deadline passed between two pieces.
        """
        with self._lock:
            check_inside(
                batch.remote_addresses,
                batch.nbytes,
                self._table.spans(),
                f"memory registered at {self._endpoint.address}",
            )
            columns = (batch.remote_addresses, batch.local_addresses, batch.nbytes)
            for target, source, nbytes in zip(*(c.tolist() for c in columns), strict=True):
                deadline.check_before_more()
                ctypes.memmove(target, source, nbytes)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`: there is one process."""

    def close(self) -> None:
        """See `OneSidedTransport.close`."""
        self._fabric.leave(self._endpoint.address)
        with self._lock:
            self._table.clear()
