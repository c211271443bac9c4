"""`cuda_ipc`: one-sided writes into GPU memory of another process of this host, over NVLink.

The owner exports the IPC handle of the allocation around a region; a peer maps it once and
stores into it, by kernel or by copy engine. The owner's process takes no part in a write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, Device, pointer_device
from windlass.memory.cuda.gpu import Gpu, end_queued
from windlass.memory.cuda.range_copy import RangeCopy
from windlass.transports.base import (
    MemoryRegion,
    PeerEndpoint,
    RemoteRegion,
    WireReport,
    WriteBatch,
)
from windlass.transports.deferred_free import Withdrawn
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive, is_own_process
from windlass.transports.regions import RegionTable, check_batch

__all__ = ["CudaIpcTransport", "MappedRegion"]


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A published region as this process reaches it: add `shift` to the owner's addresses."""

    start: int
    stop: int
    shift: int


@final
class CudaIpcTransport:
    """`OneSidedTransport` between GPUs of one host.

    Args:
        ordinal: the GPU whose memory is registered here, and which does the storing.
        num_multiprocessors: that a write may occupy; 0 for all.

    Attributes:
        gpu: does the storing, and what else this rank does with its GPU's memory.

    Raises:
        TransportUnavailable: no NVIDIA driver, no such GPU, no NVRTC.
    """

    def __init__(self, ordinal: int = 0, num_multiprocessors: int = 0) -> None:
        self.gpu = Gpu(ordinal, num_multiprocessors)
        self._own, self._peers = OwnProcess("cuda_ipc"), PeerProcesses()
        self._endpoint = self._own.endpoint
        self._table = RegionTable()
        self._lock = threading.Lock()
        self._withdrawn = Withdrawn("cuda_ipc")
        self._opened: dict[tuple[PeerEndpoint, bytes], int] = {}

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        detail = f"GPU {self.gpu.device.ordinal}"
        return WireReport("cuda_ipc", "cuda-ipc", detail, one_sided=True, on_gpu=True)

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`.

        Raises:
            RegionError: memory that cannot be exported (host memory, expandable segments), that is
                of another GPU, or that reaches past its allocation.
        """
        ordinal = pointer_device(address)
        if ordinal != self.gpu.device.ordinal:
            raise RegionError(
                f"register: memory must be of GPU {self.gpu.device.ordinal}, got GPU {ordinal}"
            )
        start, size = self.gpu.device.allocation(address)
        if address + nbytes > start + size:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) must lie in one allocation, it ends "
                f"at {start + size:#x}"
            )
        key = f"{ordinal}:{address - start}:{self.gpu.device.export(start).hex()}"
        region = MemoryRegion(address, nbytes, RemoteRegion(self._endpoint, address, nbytes, key))
        self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """See `OneSidedTransport.unregister`. Under late kernels nothing is released."""
        with self._lock:
            self._table.remove(region)
            if released is not None:
                self._withdrawn.add(region, released, self._is_touched)

    def _is_touched(self, _: MemoryRegion) -> bool:
        """Nobody knows which memory late kernels touch."""
        return self.gpu.is_late

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map a peer's region; its allocation is opened once and stays mapped: see `keep_mapped`.

        Raises:
            PeerUnreachable: the owner is gone.
            RegionError: the key is none, or the region reaches past the allocation.
            TransferFailed: the driver cannot open it.
        """
        stop = region.address + region.nbytes
        ordinal, offset, handle = _parse_key(region.key)
        if is_own_process(region.endpoint):  # a handle can be opened by other processes only
            if ordinal != self.gpu.device.ordinal:
                self.gpu.device.enable_peer(Device(ordinal))
            return MappedRegion(region.address, stop, 0)
        self._peers.check(region.endpoint)
        with self._lock:
            self._forget_dead()
            place = (region.endpoint, handle)
            if place not in self._opened:
                self._opened[place] = self.gpu.device.open(handle)
            base = self._opened[place]
        _, size = self.gpu.device.allocation(base)
        if offset < 0 or offset + region.nbytes > size:
            raise RegionError(
                f"map: {region.endpoint.address} published {region.nbytes} bytes at {offset} of an "
                f"allocation of {size}"
            )
        return MappedRegion(region.address, stop, base + offset - region.address)

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Unmap every allocation of a peer that none of `regions` lies in.

        What its owner frees stays taken on the owner's GPU for as long as it is mapped here. After a
        write whose outcome is unknown nothing is unmapped: stores may still go on.
        """
        if self.gpu.is_late:
            return
        needed = {(region.endpoint, _parse_key(region.key)[2]) for region in regions}
        with self._lock:
            for place in self._opened.keys() - needed:
                self.gpu.device.close_handle(self._opened.pop(place))

    def _forget_dead(self) -> None:
        """Unmap what processes that are gone had exported, or their memory would stay taken."""
        if self.gpu.is_late:
            return
        for endpoint, handle in list(self._opened):
            try:
                check_alive(endpoint)
            except PeerUnreachable:
                self.gpu.device.close_handle(self._opened.pop((endpoint, handle)))

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`."""
        check_batch(self._table, batch, "cuda_ipc")
        check_alive(batch.endpoint)
        mapped = sorted((self.map_region(r) for r in batch.regions), key=lambda m: m.start)
        starts = np.array([m.start for m in mapped], np.uint64)
        shifts = np.array([m.shift for m in mapped], np.int64)
        owner = np.searchsorted(starts, batch.remote_addresses, "right") - 1
        remote = (batch.remote_addresses.astype(np.int64) + shifts[owner]).astype(np.uint64)
        began = time.monotonic()
        copy = RangeCopy(self.gpu, batch.local_addresses, remote, batch.nbytes)
        try:
            copy.queue()
            event = self.gpu.stream.record()
        # Whatever stops it half way: what was queued before may still be under way.
        except Exception as error:
            end_queued(self.gpu, error, max(deadline_s - (time.monotonic() - began), 0.0))
            copy.close()
            raise
        # If the outcome is unknown a kernel may still read the table: it stays allocated.
        self.gpu.wait(event, max(deadline_s - (time.monotonic() - began), 0.0))
        copy.close()
        check_alive(batch.endpoint)

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`: a write ends with its process."""

    def close(self) -> None:
        """See `OneSidedTransport.close`. Keeps mapped what late stores may still reach."""
        self._own.close()
        self._table.clear()
        with self._lock:
            self._withdrawn.close(self._is_touched)
        if self.gpu.is_late:
            return
        self.keep_mapped(())
        self.gpu.stream.close()


def _parse_key(key: str) -> tuple[int, int, bytes]:
    try:
        ordinal, offset, handle = key.split(":")
        raw = bytes.fromhex(handle)
        if len(raw) == IPC_HANDLE_NBYTES:
            return int(ordinal), int(offset), raw
    except ValueError:
        pass
    raise RegionError(f"map: key must be GPU:OFFSET:HANDLE, got {key[:80]!r}")
