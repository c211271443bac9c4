"""The transport seam: how bytes move, and what each transport can.

`OneSidedTransport` registers local memory, exports the right to write it, and writes
into a peer's exported memory while the peer's CPU does something else. What differs between
transports is said by `TransportTraits`, which travel to the controller, and by capabilities
that a transport has or has not (`allocator`, `mapper`); nobody asks for its type.

The local right to use memory (`MemoryRegion`) and the remote right to write it
(`RemoteRegion`) are different types, as in perplexityai/pplx-garden `fabric_lib.pyi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

import msgspec

from windlass.errors import ConfigError
from windlass.layout.columns import UInt64Array
from windlass.memory.cuda.gpu import Gpu

CEILING_BYTES_PER_S: Mapping[str, float] = {
    "cuda-ipc": 397e9,  # copy engine from one H200 to another, benchmarks/gpu/bench_nvlink.py
    "rdma": 50e9,  # a NIC of 400 Gbit/s
    "memory": 9e9,  # memcpy by one thread of a 2-core EPYC guest, as the next three
    "posix-shm": 8.6e9,  # 0.95 of memcpy, benchmarks/bench_transports.py
    "process_vm_writev": 6e9,  # 0.66 of memcpy
    "process_vm_writev-ucx": 3e9,  # one thread copies
    "tcp": 1.2e9,  # a NIC of 10 Gbit/s
}
"""What one link can reach at best, by wire: the order counts, not the last digit. A transport of
another distribution states its own number."""


class MemoryType(StrEnum):
    """Where registered memory lies: in the host's memory or in that of a CUDA GPU."""

    HOST = "host"
    CUDA = "cuda"


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


class WireReport(msgspec.Struct, frozen=True):
    """What a transport really uses, after looking, not after asking.

    Attributes:
        transport: registry name.
        protocol: the wire in use: `process_vm_writev`, `posix-shm`, `tcp`, `rdma`, `memory`.
        detail: version, device, anything a person would ask.
    """

    transport: str
    protocol: str
    detail: str


class TransportTraits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a live transport can. Travels: the controller may not have the transport at all.

    Attributes:
        same_host: peers are processes of this host, one namespace of pids and one of networks.
        one_sided: the target's process may be stopped while a write completes.
        ceiling_bytes_per_s: what one link can reach at best; see `CEILING_BYTES_PER_S`.
        gpu: ordinal of the GPU whose memory it registers; -1 for host memory.
        strided_stores: the source's kernels store where each element belongs, so that nothing
            lands packed.
        notifies: the source tells the target which bytes have landed while it still writes.
        allocates: peers can write only memory that the transport's `allocator` gave out; the key of
            other memory is empty.
    """

    same_host: bool
    one_sided: bool
    ceiling_bytes_per_s: float
    gpu: int = -1
    strided_stores: bool = False
    notifies: bool = False
    allocates: bool = False

    @property
    def memory(self) -> MemoryType:
        """The kind of memory that it registers."""
        return MemoryType.HOST if self.gpu < 0 else MemoryType.CUDA


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


class MemoryAllocator(Protocol):
    """Allocates memory of a transport that can expose no other (shared memory)."""

    def allocate(self, nbytes: int) -> int:
        """Allocate exposable, zeroed memory; returns its address.

        Memory: owned by the transport, valid until `release` or `close`.

        Raises:
            RegionError: `nbytes` < 1.
            TransportUnavailable: there is no room.
        """
        ...

    def release(self, address: int) -> None:
        """Free memory from `allocate`.

        Raises:
            RegionError: not from `allocate`, or still registered.
        """
        ...


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A published region as this process reaches it: add `shift` to the owner's addresses."""

    start: int
    stop: int
    shift: int


class PeerMapper(Protocol):
    """Maps memory of peers into the address space of a GPU, for kernels that store there themselves."""

    @property
    def gpu(self) -> Gpu:
        """The GPU whose kernels store."""
        ...

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map a peer's region; its allocation is opened once and stays mapped: see `keep_mapped`.

        Raises:
            PeerUnreachable: the owner is gone.
            RegionError: the key is none, or the region reaches past the allocation.
            TransferFailed: the driver cannot open it.
        """
        ...

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Unmap every allocation of a peer that none of `regions` lies in.

        What its owner frees stays allocated on the owner's GPU for as long as it is mapped here. After
        a write whose outcome is unknown nothing is unmapped: stores may still go on.
        """
        ...


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


class TransportConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True
):
    """Settings of one transport; the tag of a subclass is the transport's name in the registry.

    Decoded from `{"type": "mooncake", "host": "192.0.2.1"}`.

    Attributes:
        memory: kinds of memory that it can register.
        between_hosts: whether peers can be on other hosts.
        is_automatic: whether `auto` offers it.
        remedy: what a person can do where it does not start; one line.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset({MemoryType.HOST})
    between_hosts: ClassVar[bool] = False
    is_automatic: ClassVar[bool] = True
    remedy: ClassVar[str] = "see the message"

    @property
    def name(self) -> str:
        """Registry name."""
        return str(type(self).__struct_config__.tag)

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport.

        Args:
            towards: URL of the controller; a network transport without a host takes this host's
                address on the way there.
            gpu: ordinal of the GPU whose memory will be registered, whatever the settings say; -1
                for host memory, or for what the settings say.

        Raises:
            ConfigError, PeerUnreachable: this host has no such address; see `own_address`.
            TransportUnavailable: a dependency or kernel feature is missing, or the wire is not the
                one that was asked for.
        """
        raise ConfigError(f"transport {self.name!r}: its configuration must define create()")
