"""A transport that passes every call to another transport; base class for fault injection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from windlass.transports.base import MemoryRegion, OneSidedTransport, TransportOffer, WriteBatch
from windlass.transports.peers import PeerEndpoint, PeerMapper
from windlass.transports.traits import MemoryAllocator, TransportTraits, WireReport


class WrappedTransport(OneSidedTransport):
    """`OneSidedTransport` that passes every call to `inner`. A subclass overrides some of the methods.

    Args:
        inner: transport that does the work; `close` closes it, too.
    """

    def __init__(self, inner: OneSidedTransport) -> None:
        self.inner = inner

    @property
    def traits(self) -> TransportTraits:
        return self.inner.traits

    @property
    def allocator(self) -> MemoryAllocator | None:
        return self.inner.allocator

    @property
    def mapper(self) -> PeerMapper | None:
        return self.inner.mapper

    def report(self) -> WireReport:
        return self.inner.report()

    def endpoint(self) -> PeerEndpoint:
        return self.inner.endpoint()

    def offers(self) -> tuple[TransportOffer, ...]:
        return self.inner.offers()

    def max_pieces(self, endpoint: PeerEndpoint) -> int:
        return self.inner.max_pieces(endpoint)

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        return self.inner.register_all(spans)

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        self.inner.unregister(region, released)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        self.inner.write(batch, deadline_s=deadline_s)

    def fence(self, *, deadline_s: float) -> None:
        self.inner.fence(deadline_s=deadline_s)

    def close(self) -> None:
        self.inner.close()
