"""POSIX shared memory: this process allocates it, peers map it and copy.

One-sided like `cma`, and it needs no ptrace permission; in exchange only memory that
came from `allocate` can be written by peers. Other memory may be registered as a source.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import PeerUnreachable, RegionError
from windlass.memory.ranges import merge_adjacent, split_pieces
from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    PeerEndpoint,
    RemoteRegion,
    WireReport,
    WriteBatch,
)
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive
from windlass.transports.regions import RegionTable, check_batch
from windlass.transports.segments import (
    MappedSegment,
    OwnedSegment,
    PeerSegments,
    create_segment,
    parse_key,
    remove_stale_segments,
    segment_key,
)

__all__ = ["ShmTransport"]

MAX_COPY_NBYTES = 512 << 20
"""Bytes per copy: bounds how long one can outlast a deadline. Large, because from some size on
libc copies past the cache, nearly twice as fast."""
SMALL_NBYTES = 128 << 10
"""Pieces below it are copied with the interpreter lock held: taking the lock back after each
piece would cost more than the copy when another Python thread is busy."""

UInt64Array = npt.NDArray[np.uint64]

_memmove_holding_lock = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0)


@final
class ShmTransport:
    """`OneSidedTransport` and `AllocatingTransport` over files in /dev/shm.

    Segments are removed at `release`, at `close`, at interpreter exit, and, after a death
    without either, by the next `ShmTransport` of the same user or the first peer that notices.
    """

    def __init__(self) -> None:
        remove_stale_segments()
        self._own, self._processes = OwnProcess("shm"), PeerProcesses()
        self._endpoint = self._own.endpoint
        self._table = RegionTable()
        self._lock = threading.Lock()
        self._segments: dict[int, OwnedSegment] = {}
        self._peers = PeerSegments()

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        return WireReport("shm", "posix-shm", f"pid {self._endpoint.address}", True)

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self._endpoint

    def allocate(self, nbytes: int) -> int:
        """See `AllocatingTransport.allocate`.

        Raises:
            RegionError: `nbytes` < 1.
            TransportUnavailable: /dev/shm is missing, not writable, or has no room.
        """
        segment = create_segment(nbytes)
        with self._lock:
            self._segments[segment.address] = segment
        return segment.address

    def release(self, address: int) -> None:
        """See `AllocatingTransport.release`.

        Raises:
            RegionError: not from `allocate`, or still registered.
        """
        with self._lock:
            segment = self._segments.get(address)
            if segment is None:
                raise RegionError(f"release: address must come from allocate, got {address:#x}")
            for start, nbytes in self._table.spans():
                if start < address + segment.nbytes and address < start + nbytes:
                    raise RegionError(f"release: memory at {address:#x} must be unregistered first")
            del self._segments[address]
        segment.remove()

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`; memory from elsewhere is a source only."""
        key = ""
        with self._lock:
            for segment in self._segments.values():
                offset = address - segment.address
                if offset >= 0 and offset + nbytes <= segment.nbytes:
                    key = segment_key(segment.name, offset)
            region = MemoryRegion(
                address, nbytes, RemoteRegion(self._endpoint, address, nbytes, key)
            )
            self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """See `OneSidedTransport.unregister`."""
        self._table.remove(region)
        if released is not None:
            released()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`; the outcome is never unknown."""
        check_batch(self._table, batch, "shm")
        try:
            self._processes.check(batch.endpoint)
            deadline = Deadline.after(deadline_s, f"shm write to pid {batch.endpoint.address}")
            targets, mapped = self._translate(batch)
            _copy(batch.local_addresses, targets, batch.nbytes, deadline)
            del mapped  # alive until here: another thread may drop the segment from the cache
            check_alive(batch.endpoint)
        except PeerUnreachable:
            self._peers.forget_dead()
            raise

    def fence(self, *, deadline_s: float) -> None:
        """See `OneSidedTransport.fence`: a write ends with its process."""

    def close(self) -> None:
        """See `OneSidedTransport.close`."""
        self._own.close()
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        self._table.clear()
        self._peers.close()
        for segment in segments:
            segment.remove()

    def _translate(self, batch: WriteBatch) -> tuple[UInt64Array, list[MappedSegment]]:
        """Addresses of the pieces in this process's mapping of the peer's segments."""
        regions = sorted(batch.regions, key=_region_address)
        starts = np.array([r.address for r in regions], np.uint64)
        slot = np.searchsorted(starts, batch.remote_addresses, side="right") - 1
        mapped: list[MappedSegment] = []
        bases = np.zeros(len(regions), np.uint64)
        for index in np.unique(slot).tolist():
            region = regions[index]
            name, offset = parse_key(region)
            mapped.append(self._peers.map(region.endpoint, name, offset + region.nbytes))
            bases[index] = mapped[-1].address + offset
        return bases[slot] + (batch.remote_addresses - starts[slot]), mapped


def _region_address(region: RemoteRegion) -> int:
    return region.address


def _copy(local: UInt64Array, target: UInt64Array, nbytes: UInt64Array, deadline: Deadline) -> None:
    pieces = split_pieces(*merge_adjacent(local, target, nbytes), MAX_COPY_NBYTES)
    for source, to, count in zip(*(column.tolist() for column in pieces), strict=True):
        deadline.check_before_more()
        if count < SMALL_NBYTES:
            _memmove_holding_lock(to, source, count)
        else:
            ctypes.memmove(to, source, count)
