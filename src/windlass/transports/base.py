"""The transport seam: how bytes move.

`OneSidedTransport` registers local memory, exports the right to write it, and writes
into a peer's exported memory while the peer's CPU does something else. What differs between
transports is said by `TransportTraits` (`traits.py`), which travel to the controller, and by capabilities
that a transport has or has not (`allocator`, `mapper`); nobody asks for its type.

The local right to use memory (`MemoryRegion`) and the remote right to write it
(`RemoteRegion`) are different types, as in perplexityai/pplx-garden `fabric_lib.pyi`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from windlass.layout.columns import UInt64Array
from windlass.transports.traits import (
    MemoryAllocator,
    PeerMapper,
    TransportTraits,
    WireReport,
)


class PeerEndpoint(msgspec.Struct, frozen=True):
    """How to reach the process that owns memory, and how to tell it from a successor.

    Attributes:
        transport: registry name of the transport.
        address: transport-specific: `host:port`, a pid, a name.
        incarnation: changes whenever the process behind `address` is another one
            (process start time, random id); a write to a past incarnation is refused.
    """

    transport: str
    address: str
    incarnation: str


class RemoteRegion(msgspec.Struct, frozen=True):
    """The right to write `nbytes` bytes at `address` of a peer. Travels in messages.

    Attributes:
        endpoint: the owner.
        address: virtual address in the owner's process.
        nbytes: extent.
        key: transport-specific: a shm segment name, an rkey; empty where none is needed.
    """

    endpoint: PeerEndpoint
    address: int
    nbytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered local memory. Owned by whoever registered it until `unregister`.

    Attributes:
        address: virtual address in this process.
        nbytes: extent.
        remote: what a peer needs to write here.
        alternatives: the same for peers that write by another transport than `remote` is of.
    """

    address: int
    nbytes: int
    remote: RemoteRegion
    alternatives: tuple[RemoteRegion, ...] = ()

    @property
    def remotes(self) -> tuple[RemoteRegion, ...]:
        """What a peer needs to write here, by each transport that the memory is registered with."""
        return (self.remote, *self.alternatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBatch:
    """Writes to one peer, columnar.

    Attributes:
        endpoint: the peer.
        local_addresses: (n,) uint64, inside registered local memory.
        remote_addresses: (n,) uint64, inside `regions`.
        nbytes: (n,) uint64, each >= 1.
        regions: the published regions that `remote_addresses` must lie in; every write is
            checked against them before the first byte is sent.
    """

    endpoint: PeerEndpoint
    local_addresses: UInt64Array
    remote_addresses: UInt64Array
    nbytes: UInt64Array
    regions: tuple[RemoteRegion, ...]


class TransportOffer(msgspec.Struct, frozen=True):
    """One way in which a rank can be written, and can write.

    Attributes:
        endpoint: where writes land. traits: what the transport can. wire: what it really uses.
    """

    endpoint: PeerEndpoint
    traits: TransportTraits
    wire: WireReport

    @property
    def transport(self) -> str:
        """Registry name."""
        return self.endpoint.transport


class OneSidedTransport(Protocol):
    """Writes into a peer's memory. Instances are thread-safe; every method may block.

    A native return code becomes an exception in exactly one function per transport. Derive from
    this class to inherit the optional parts: no `allocator`, no `mapper`, one offer, no fence.
    """

    @property
    def traits(self) -> TransportTraits:
        """What it can."""
        ...

    @property
    def allocator(self) -> MemoryAllocator | None:
        """Gives out the memory that peers can write; None where any memory of the kind will do."""
        return None

    @property
    def mapper(self) -> PeerMapper | None:
        """Maps peers' memory for kernels that store; None where only `write` reaches it."""
        return None

    def report(self) -> WireReport:
        """Return what is really in use."""
        ...

    def endpoint(self) -> PeerEndpoint:
        """Return how peers reach memory registered here."""
        ...

    def offers(self) -> tuple[TransportOffer, ...]:
        """Return every way to reach memory registered here, the fastest first; at least one."""
        return (TransportOffer(self.endpoint(), self.traits, self.report()),)

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Make local memory writable by peers and usable as a source.

        Memory: the caller keeps it mapped and in place until `unregister` says that it is released.

        Raises:
            RegionError: `nbytes` < 1, or it overlaps a region that is registered already.
        """
        (region,) = self.register_all([(address, nbytes)])
        return region

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        """Register several ranges, in one call of the library where it has one that takes them all.

        Args:
            spans: (address, nbytes) of each; see `register`.

        Returns:
            Their regions, in this order; each is unregistered by itself.

        Raises:
            RegionError: one of them is refused, or they overlap; none is registered.
        """
        ...

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """End the right to write a region; whoever owns its memory frees it in `released`, and not before.

        A write of this transport that is not over, because another thread waits for it or its outcome
        is unknown, may go on reading what it was given, and a read filling it: so the memory must
        outlive the call. Memory that none of them was given is released at once. A batch of several
        native calls counts call by call: unregister nothing that a thread in `write` has still to send.

        Args:
            region: no write is begun with it any more.
            released: called once nothing that began here touches the memory: before this returns, or
                later by any thread, or never, where nobody can tell. Must not register, write or close.

        Raises:
            RegionError: not registered; `released` is not called.
        """
        ...

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Write all pieces and return once they are visible in the peer's memory.

        Idempotent: writing the same bytes again is harmless.

        Raises:
            RegionError: a piece lies outside local registered memory or outside
                `batch.regions`; nothing was sent.
            PeerUnreachable: no such process, or another incarnation of it.
            TransferFailed: over, incomplete, no further byte will land.
            TransferOutcomeUnknown: the deadline passed with bytes possibly in flight.
        """
        ...

    def fence(self, *, deadline_s: float) -> None:  # noqa: ARG002
        """Return once nothing lands here any more of what processes sent that have ended since.

        Called between writes; peers that live find their way back by themselves. Nothing to do
        where a write ends with its process.

        Raises:
            TransferFailed: something may still land.
        """
        return

    def close(self) -> None:
        """Unregister everything and end what was started. Idempotent."""
        ...
