"""Memory from which kernels and copy engines of a GPU read: memory of the GPU, or host memory over PCIe.

Offloaded weights (FSDP2's CPUOffloadPolicy) are not uploaded to the GPU first: a kernel reads them
over PCIe, casts them, and writes them over NVLink into the engine.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from windlass.errors import RegionError
from windlass.memory.cuda.driver import Device, MemoryKind, gpu_of, memory_kind
from windlass.memory.host import HostBuffer
from windlass.memory.ranges import joined_ranges

_NUM_TOUCHING = 8
"""Number of threads that write the pages of a new arena."""
_TOUCHED_NBYTES = 256 << 20
"""Bytes that a thread writes at a time."""


@final
class SourceMemory:
    """Access of one GPU's kernels to a rank's parameters, on the GPU or in host memory.

    `reach` pins pageable host memory, which takes about as long as reading the memory once. It does not pin
    memory that is pinned already (torch's `pin_memory`). The trainer must keep the pinned parameters allocated
    until `close` or the next `reach` unpins them.

    Args:
        device: GPU whose kernels read the parameters.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned: list[int] = []

    @property
    def has_pinned(self) -> bool:
        """True if this object has pinned memory."""
        return bool(self._pinned)

    def reach(self, parameters: Sequence[tuple[int, int]]) -> list[int]:
        """Unpin the memory that an earlier call pinned, and make `parameters` accessible to kernels.

        Args:
            parameters: address and size in bytes of each parameter. Size 0 stands for a parameter without elements on
                this rank.

        Returns:
            For each parameter, the address that kernels use; 0 for size 0.

        Raises:
            RegionError: a parameter is in memory of another GPU.
            TransferFailed: the driver cannot pin so much host memory.
        """
        self.close()
        kinds = [memory_kind(address) if nbytes else None for address, nbytes in parameters]
        pageable = [
            parameter
            for parameter, kind in zip(parameters, kinds, strict=True)
            if kind is MemoryKind.PAGEABLE
        ]
        for start, stop in covering_pages(pageable):
            self._device.pin(start, stop - start)
            self._pinned.append(start)
        return [
            self._reached(address, kind) if kind else 0
            for (address, _), kind in zip(parameters, kinds, strict=True)
        ]

    def _reached(self, address: int, kind: MemoryKind) -> int:
        """Return the address that kernels use for the memory at `address`; raise RegionError if another GPU has the memory."""
        if kind is not MemoryKind.DEVICE:
            return self._device.device_pointer(address)
        if (ordinal := gpu_of(address)) != self._device.ordinal:
            raise RegionError(
                f"prepare: parameters must be on GPU {self._device.ordinal} or in host memory, got one "
                f"on GPU {ordinal}"
            )
        return address

    def close(self) -> None:
        """Unpin all memory that this object has pinned. Idempotent."""
        for start in self._pinned:
            self._device.unpin(start)
        self._pinned = []


def covering_pages(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pages that `memory` touches, as disjoint ranges (start, stop) in ascending order.

    `memory` has one (address, size in bytes) per range of bytes.
    """
    page = mmap.PAGESIZE
    pages = ((0, at // page * page, -(-(at + nbytes) // page) * page) for at, nbytes in memory)
    return [(start, stop) for _, start, stop in joined_ranges(pages)]


@final
class PinnedArena:
    """Pinned host memory of this process. Peers do not write it, and no transport registers it.

    Memory: owned by the arena from construction to `close`. Several threads write the pages, so that
    Linux zeroes new pages in parallel.

    Args:
        device: GPU that accesses the memory.
        nbytes: capacity, >= 1.

    Attributes:
        address: address for kernels and copy engines.

    Raises:
        TransferFailed: the driver cannot pin so much host memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self._memory = HostBuffer(nbytes)
        self._start = self._memory.address
        with ThreadPoolExecutor(_NUM_TOUCHING, "windlass-pin") as threads:
            for _ in threads.map(self._touch, range(0, nbytes, _TOUCHED_NBYTES)):
                pass
        # Pin whole pages. The mapping consists of whole pages, so no other memory is pinned.
        device.pin(self._start, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.address = device.device_pointer(self._start)

    def _touch(self, at: int) -> None:
        """Zero up to `_TOUCHED_NBYTES` from offset `at`. `memset` releases the GIL."""
        ctypes.memset(self._start + at, 0, min(_TOUCHED_NBYTES, self.nbytes - at))

    def close(self) -> None:
        """Unpin and release the memory. Idempotent."""
        if self.address:
            self._device.unpin(self._start)
            self._memory.close()
            self.address = 0
