"""Host memory that sleeps: it keeps its addresses and gives its pages back to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import final

from windlass.errors import ConfigError, TransferFailed

_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_PROT_NONE = 0
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]


@final
class SleepingMemory:
    """Private memory of this process that can lose its pages and get new ones at the same addresses.

    While the memory sleeps, any access by this process ends the process, and no other process can read or write the memory.
    vLLM's sleep mode and torch_memory_saver do the same with GPU memory.

    Args:
        address, nbytes: whole pages of one private anonymous mapping, such as a `HostBuffer`.

    Attributes:
        is_asleep: whether the memory has no pages.

    Raises:
        ConfigError: the memory does not begin at a page.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        if address % mmap.PAGESIZE:
            raise ConfigError(f"address must be a multiple of {mmap.PAGESIZE}, got {address:#x}")
        self._address = address
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.is_asleep = False

    def sleep(self) -> None:
        """Give all pages back to the system. The bytes are lost. Idempotent.

        Raises:
            TransferFailed: the system refused the mapping. The memory then counts as asleep.
        """
        if not self.is_asleep:
            # If the mapping fails, the system may already have removed the old pages. So the memory counts as asleep
            # from here, and `wake` maps it again.
            self.is_asleep = True
            self._map(_PROT_NONE, _MAP_NORESERVE)

    def wake(self) -> None:
        """Get zeroed pages at the same addresses. Idempotent.

        Raises:
            TransferFailed: the system has too little memory; the memory still sleeps.
        """
        if self.is_asleep:
            self._map(mmap.PROT_READ | mmap.PROT_WRITE, _MAP_POPULATE)
            self.is_asleep = False

    def _map(self, protection: int, flags: int) -> None:
        """Map the same addresses again, with this protection and these additional flags of mmap.

        Raises:
            TransferFailed: the system refused the mapping.
        """
        found = _mmap(self._address, self._nbytes, protection, _PRIVATE | flags, -1, 0)
        # MAP_FIXED maps exactly at this address or fails, so tensors that point here stay valid.
        if found != self._address:
            reason = os.strerror(ctypes.get_errno())
            raise TransferFailed(
                f"the system could not map {self._nbytes} bytes at {self._address:#x} again: {reason}"
            )
