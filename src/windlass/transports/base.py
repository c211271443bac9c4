"""The transport seam: how bytes move.

`OneSidedTransport` registers local memory, exports the right to write it, and writes
into a peer's exported memory while the peer's CPU does something else. A collective
backend (all ranks enter together) is another protocol on purpose: it cannot hide behind
a one-sided interface.

The local right to use memory (`MemoryRegion`) and the remote right to write it
(`RemoteRegion`) are different types, as in perplexityai/pplx-garden `fabric_lib.pyi`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "AllocatingTransport",
    "MemoryRegion",
    "NetworkTransport",
    "OneSidedTransport",
    "PeerEndpoint",
    "RemoteRegion",
    "WireReport",
    "WriteBatch",
    "gpu_ordinal_of",
]


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
    """

    address: int
    nbytes: int
    remote: RemoteRegion


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
    local_addresses: npt.NDArray[np.uint64]
    remote_addresses: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    regions: tuple[RemoteRegion, ...]

    @property
    def total_nbytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.nbytes.sum())


class WireReport(msgspec.Struct, frozen=True):
    """What a transport really uses, after looking, not after asking.

    Attributes:
        transport: registry name.
        protocol: the wire in use: `process_vm_writev`, `posix-shm`, `tcp`, `rdma`, `memory`.
        detail: version, device, anything a person would ask.
        one_sided: whether the target's process may be stopped while a write completes.
        on_gpu: whether the memory is a GPU's, which the host cannot hash and hand on.
    """

    transport: str
    protocol: str
    detail: str
    one_sided: bool
    on_gpu: bool = False


@runtime_checkable
class OneSidedTransport(Protocol):
    """Writes into a peer's memory. Instances are thread-safe; every method may block.

    A native return code becomes an exception in exactly one function per transport.
    """

    def report(self) -> WireReport:
        """What is really in use."""
        ...

    def endpoint(self) -> PeerEndpoint:
        """How peers reach memory registered here."""
        ...

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """Make local memory writable by peers and usable as a source.

        Memory: the caller keeps it mapped and in place until `unregister` says that it is released.

        Raises:
            RegionError: `nbytes` < 1, or it overlaps a region that is registered already.
        """
        ...

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """Withdraw a region; whoever owns its memory frees it in `released`, and not before.

        A write of this transport that is not over, because another thread waits for it or its outcome
        is unknown, may go on reading what it was given, and a read filling it: so the memory must
        outlive the call. Memory that none of them was given is released at once. A batch of several
        native calls counts call by call: withdraw nothing that a thread in `write` has still to send.

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

    def fence(self, *, deadline_s: float) -> None:
        """Return once nothing lands here any more of what processes sent that have ended since.

        Called between writes; peers that live find their way back by themselves. Nothing to do
        where a process takes its writes with it.

        Raises:
            TransferFailed: something may still land.
        """
        ...

    def close(self) -> None:
        """Withdraw everything. Idempotent."""
        ...


@runtime_checkable
class NetworkTransport(Protocol):
    """A transport between hosts, for host memory or for the memory of one GPU.

    Attributes:
        gpu_ordinal: of the GPU whose memory it registers; -1 for host memory.
    """

    @property
    def gpu_ordinal(self) -> int: ...


def gpu_ordinal_of(transport: OneSidedTransport) -> int:
    """Of the GPU whose memory a network transport moves; -1 for every other transport."""
    return transport.gpu_ordinal if isinstance(transport, NetworkTransport) else -1


@runtime_checkable
class AllocatingTransport(Protocol):
    """A transport that can only expose memory which it allocated itself (shared memory)."""

    def allocate(self, nbytes: int) -> int:
        """Allocate exposable, zeroed memory; returns its address.

        Memory: owned by the transport, valid until `release` or `close`.
        """
        ...

    def release(self, address: int) -> None:
        """Free memory from `allocate`; it must not be registered any more."""
        ...
