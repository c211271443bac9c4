"""`Arena` in host memory that kernels and copy engines of a GPU reach over PCIe."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import final

from windlass.memory.cuda.driver import Device

__all__ = ["PinnedArena"]

_NUM_TOUCHING = 8
_TOUCHED_NBYTES = 256 << 20


@final
class PinnedArena:
    """Host memory of this process, locked; no peer writes it and no transport knows it.

    Memory: owned by the arena from construction to `close`. Touched by several threads at once,
    because the kernel zeroes pages one after another.

    Args:
        device: reaches it. nbytes: capacity, >= 1.

    Attributes:
        address: where kernels and copy engines find it.

    Raises:
        TransferFailed: the host refuses to lock so much memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self._mapping = mmap.mmap(-1, nbytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages works as well
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        with ThreadPoolExecutor(_NUM_TOUCHING, "windlass-pin") as threads:
            for _ in threads.map(self._touch, range(0, nbytes, _TOUCHED_NBYTES)):
                pass
        # Whole pages: the mapping ends with one.
        device.pin(self._start, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.address = device.device_pointer(self._start)

    def _touch(self, at: int) -> None:
        """In a thread; releases the interpreter."""
        ctypes.memset(self._start + at, 0, min(_TOUCHED_NBYTES, self.nbytes - at))

    def close(self) -> None:
        """Let go of the pages; unmapped when nothing refers to them. Idempotent."""
        if self.address:
            self._device.unpin(self._start)
            self._mapping.close()
            self.address = 0
