"""Arena: a registered memory region for packed data, at one address for its whole life.

Its capacity decides when a rank packs. An arena as large as all packed data is filled before the
engines pause. A smaller arena bounds the memory: during the writes, one half is packed while the
other half is written. The arena is outside every pool that a trainer offloads, so offloading
training weights never invalidates its registration.
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
    """Return offsets for consecutive aligned objects of these sizes, and the total size in bytes."""
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
    """Registered memory. Host memory is page-aligned, zeroed and already touched; GPU memory is not cleared.

    Memory: owned by the arena from construction to `close`; peers may write it during that time.

    Args:
        transport: registers the memory, and allocates it if the transport has its own allocator.
        nbytes: capacity, >= 1.
        memory: memory to allocate in; host memory by default.

    Attributes:
        bytes: host memory as a uint8 array, valid until `close`; empty on a GPU.

    Raises:
        ConfigError: `nbytes` < 1.
        TransferFailed: the GPU has not enough memory.
        RegionError: the transport refuses to register.
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
            # Touch all pages now, because the first touch takes up to 3 s per GiB.
            self.bytes[:: mmap.PAGESIZE] = 0
        self._buffer: Buffer | None = buffer
        self.address = buffer.address
        try:
            self.region: MemoryRegion = transport.register(self.address, nbytes)
        except BaseException:
            # After any error the memory must be freed.
            self.bytes = np.empty(0, np.uint8)
            buffer.close()
            raise

    def close(self) -> None:
        """Unregister and free the memory. Call this before the transport is closed. Idempotent.

        Memory: no peer may write after this. The transport frees the memory as soon as none of its
        own writes uses the memory. Views of `bytes` stay readable if the arena mapped the memory
        itself, but not if the transport allocated it.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self.bytes, self.nbytes = np.empty(0, np.uint8), 0
            self._transport.unregister(self.region, buffer.close)


@final
class _Allocated:
    """Host memory from a transport's own allocator, for a transport that can expose no other memory."""

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
"""Memory that a write or a kernel of unknown outcome may still use; kept until the process ends."""


def keep_mapped(held: object) -> None:
    """Keep memory until the process ends, because a write or kernel of unknown outcome may still use it."""
    _ABANDONED.append(held)


@final
class ArenaSlot:
    """Slot for at most one arena. Not thread-safe.

    Args:
        make: allocates and registers an arena of the given number of bytes.
        limit_nbytes: maximum capacity; 0 for as much as one update needs.

    Attributes:
        arena: the current arena; None if nothing is packed.
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
        """Return the capacity of an arena for an update that packs `needed_nbytes`."""
        return min(needed_nbytes, self.limit_nbytes) if self.limit_nbytes else needed_nbytes

    def fit(self, capacity: int) -> None:
        """Make the arena at least `capacity` bytes large; free it if `capacity` is 0.

        Raises:
            RegionError: memory cannot be registered.
        """
        if self.arena is not None and (self.arena.nbytes < capacity or not capacity):
            self.arena.close()
            self.arena = None
        if self.arena is None and capacity:
            self.arena = self._make(capacity)

    def abandon(self, *, renew: bool) -> None:
        """Keep the arena's memory until the process ends, and do not use it again. With `renew`, allocate a new arena."""
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
