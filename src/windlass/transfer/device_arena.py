"""`Arena` in the memory of a GPU."""

from __future__ import annotations

import functools
from typing import final

from windlass.memory.cuda.driver import Device
from windlass.transports.base import MemoryRegion, OneSidedTransport

__all__ = ["DeviceArena", "DeviceMemory"]


@final
class DeviceMemory:
    """As `DeviceArena`, for kernels of this process only: no transport knows it.

    Raises:
        TransferFailed: the GPU has not so much memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self.address = device.allocate(nbytes)

    def close(self) -> None:
        """Free it. Idempotent."""
        if self.address:
            self._device.free(self.address)
            self.address = 0


@final
class DeviceArena:
    """Registered GPU memory from cuMemAlloc, outside every pool; not cleared.

    Memory: owned by the arena from construction to `close`; peers may write it in between.

    Args:
        device: whose memory. transport: registers it. nbytes: capacity, >= 1.

    Raises:
        TransferFailed: the GPU has not so much memory.
        RegionError: the transport refuses to register.
    """

    def __init__(self, device: Device, transport: OneSidedTransport, nbytes: int) -> None:
        self._device, self._transport, self.nbytes = device, transport, nbytes
        self.address = device.allocate(nbytes)
        try:
            self.region: MemoryRegion = transport.register(self.address, nbytes)
        except BaseException:  # whatever it is: the memory must not outlive the attempt
            device.free(self.address)
            raise

    def close(self) -> None:
        """Unregister and free; before its transport is closed. Idempotent.

        The transport owns the memory until no write of its own can touch it any more.
        """
        address, self.address = self.address, 0
        if address:
            self._transport.unregister(self.region, functools.partial(self._device.free, address))
