"""Arena: one registered region that is never remapped.

Its capacity is the knob between the two designs of the field: a small ring (bounded
memory, packed and written in turns) or a whole shard (everything packed before the
pause). Because it lies outside any pool that is offloaded, offloading training weights
never invalidates its registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import ConfigError
from windlass.transports.base import AllocatingTransport, MemoryRegion, OneSidedTransport

__all__ = ["Arena"]


@final
class Arena:
    """Page-aligned, pre-touched, registered memory.

    Memory: owned by the arena from construction to `close`; peers may write it in between.

    Args:
        transport: registers the memory, and allocates it where it must.
        nbytes: capacity, >= 1.

    Raises:
        ConfigError: `nbytes` < 1.
        RegionError: the transport refuses to register.
    """

    def __init__(self, transport: OneSidedTransport, nbytes: int) -> None:
        if nbytes < 1:
            raise ConfigError(f"Arena: nbytes must be >= 1, got {nbytes}")
        self._transport = transport
        self._closed = False
        if isinstance(transport, AllocatingTransport):
            self._address = transport.allocate(nbytes)
            raw = (ctypes.c_uint8 * nbytes).from_address(self._address)
            self._bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(raw)
        else:
            mapping = mmap.mmap(-1, nbytes)
            with contextlib.suppress(OSError):  # a kernel without huge pages works as well
                mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to fault in and to pin
            self._bytes = np.frombuffer(mapping, np.uint8)  # unmapped when its last view is gone
            self._address = int(self._bytes.ctypes.data)
        self._bytes[:: mmap.PAGESIZE] = 0  # first touch costs up to 3 s per GiB: pay it here
        try:
            self._region = transport.register(self._address, nbytes)
        except BaseException:  # whatever it is: the memory must not outlive the attempt
            self._detach()()
            raise

    @property
    def address(self) -> int:
        """Virtual address of the first byte."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return len(self._bytes)

    @property
    def region(self) -> MemoryRegion:
        """The registration."""
        return self._region

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as a uint8 array; valid until `close`."""
        return self._bytes

    def close(self) -> None:
        """Unregister and free; before its transport is closed. Idempotent.

        Memory: no peer may write after this. The transport owns it until no write of its own can
        touch it any more. Views of `bytes` taken earlier stay readable where the arena mapped the
        memory itself, and are dangling where the transport allocated it.
        """
        if self._closed:
            return
        self._closed = True
        self._transport.unregister(self._region, self._detach())

    def _detach(self) -> Callable[[], None]:
        """What frees the memory; until it is called or dropped the memory is there."""
        held, self._bytes = self._bytes, np.empty(0, np.uint8)
        return functools.partial(_free, self._transport, self._address, held)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free(transport: OneSidedTransport, address: int, _: npt.NDArray[np.uint8]) -> None:
    """Memory that was mapped goes with the last reference to its array, which the caller holds."""
    if isinstance(transport, AllocatingTransport):
        transport.release(address)
