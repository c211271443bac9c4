"""A transport that passes everything on to another one: what a fault is put in front of."""

from __future__ import annotations

from collections.abc import Callable

from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    WireReport,
    WriteBatch,
)

__all__ = ["WrappedTransport"]


class WrappedTransport:
    """`OneSidedTransport` in front of another one; override what is to differ.

    Args:
        inner: does the work. Closed with this one.
    """

    def __init__(self, inner: OneSidedTransport) -> None:
        self.inner = inner

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        return self.inner.report()

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self.inner.endpoint()

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`."""
        return self.inner.register(address, nbytes)

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """See `OneSidedTransport.unregister`."""
        self.inner.unregister(region, released)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`."""
        self.inner.write(batch, deadline_s=deadline_s)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`."""
        self.inner.fence(deadline_s=deadline_s)

    def close(self) -> None:
        """See `OneSidedTransport.close`."""
        self.inner.close()
