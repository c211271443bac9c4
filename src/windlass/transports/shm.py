"""Writes within one host through shared memory: the receiver allocates it, and writers map it and copy.

Writes are one-sided as with `cma`, and need no ptrace permission. But peers can only write memory
that came from `allocate`. Other memory may be registered as a source.

A segment is an anonymous memory file (memfd), sealed against shrinking. Without the seal its owner
could shrink it during a copy of a peer, and SIGBUS would kill the peer. Peers open the segment
through the owner's /proc/PID/fd, which the kernel allows for processes of the same user. A segment
is freed when its owner ends and no peer maps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import threading
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError, TransportUnavailable
from windlass.layout.columns import UInt64Array
from windlass.memory.ranges import merge_adjacent, split_pieces
from windlass.net.clock import Deadline
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import RemoteRegion
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive
from windlass.transports.region_transport import RegionTransport
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import (
    CEILING_BYTES_PER_S,
    MemoryAllocator,
    TransportTraits,
    WireReport,
)

MAX_COPY_NBYTES = 512 << 20
"""Largest number of bytes per copy; it limits how far one copy can exceed a deadline. It is large,
because libc bypasses the cache for large copies, which is nearly twice as fast."""
SMALL_NBYTES = 128 << 10
"""Size of a piece below which the copy keeps the GIL. If another Python thread is busy, waiting for
the GIL after each small piece would cost more than the copy."""
_KEY = re.compile(r"(\d{1,9}):([0-9a-f]{16}):(\d{1,19})", re.ASCII)
"""Key of a region: the owner's file descriptor, the segment's token, and the region's offset in the segment."""


_memmove_holding_lock = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0)


class ShmConfig(TransportConfig, frozen=True, tag="shm"):
    """Configuration of shared memory that the transport allocates, for hosts that refuse `cma`."""

    remedy: ClassVar[str] = "a kernel with memfd_create"

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport."""
        return ShmTransport()


@final
class ShmTransport(RegionTransport):
    """`OneSidedTransport` over sealed memory files, and their `MemoryAllocator`.

    Memory from elsewhere can be registered only as a source of writes. Segments are freed by
    `release`, by `close`, and when the process ends.
    """

    traits = TransportTraits(
        same_host=True,
        one_sided=True,
        ceiling_bytes_per_s=CEILING_BYTES_PER_S["posix-shm"],
        allocates=True,
    )

    def __init__(self) -> None:
        self._own, self._processes = OwnProcess("shm"), PeerProcesses()
        super().__init__(self._own.endpoint)
        self._segments: dict[int, _OwnedSegment] = {}
        self._peers = _PeerSegments()

    @property
    def allocator(self) -> MemoryAllocator:
        """This transport, which allocates shared memory."""
        return self

    def report(self) -> WireReport:
        """Return the wire of this transport: POSIX shared memory."""
        return WireReport("shm", "posix-shm", f"pid {self._endpoint.address}")

    def allocate(self, nbytes: int) -> int:
        """See `MemoryAllocator.allocate`.

        Raises:
            RegionError: `nbytes` < 1.
            TransportUnavailable: the host has too little memory or cannot create memory files.
        """
        segment = _OwnedSegment(nbytes)
        with self._lock:
            self._segments[segment.address] = segment
        return segment.address

    def release(self, address: int) -> None:
        """See `MemoryAllocator.release`. The kernel frees the memory when no peer maps it."""
        with self._lock:
            segment = self._segments.get(address)
            if segment is None:
                raise RegionError(f"release: address must come from allocate, got {address:#x}")
            for start, nbytes in self.table.spans():
                if start < address + segment.nbytes and address < start + nbytes:
                    raise RegionError(f"release: memory at {address:#x} must be unregistered first")
            del self._segments[address]
        segment.close()

    def close(self) -> None:
        """Forget all regions and mappings of peers, and free all segments of this process."""
        self._own.close()
        super().close()
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        self._peers.close()
        for segment in segments:
            segment.close()

    def _register(self, address: int, nbytes: int) -> str:
        """Return the key of a range inside a segment of this process; empty for other memory."""
        for segment in self._segments.values():
            offset = address - segment.address
            if offset >= 0 and offset + nbytes <= segment.nbytes:
                return f"{segment.descriptor}:{segment.token}:{offset}"
        return ""

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Map the peer's segments, copy all ranges, and check that the peer is alive."""
        try:
            self._processes.check(batch.endpoint)
            targets, mapped = self._translate(batch)
            _copy(batch.local_addresses, targets, batch.nbytes, deadline)
            # `mapped` keeps the segments mapped until here, even if another thread drops them from
            # the cache.
            del mapped
            check_alive(batch.endpoint)
        except PeerUnreachable:
            self._peers.forget_released()
            raise

    def _translate(self, batch: WriteBatch) -> tuple[UInt64Array, list[_MappedSegment]]:
        """Map the peer's segments into this process.

        Returns:
            (num_pieces,) the address of each remote piece in this process, and the mapped segments. The addresses are
            valid while the caller keeps the segments.
        """
        regions = sorted(batch.regions, key=attrgetter("address"))
        starts = np.array([r.address for r in regions], np.uint64)
        slot = np.searchsorted(starts, batch.remote_addresses, side="right") - 1
        mapped: list[_MappedSegment] = []
        bases = np.zeros(len(regions), np.uint64)
        for index in np.unique(slot).tolist():
            segment, offset = self._peers.map(regions[index])
            mapped.append(segment)
            bases[index] = segment.address + offset
        return bases[slot] + (batch.remote_addresses - starts[slot]), mapped


def _copy(local: UInt64Array, target: UInt64Array, nbytes: UInt64Array, deadline: Deadline) -> None:
    """Copy pieces in this thread; raise TransferFailed if the deadline passes between two copies."""
    pieces = split_pieces(*merge_adjacent(local, target, nbytes), MAX_COPY_NBYTES)
    for source, to, count in zip(*(column.tolist() for column in pieces), strict=True):
        deadline.check_before_more()
        if count < SMALL_NBYTES:
            _memmove_holding_lock(to, source, count)
        else:
            ctypes.memmove(to, source, count)


@final
class _OwnedSegment:
    """Zeroed memory of this process that only processes of the same user can open.

    Attributes:
        descriptor: file descriptor of the memory file. Peers open the file by this number.
        token: random part of the file's name, which distinguishes it from a later file with the same
            descriptor.
        address: address of its first byte in this process.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise RegionError(f"allocate: nbytes must be >= 1, got {nbytes}")
        # The kernel overcommits memory files and kills processes later, so check first.
        available = _available_nbytes()
        if nbytes > available:
            raise TransportUnavailable(
                f"shm: nbytes must be at most {available}, the memory available on this host, got {nbytes}"
            )
        self.nbytes, self.token = nbytes, secrets.token_hex(8)
        try:
            self.descriptor = os.memfd_create(
                f"windlass-{self.token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        except OSError as error:
            raise TransportUnavailable(f"shm: a memory file cannot be created: {error}") from error
        try:
            # Allocate all pages now.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._mapping: mmap.mmap | None = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            os.close(self.descriptor)
            raise TransportUnavailable(
                f"shm: {nbytes} bytes cannot be allocated: {error}"
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def close(self) -> None:
        """Close the segment. The kernel frees the memory once no peer maps it."""
        os.close(self.descriptor)
        self._mapping = None


def _available_nbytes() -> int:
    """Return the bytes of memory that Linux reports as available on this host."""
    fields = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2]
    return int(fields.split(maxsplit=1)[0]) * 1024


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    """Segment of a peer, mapped here. Unmapped when the last reference to it is dropped.

    Attributes:
        path: path of the owner's file descriptor in /proc.
        target: name of the memory file, which the symbolic link `path` contains until the owner releases the segment.
        address: address of its first byte in this process.
    """

    path: str
    target: str
    mapping: mmap.mmap
    address: int

    @property
    def is_released(self) -> bool:
        """True if the owner has released the segment or has ended."""
        return not _refers_to(self.path, self.target)


@final
class _PeerSegments:
    """Mappings of peers' segments, created at first use and kept; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mapped: dict[tuple[str, str], _MappedSegment] = {}

    def map(self, region: RemoteRegion) -> tuple[_MappedSegment, int]:
        """Return the mapped segment of a region, and the region's offset in it.

        The segment stays mapped while the returned object exists. The caller has checked that the owner's
        process is alive and owns the endpoint; this method checks the key and the segment.

        Raises:
            PeerUnreachable: the owner's process has ended.
            RegionError: the region was not allocated by the transport, or its segment is not
                sealed, was released, or is smaller than the region.
        """
        pid = region.endpoint.address
        if not region.key:
            raise RegionError(
                f"shm: region at {region.address:#x} of pid {pid} was not allocated by the transport, "
                "so peers cannot write it"
            )
        match = _KEY.fullmatch(region.key)
        if match is None:
            raise RegionError(f"shm: region key must name a segment, got {region.key[:80]!r}")
        path = f"/proc/{pid}/fd/{match[1]}"
        target, offset = f"/memfd:windlass-{match[2]} (deleted)", int(match[3])
        with self._lock:
            found = self._mapped.get((path, target))
            if found is None or found.is_released:
                # Drop released mappings whenever a new one is added, so that they do not accumulate.
                self.forget_released()
                try:
                    found = self._mapped[path, target] = _open(path, target)
                except RegionError:
                    # If the owner's process has ended, raise PeerUnreachable instead.
                    check_alive(region.endpoint)
                    raise
        if offset + region.nbytes > len(found.mapping):
            raise RegionError(
                f"shm: segment at {path} must have at least {offset + region.nbytes} bytes, got "
                f"{len(found.mapping)}"
            )
        return found, offset

    def forget_released(self) -> None:
        """Unmap segments that their owners have released, and segments of ended processes."""
        # A running copy in another thread has a reference, so its segments stay mapped.
        with self._lock:
            self._mapped = {k: seg for k, seg in self._mapped.items() if not seg.is_released}

    def close(self) -> None:
        with self._lock:
            self._mapped.clear()


def _refers_to(path: str, target: str) -> bool:
    """Return whether `path` is a symbolic link to `target`."""
    with contextlib.suppress(OSError):
        return os.readlink(path) == target
    return False


def _open(path: str, target: str) -> _MappedSegment:
    """Map the memory file at `path`, whose name must be `target`.

    Raises:
        RegionError: the owner has released the segment, or the segment is not sealed or not completely allocated.
    """
    if not _refers_to(path, target):
        raise RegionError(f"shm: the segment at {path} was released by its owner")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RegionError(f"shm: the segment at {path} cannot be opened: {error}") from error
    try:
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise RegionError(f"shm: the segment at {path} must be sealed against shrinking")
        found = os.fstat(handle)
        # A write to a missing page would allocate the page at the cost of this process. A malicious owner could
        # then make this process allocate any amount of memory.
        if found.st_blocks * 512 < found.st_size:
            raise RegionError(f"shm: all pages of the segment at {path} must be allocated")
        # MAP_POPULATE maps all pages now. Otherwise the first write would cause a page fault for each page.
        mapping = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError) as error:
        raise RegionError(f"shm: the segment at {path} cannot be mapped: {error}") from error
    finally:
        os.close(handle)
    return _MappedSegment(
        path, target, mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    )
