"""What a transport can, for whoever chooses one and connects by it: traits, and what it has or has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from windlass.memory.cuda.gpu import Gpu
    from windlass.transports.base import RemoteRegion

CEILING_BYTES_PER_S: Mapping[str, float] = {
    "cuda-ipc": 397e9,  # copy engine from one H200 to another, benchmarks/gpu/bench_nvlink.py
    "rdma": 50e9,  # a NIC of 400 Gbit/s
    "posix-shm": 8.6e9,  # 0.95 of memcpy on a 2-core EPYC guest, benchmarks/bench_transports.py
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
