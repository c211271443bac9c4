"""The transport interface: how bytes move between two processes.

A `OneSidedTransport` registers local memory, exports the right to write it, and writes into a
peer's exported memory without help from the peer's CPU. `TransportTraits` (`traits.py`) describe
the differences between transports, for the controller. Optional capabilities are properties that
may be None (`allocator`, `mapper`), so callers need not check the type of a transport.

Registered local memory (`MemoryRegion`) and the right of a peer to write it (`RemoteRegion`) have
different types, as in perplexityai/pplx-garden `fabric_lib.pyi`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from windlass.layout.columns import UInt64Array
from windlass.transports.peers import PeerEndpoint, PeerMapper, RemoteRegion
from windlass.transports.traits import MemoryAllocator, TransportTraits, WireReport


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered local memory. The caller of `register` must keep it allocated, see `unregister`.

    Attributes:
        address: virtual address in this process.
        nbytes: size in bytes.
        remote: right to write the memory, for peers.
        alternatives: rights to write the same memory through other transports.
    """

    address: int
    nbytes: int
    remote: RemoteRegion
    alternatives: tuple[RemoteRegion, ...] = ()

    @property
    def remotes(self) -> tuple[RemoteRegion, ...]:
        """Rights to write this memory, one for each transport with which it is registered."""
        return (self.remote, *self.alternatives)


WRITE_PIECES = 4096
"""Default of `OneSidedTransport.max_pieces`. It does not limit the bytes of a write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBatch:
    """Writes to one peer, as columns.

    Attributes:
        endpoint: the peer.
        local_addresses: (n,) uint64, inside registered local memory.
        remote_addresses: (n,) uint64, inside `regions`.
        nbytes: (n,) uint64, each >= 1.
        regions: published regions of the peer. All remote addresses must be inside them; this is
            checked before the first byte is sent.
    """

    endpoint: PeerEndpoint
    local_addresses: UInt64Array
    remote_addresses: UInt64Array
    nbytes: UInt64Array
    regions: tuple[RemoteRegion, ...]


class TransportOffer(msgspec.Struct, frozen=True):
    """One transport through which a rank can write, and through which peers can write to the rank.

    Attributes:
        endpoint: address for peers that write to this rank.
        traits: capabilities of the transport.
        wire: protocol and device that the transport uses.
    """

    endpoint: PeerEndpoint
    traits: TransportTraits
    wire: WireReport

    @property
    def transport(self) -> str:
        """Registry name of the transport."""
        return self.endpoint.transport


class OneSidedTransport(Protocol):
    """Transport that writes into a peer's memory. Instances are thread-safe; every method may block.

    A transport should turn native return codes into exceptions in one function only. A class that derives from this one
    inherits defaults of the optional parts: no `allocator`, no `mapper`, one offer, and a `fence` that does nothing.
    """

    @property
    def traits(self) -> TransportTraits:
        """Capabilities of this transport."""
        ...

    @property
    def allocator(self) -> MemoryAllocator | None:
        """Allocator of memory that peers can write; None if peers can write any registered memory."""
        return None

    @property
    def mapper(self) -> PeerMapper | None:
        """Object that maps peers' memory, so that kernels can write to it; None if only `write` can write to peers."""
        return None

    def report(self) -> WireReport:
        """Return the protocol and device that the transport uses."""
        ...

    def endpoint(self) -> PeerEndpoint:
        """Return the address at which peers reach memory registered here."""
        ...

    def offers(self) -> tuple[TransportOffer, ...]:
        """Return the offers of all transports through which peers reach memory registered here, fastest first."""
        return (TransportOffer(self.endpoint(), self.traits, self.report()),)

    def max_pieces(self, endpoint: PeerEndpoint) -> int:  # noqa: ARG002
        """Return the largest number of pieces that a sender passes to one `write` to this peer."""
        return WRITE_PIECES

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Make local memory writable by peers and usable as a source of writes.

        The caller keeps the range allocated until `unregister` calls `released`.

        Raises:
            RegionError: `nbytes` < 1, or the range overlaps a registered region.
        """
        (region,) = self.register_all([(address, nbytes)])
        return region

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        """Register several ranges, in one library call if the library supports it.

        Args:
            spans: (address, nbytes) of each range; see `register`.

        Returns:
            One region per range, in the same order. Each region is unregistered separately.

        Raises:
            RegionError: a range was refused, or two ranges overlap. In this case, no range is registered.
        """
        ...

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """End the registration of a region. The caller frees the memory in `released`, never earlier.

        An unfinished native call of this transport may still use the memory: another thread waits for the call, or its
        outcome is unknown. The memory must then stay allocated until the call ends. If no unfinished call uses the
        memory, `released` is called at once. Do not unregister a region during a `write` that uses the region, because
        the `write` may make several native calls, and `released` could be called between two of them.

        Args:
            region: registered region. The caller begins no more writes with it.
            released: called as soon as no native call of this transport uses the memory. This may happen
                before `unregister` returns, or later in any thread. If the transport cannot find out whether
                a call has ended, it never calls `released`. This function must not register, write or close.

        Raises:
            RegionError: the region is not registered; `released` is not called.
        """
        ...

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Write all pieces and return once they are visible in the peer's memory.

        Idempotent: writing the same bytes again is harmless.

        Raises:
            RegionError: a piece is outside local registered memory or outside `batch.regions`. Nothing was sent.
            PeerUnreachable: the peer's process has ended, or another process has its address.
            TransferFailed: the write is incomplete. No more bytes will arrive.
            TransferOutcomeUnknown: the deadline passed and bytes may still be in flight.
        """
        ...

    def fence(self, *, deadline_s: float) -> None:  # noqa: ARG002
        """Wait until no write of an ended peer process can change memory of this process any more.

        Call this while no peer writes. This method may close connections of peers that are alive; they reconnect by
        themselves. Do nothing if the writes of this transport always end when the writing process ends.

        Raises:
            TransferFailed: writes of an ended process may still arrive.
        """
        return

    def close(self) -> None:
        """Unregister everything and stop threads and libraries of this transport. Idempotent."""
        ...
