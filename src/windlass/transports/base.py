"""The transport interface: how bytes move between two processes.

A `OneSidedTransport` registers local memory, exports the right to write it, and writes into a
peer's exported memory without help from the peer's CPU. `TransportTraits` (`traits.py`) state how
transports differ and are sent to the controller. Optional capabilities are properties that may be
None (`allocator`, `mapper`), so callers never check the type of a transport.

The local right to use memory (`MemoryRegion`) and the remote right to write it (`RemoteRegion`) are
different types, as in perplexityai/pplx-garden `fabric_lib.pyi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from windlass.layout.columns import UInt64Array
from windlass.transports.traits import (
    MemoryAllocator,
    TransportTraits,
    WireReport,
)

if TYPE_CHECKING:
    from windlass.memory.cuda.gpu import Gpu


class PeerEndpoint(msgspec.Struct, frozen=True):
    """Address and identity of the process that owns memory.

    Attributes:
        transport: registry name of the transport.
        address: transport-specific: `host:port`, a pid, a name.
        incarnation: identity of the process behind `address` (start time, random id). A new process
            has a new incarnation, and writes to an old one are refused.
    """

    transport: str
    address: str
    incarnation: str


class RemoteRegion(msgspec.Struct, frozen=True):
    """The right to write `nbytes` bytes at `address` of a peer. Sent in messages.

    Attributes:
        endpoint: process that owns the memory.
        address: virtual address in the owner's process.
        nbytes: size.
        key: transport-specific, such as a segment name or an rkey; empty if the transport needs
            none.
    """

    endpoint: PeerEndpoint
    address: int
    nbytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered local memory. The caller that registered it owns it until `unregister`.

    Attributes:
        address: virtual address in this process.
        nbytes: size.
        remote: the right to write it, for peers.
        alternatives: the same right for peers that use another transport than `remote` does.
    """

    address: int
    nbytes: int
    remote: RemoteRegion
    alternatives: tuple[RemoteRegion, ...] = ()

    @property
    def remotes(self) -> tuple[RemoteRegion, ...]:
        """The rights to write this memory, one per transport that it is registered with."""
        return (self.remote, *self.alternatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBatch:
    """Writes to one peer, as columns.

    Attributes:
        endpoint: the peer.
        local_addresses: (n,) uint64, inside registered local memory.
        remote_addresses: (n,) uint64, inside `regions`.
        nbytes: (n,) uint64, each >= 1.
        regions: published regions that contain `remote_addresses`. Every write is checked against
            them before the first byte is sent.
    """

    endpoint: PeerEndpoint
    local_addresses: UInt64Array
    remote_addresses: UInt64Array
    nbytes: UInt64Array
    regions: tuple[RemoteRegion, ...]


class TransportOffer(msgspec.Struct, frozen=True):
    """One transport that a rank can be written with and can write with.

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
        """Registry name."""
        return self.endpoint.transport


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Published region mapped here: local address = address at the owner + `shift`."""

    start: int
    stop: int
    shift: int


class PeerMapper(Protocol):
    """Mapper of peers' memory into the address space of a GPU, for kernels that store there."""

    @property
    def gpu(self) -> Gpu:
        """GPU whose kernels store."""
        ...

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map a peer's region. Its allocation is opened once and stays mapped until `keep_mapped` drops it.

        Raises:
            PeerUnreachable: the owner's process has ended.
            RegionError: the key is malformed, or the region exceeds its allocation.
            TransferFailed: the driver cannot open the allocation.
        """
        ...

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Unmap every allocation of a peer that contains none of `regions`.

        Memory that its owner frees stays allocated on the owner's GPU while it is mapped here.
        After a write with an unknown outcome nothing is unmapped, because kernels may still store.
        """
        ...


class OneSidedTransport(Protocol):
    """Transport that writes into a peer's memory. Instances are thread-safe; every method may block.

    Each transport turns native return codes into exceptions in exactly one function. Derive from
    this class to inherit the optional parts: no `allocator`, no `mapper`, one offer, no fence.
    """

    @property
    def traits(self) -> TransportTraits:
        """Capabilities of this transport."""
        ...

    @property
    def allocator(self) -> MemoryAllocator | None:
        """Allocator of memory that peers can write; None if they can write any memory."""
        return None

    @property
    def mapper(self) -> PeerMapper | None:
        """Mapper of peers' memory for kernels that store into it; None if only `write` reaches that memory."""
        return None

    def report(self) -> WireReport:
        """Return the protocol and device that the transport uses."""
        ...

    def endpoint(self) -> PeerEndpoint:
        """Return the address at which peers reach memory registered here."""
        ...

    def offers(self) -> tuple[TransportOffer, ...]:
        """Return every way to reach memory registered here, the fastest first; at least one."""
        return (TransportOffer(self.endpoint(), self.traits, self.report()),)

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Make local memory writable by peers and usable as a source.

        Memory: the caller keeps it mapped and in place until `unregister` calls `released`.

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
            One region per range, in the same order. Each is unregistered separately.

        Raises:
            RegionError: one range was refused, or two overlap. No range is registered then.
        """
        ...

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """End the right to write a region. The owner of the memory frees it in `released`, never earlier.

        A write of this transport may be unfinished: another thread waits for it, or its outcome is
        unknown. It may still read memory of the batch, and an unfinished read may still fill
        memory, so that memory must outlive the call. Memory that no unfinished call uses is
        released at once. If a batch takes several native calls, each call counts separately: do not
        unregister a region that a thread in `write` still has to send.

        Args:
            region: registered region. The caller starts no further write with it.
            released: called once no call that this transport started touches the memory: before
                `unregister` returns, later in any thread, or never if the transport cannot know. It
                must not register, write or close.

        Raises:
            RegionError: the region is not registered; `released` is not called.
        """
        ...

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Write all pieces and return once they are visible in the peer's memory.

        Idempotent: writing the same bytes again is harmless.

        Raises:
            RegionError: a piece is outside local registered memory or outside `batch.regions`.
                Nothing was sent.
            PeerUnreachable: the peer's process has ended, or another incarnation has its address.
            TransferFailed: the write ended incomplete. No further byte will arrive.
            TransferOutcomeUnknown: the deadline passed and bytes may still be in flight.
        """
        ...

    def fence(self, *, deadline_s: float) -> None:  # noqa: ARG002
        """Return once no write of an ended process can change memory here any more.

        The caller fences between writes. Peers that are alive reconnect by themselves. If a write
        ends with the writing process, nothing needs to be done.

        Raises:
            TransferFailed: writes of an ended process may still arrive.
        """
        return

    def close(self) -> None:
        """Unregister everything and stop threads and libraries of this transport. Idempotent."""
        ...
