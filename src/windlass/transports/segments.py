"""Shared-memory segments: files in /dev/shm, named after the process that owns them.

`multiprocessing.shared_memory` is not used: its resource tracker unlinks the segments of a
peer when a process that only attached to them ends.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import final

from windlass.errors import PeerUnreachable, RegionError, TransportUnavailable
from windlass.transports.base import PeerEndpoint, RemoteRegion
from windlass.transports.processes import check_alive, process_start_time

__all__ = [
    "MappedSegment",
    "OwnedSegment",
    "PeerSegments",
    "create_segment",
    "parse_key",
    "remove_stale_segments",
    "segment_key",
]

DIRECTORY = Path("/dev/shm")  # noqa: S108 - this is where POSIX shared memory lives
_NAME = re.compile(r"windlass-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})")


@functools.cache
def _pid_namespace() -> str:
    """Containers may share /dev/shm but not pids: only pids of one namespace can be compared."""
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


@final
class OwnedSegment:
    """A segment of this process.

    Attributes:
        name: file name. address: of its first byte in this process. nbytes: extent.
    """

    def __init__(self, name: str, mapping: mmap.mmap, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapping: mmap.mmap | None = mapping
        # Also at interpreter exit; a forked child inherits this and must leave the file alone.
        self._unlink = weakref.finalize(self, _unlink_own, DIRECTORY / name, os.getpid())

    def remove(self) -> None:
        """Unlink and unmap. Idempotent."""
        self._unlink()
        self._mapping = None


def _unlink_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def create_segment(nbytes: int) -> OwnedSegment:
    """Make a zeroed segment that only this user can open.

    Raises:
        RegionError: `nbytes` < 1.
        TransportUnavailable: /dev/shm is missing, not writable, or has no room.
    """
    if nbytes < 1:
        raise RegionError(f"allocate: nbytes must be >= 1, got {nbytes}")
    pid = os.getpid()
    name = f"windlass-{_pid_namespace()}-{pid}-{process_start_time(pid)}-{secrets.token_hex(8)}"
    path = DIRECTORY / name
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TransportUnavailable(f"shm: cannot create a file in {DIRECTORY}: {error}") from error
    try:
        # Pages are taken now: a full /dev/shm is an error here and would be a SIGBUS later.
        os.posix_fallocate(handle, 0, nbytes)
        mapping = mmap.mmap(handle, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        room = "no room" if error.errno == errno.ENOSPC else str(error)
        raise TransportUnavailable(
            f"shm: {DIRECTORY} cannot hold {nbytes} bytes more ({room}); in a container raise "
            "--shm-size"
        ) from error
    finally:
        os.close(handle)
    return OwnedSegment(name, mapping, nbytes)


def segment_key(name: str, offset: int) -> str:
    """What a `RemoteRegion` carries: the segment and where in it the region begins."""
    return f"{name}:{offset}"


def parse_key(region: RemoteRegion) -> tuple[str, int]:
    """Segment name and offset of a peer's region; trusts nothing in it.

    Raises:
        RegionError: the region is not in shared memory, or the key is not one of ours.
    """
    if not region.key:
        raise RegionError(
            f"shm: region at {region.address:#x} of pid {region.endpoint.address} was not allocated "
            "by the transport, so peers cannot write it"
        )
    name, _, offset = region.key.partition(":")
    match = _NAME.fullmatch(name)
    if match is None or not offset.isascii() or not offset.isdigit():
        raise RegionError(f"shm: region key must name a segment, got {region.key!r}")
    started = region.endpoint.incarnation.partition("-")[0]
    if (match[2], match[3]) != (region.endpoint.address, started):
        raise RegionError(f"shm: segment {name} does not belong to pid {region.endpoint.address}")
    return name, int(offset)


def remove_stale_segments() -> None:
    """Unlink segments whose owner, a process of this user and pid namespace, is gone."""
    try:
        names = os.listdir(DIRECTORY)
    except OSError as error:
        raise TransportUnavailable(f"shm: cannot list {DIRECTORY}: {error}") from error
    for name in names:
        _remove_if_stale(name)


def _remove_if_stale(name: str) -> None:
    match = _NAME.fullmatch(name)
    if match is None or match[1] != _pid_namespace():
        return
    path = DIRECTORY / name
    try:
        if process_start_time(int(match[2])) != match[3] and path.stat().st_uid == os.geteuid():
            path.unlink()
    except FileNotFoundError:
        return  # another process was faster


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """A peer's segment in this process; unmapped when the last reference to it goes.

    Attributes:
        address: of its first byte in this process.
    """

    endpoint: PeerEndpoint
    handle: int
    mapping: mmap.mmap
    address: int


@final
class PeerSegments:
    """Mappings of peers' segments, made at first use and kept; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, MappedSegment] = {}

    def map(self, endpoint: PeerEndpoint, name: str, nbytes: int) -> MappedSegment:
        """The segment, mapped; it stays mapped as long as the returned object lives.

        Raises:
            PeerUnreachable: the owner is gone.
            RegionError: released by its owner, or smaller than `nbytes`.
        """
        with self._lock:
            found = self._mapped.get(name)
            if found is None:
                self._prune()  # the only moment at which mappings can pile up
                found = self._mapped[name] = _open(endpoint, name)
            if os.fstat(found.handle).st_nlink == 0:
                self._drop(name)
                check_alive(endpoint)
                raise RegionError(f"shm: segment {name} was released by its owner")
            if nbytes > len(found.mapping):
                raise RegionError(
                    f"shm: segment {name} must have {nbytes} bytes, has {len(found.mapping)}"
                )
            return found

    def forget_dead(self) -> None:
        """Unmap and unlink what belonged to processes that are gone."""
        with self._lock:
            self._prune()

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for name in list(self._mapped):
                self._drop(name)

    def _prune(self) -> None:
        for name, mapped in list(self._mapped.items()):
            try:
                check_alive(mapped.endpoint)
            except PeerUnreachable:
                _remove_if_stale(name)
                self._drop(name)
                continue
            if os.fstat(mapped.handle).st_nlink == 0:
                self._drop(name)

    def _drop(self, name: str) -> None:
        # A copy under way in another thread holds a reference, so it is not unmapped under it.
        os.close(self._mapped.pop(name).handle)


def _open(endpoint: PeerEndpoint, name: str) -> MappedSegment:
    try:
        handle = os.open(DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        check_alive(endpoint)
        raise RegionError(f"shm: segment {name} was released by its owner") from error
    except OSError as error:
        raise RegionError(f"shm: segment {name} cannot be opened: {error}") from error
    try:
        # One pass over the page tables now instead of a fault per page in the first write.
        mapping = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError) as error:
        os.close(handle)
        raise RegionError(f"shm: segment {name} cannot be mapped: {error}") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return MappedSegment(endpoint, handle, mapping, address)
