"""A transport for tests: several endpoints in one process, with every possible check.

Endpoints of one `MemoryFabric` reach each other. The transport checks more than a wire can: a
write must be inside memory that the target has registered at that moment.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from typing import ClassVar

from offers import GPU_TRAITS

from windlass.errors import ConfigError, PeerUnreachable
from windlass.net.clock import Deadline
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint
from windlass.transports.region_transport import RegionTransport
from windlass.transports.regions import check_inside
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import TransportTraits, WireReport


class MemoryConfig(TransportConfig, frozen=True, tag="memory"):
    """Configuration for peers in one process."""

    is_automatic: ClassVar[bool] = False

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        return MemoryTransport()


class MemoryFabric(dict[str, "MemoryTransport"]):
    """Endpoints that can reach each other, by address."""

    def find(self, endpoint: PeerEndpoint) -> MemoryTransport:
        """Return the transport of `endpoint`.

        Raises:
            PeerUnreachable: no transport has the address, or it is another incarnation.
        """
        found = self.get(endpoint.address)
        if found is None:
            raise PeerUnreachable(f"memory: nobody is at {endpoint.address!r}")
        now = found.endpoint().incarnation
        if now != endpoint.incarnation:
            raise PeerUnreachable(
                f"memory: {endpoint.address!r} is incarnation {now}, not {endpoint.incarnation}"
            )
        return found

    def leave(self, address: str) -> None:
        """Remove an endpoint; later writes to it raise `PeerUnreachable`."""
        self.pop(address, None)


_NUMBERS = itertools.count()
_PROCESS_FABRIC = MemoryFabric()


class MemoryTransport(RegionTransport):
    """`OneSidedTransport` by `memmove` inside this process.

    `unregister` waits for a running write into this endpoint.

    Args:
        fabric: endpoints that it reaches; None for the fabric of this process.
        address: name of this endpoint; '' for a new one.

    Raises:
        ConfigError: `address` is in use.
    """

    traits = TransportTraits(same_host=True, one_sided=True, ceiling_bytes_per_s=9e9)

    def __init__(self, fabric: MemoryFabric | None = None, address: str = "") -> None:
        self._fabric = _PROCESS_FABRIC if fabric is None else fabric
        name = address or f"memory-{next(_NUMBERS)}"
        super().__init__(PeerEndpoint("memory", name, secrets.token_hex(8)))
        if self._fabric.setdefault(name, self) is not self:
            raise ConfigError(f"MemoryTransport: address must be free, got {name!r}")

    def report(self) -> WireReport:
        return WireReport("memory", "memory", f"endpoint {self._endpoint.address}")

    def receive(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Copy a checked batch of another endpoint into memory registered here.

        Raises:
            RegionError: the batch reaches outside of registered memory.
            TransferFailed: the deadline passed between two pieces.
        """
        with self._lock:
            check_inside(
                batch.remote_addresses,
                batch.nbytes,
                self.table.spans(),
                f"memory registered at {self._endpoint.address}",
            )
            columns = (batch.remote_addresses, batch.local_addresses, batch.nbytes)
            for target, source, nbytes in zip(*(c.tolist() for c in columns), strict=True):
                deadline.check_before_more()
                ctypes.memmove(target, source, nbytes)

    def close(self) -> None:
        self._fabric.leave(self._endpoint.address)
        super().close()

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        self._fabric.find(batch.endpoint).receive(batch, deadline)


class GpuMemoryTransport(MemoryTransport):
    """`MemoryTransport` whose memory claims to be a GPU's."""

    traits = GPU_TRAITS
