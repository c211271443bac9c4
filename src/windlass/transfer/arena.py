"""Arena: registered memory for packed data. Its address never changes.

The size of the arena decides when a rank packs. If all packed data fits, the rank packs before the engines pause. A
smaller arena saves memory: the rank packs during the writes, into one half of the arena while the other half is being
written. The arena is in none of the memory pools that a trainer offloads, so it stays registered when the trainer
offloads its weights.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import final

import numpy as np

from windlass.closing import Closing
from windlass.errors import ConfigError
from windlass.layout.columns import UInt8Array
from windlass.memory.host import HostBuffer
from windlass.memory.ops import Buffer, MemoryOps
from windlass.memory.packing import aligned
from windlass.memory.place import memory_on
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.traits import MemoryAllocator


def aligned_offsets(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the byte offsets of aligned objects that are stored one after another, and their total size in bytes."""
    offsets, total = [], 0
    for nbytes in sizes:
        offsets.append(total)
        total += aligned(nbytes)
    return tuple(offsets), total


def memory_of(transport: OneSidedTransport) -> MemoryOps:
    """Return the `MemoryOps` for the memory that `transport` registers.

    Raises:
        TransportUnavailable: the kernels cannot be compiled for the GPU.
    """
    if transport.mapper is None:
        return memory_on(transport.traits.gpu)
    from windlass.memory.device import CudaMemory

    return CudaMemory(transport.mapper.gpu)


@final
class Arena(Closing):
    """Memory that is registered with a transport.

    The arena owns the memory until `close`. Peers may write to it until then. Host memory is page-aligned and zeroed,
    and all its pages exist; GPU memory is not cleared.

    Args:
        transport: registers the memory, and allocates host memory if it has its own allocator.
        nbytes: size in bytes, >= 1.
        memory: where to allocate; None for host memory.

    Attributes:
        address: address of the first byte.
        nbytes: size in bytes; 0 after `close`.
        bytes: host memory as a (nbytes,) uint8 array, valid until `close`; empty on a GPU.
        region: registration of the memory.

    Raises:
        ConfigError: `nbytes` < 1.
        TransferFailed, TransportUnavailable, OSError: there is too little memory.
        RegionError: the transport cannot register the memory.
    """

    def __init__(
        self, transport: OneSidedTransport, nbytes: int, memory: MemoryOps | None = None
    ) -> None:
        if nbytes < 1:
            raise ConfigError(f"Arena: nbytes must be >= 1, got {nbytes}")
        self._transport, self.nbytes = transport, nbytes
        self.bytes: UInt8Array = np.empty(0, np.uint8)
        buffer: Buffer
        if memory is not None and memory.ordinal >= 0:
            buffer = memory.allocate(nbytes)
        else:
            allocator = transport.allocator
            buffer = HostBuffer(nbytes) if allocator is None else _Allocated(allocator, nbytes)
            self.bytes = buffer.bytes
            # Write to every page now, because the first access to a page is slow: up to 3 s per GiB.
            self.bytes[:: mmap.PAGESIZE] = 0
        self._buffer: Buffer | None = buffer
        self.address = buffer.address
        try:
            self.region: MemoryRegion = transport.register(self.address, nbytes)
        except BaseException:
            # Free the memory after every error, such as KeyboardInterrupt.
            self.bytes = np.empty(0, np.uint8)
            buffer.close()
            raise

    def close(self) -> None:
        """Unregister and free the memory. Idempotent.

        No peer may write to the memory after this call. The transport must still be open. If a write of this process
        still reads the memory, the transport frees the memory after that write. Existing views of `bytes` stay readable,
        unless the transport allocated the memory.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self.bytes, self.nbytes = np.empty(0, np.uint8), 0
            self._transport.unregister(self.region, buffer.close)


@final
class _Allocated:
    """Host memory from a transport that can register only memory of its own allocator."""

    def __init__(self, allocator: MemoryAllocator, nbytes: int) -> None:
        self._allocator, self.nbytes = allocator, nbytes
        self.address = allocator.allocate(nbytes)
        raw = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.bytes: UInt8Array = np.ctypeslib.as_array(raw)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self.bytes = np.empty(0, np.uint8)
            self._allocator.release(address)


_ABANDONED: list[object] = []
"""Owners of abandoned memory, see `keep_mapped`."""


def keep_mapped(held: object) -> None:
    """Abandon memory: keep its owner `held` until the process ends, because a late write or kernel may still use it."""
    _ABANDONED.append(held)


@final
class ArenaSlot:
    """Holder of at most one arena, which it replaces by a larger one when needed. Not thread-safe.

    Args:
        make: function that allocates and registers an arena of the given number of bytes.
        limit_nbytes: maximum size of the arena in bytes; 0 for as much as one update needs.

    Attributes:
        arena: the current arena; None if nothing needs packing.
    """

    def __init__(self, make: Callable[[int], Buffer], limit_nbytes: int) -> None:
        self._make = make
        self.limit_nbytes = limit_nbytes
        self.arena: Buffer | None = None

    @property
    def address(self) -> int:
        """Address of the first byte; 0 without an arena."""
        return self.arena.address if self.arena is not None else 0

    @property
    def nbytes(self) -> int:
        """Size of the arena in bytes; 0 without an arena."""
        return self.arena.nbytes if self.arena is not None else 0

    def capacity_for(self, needed_nbytes: int) -> int:
        """Return the size in bytes that the arena should have for an update that packs `needed_nbytes`."""
        return min(needed_nbytes, self.limit_nbytes) if self.limit_nbytes else needed_nbytes

    def fit(self, capacity: int) -> None:
        """Make the arena at least `capacity` bytes large; free it if `capacity` is 0.

        Raises:
            RegionError, TransferFailed: no memory of this size can be allocated or registered. There is no arena after
                this error.
        """
        if self.arena is not None and (self.arena.nbytes < capacity or not capacity):
            self.arena.close()
            self.arena = None
        if self.arena is None and capacity:
            self.arena = self._make(capacity)

    def abandon(self, *, renew: bool) -> None:
        """Keep the arena allocated until the process ends, and do not use it any more.

        With `renew`, allocate a new arena of the same size.

        Raises:
            RegionError, TransferFailed: the new arena cannot be allocated or registered. There is no arena after this
                error.
        """
        if self.arena is not None:
            nbytes = self.arena.nbytes
            keep_mapped(self.arena)
            self.arena = None
            if renew:
                self.arena = self._make(nbytes)

    def close(self) -> None:
        """Free the arena. Idempotent."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
