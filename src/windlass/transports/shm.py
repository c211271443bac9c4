"""POSIX shared memory: this process allocates it, peers map it and copy.

One-sided like `cma`, and it needs no ptrace permission; in exchange only memory that
came from `allocate` can be written by peers. Other memory may be registered as a source.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from windlass.errors import PeerUnreachable, RegionError
from windlass.memory.ranges import merge_adjacent, split_pieces
from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryAllocator,
    OneSidedTransport,
    RemoteRegion,
    TransportConfig,
    TransportTraits,
    WireReport,
    WriteBatch,
)
from windlass.transports.ceilings import CEILING_BYTES_PER_S
from windlass.transports.local import LocalTransport
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive
from windlass.transports.segments import (
    MappedSegment,
    OwnedSegment,
    PeerSegments,
    create_segment,
    parse_key,
    remove_stale_segments,
    segment_key,
)

__all__ = ["ShmConfig", "ShmTransport"]

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


class ShmConfig(TransportConfig, frozen=True, tag="shm"):
    """POSIX shared memory that the transport allocates; for hosts that refuse `cma`."""

    remedy: ClassVar[str] = "mount a tmpfs at /dev/shm"

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        return ShmTransport()


@final
class ShmTransport(LocalTransport):
    """`OneSidedTransport` over files in /dev/shm, and the `MemoryAllocator` of them.

    Memory that it did not allocate can be registered as a source only.

    Segments are removed at `release`, at `close`, at interpreter exit, and, after a death
    without either, by the next `ShmTransport` of the same user or the first peer that notices.
    """

    traits = TransportTraits(
        same_host=True,
        one_sided=True,
        ceiling_bytes_per_s=CEILING_BYTES_PER_S["posix-shm"],
        allocates=True,
    )

    def __init__(self) -> None:
        remove_stale_segments()
        self._own, self._processes = OwnProcess("shm"), PeerProcesses()
        super().__init__(self._own.endpoint)
        self._segments: dict[int, OwnedSegment] = {}
        self._peers = PeerSegments()

    @property
    def allocator(self) -> MemoryAllocator:
        return self

    def report(self) -> WireReport:
        return WireReport("shm", "posix-shm", f"pid {self._endpoint.address}")

    def allocate(self, nbytes: int) -> int:
        """See `MemoryAllocator.allocate`.

        Raises:
            RegionError: `nbytes` < 1.
            TransportUnavailable: /dev/shm is missing, not writable, or has no room.
        """
        segment = create_segment(nbytes)
        with self._lock:
            self._segments[segment.address] = segment
        return segment.address

    def release(self, address: int) -> None:
        """See `MemoryAllocator.release`."""
        with self._lock:
            segment = self._segments.get(address)
            if segment is None:
                raise RegionError(f"release: address must come from allocate, got {address:#x}")
            for start, nbytes in self._table.spans():
                if start < address + segment.nbytes and address < start + nbytes:
                    raise RegionError(f"release: memory at {address:#x} must be unregistered first")
            del self._segments[address]
        segment.remove()

    def close(self) -> None:
        self._own.close()
        super().close()
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        self._peers.close()
        for segment in segments:
            segment.remove()

    def _key_of(self, address: int, nbytes: int) -> str:
        for segment in self._segments.values():
            offset = address - segment.address
            if offset >= 0 and offset + nbytes <= segment.nbytes:
                return segment_key(segment.name, offset)
        return ""

    def _copy(self, batch: WriteBatch, deadline: Deadline) -> None:
        try:
            self._processes.check(batch.endpoint)
            targets, mapped = self._translate(batch)
            _copy(batch.local_addresses, targets, batch.nbytes, deadline)
            del mapped  # alive until here: another thread may drop the segment from the cache
            check_alive(batch.endpoint)
        except PeerUnreachable:
            self._peers.forget_dead()
            raise

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
