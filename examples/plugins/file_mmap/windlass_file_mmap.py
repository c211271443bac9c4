"""Transport over files that both peers map, for hosts without a usable /dev/shm or as an example.

The owner allocates memory as a file in a folder that both processes can access. A peer opens the file by the key of
the region, maps it and copies into it. No write continues after its process has ended. Peers must trust each other: if
the owner shortens a file, peers that have mapped it crash. The sealed memory of `shm` prevents this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from windlass import RegionError, TransportUnavailable
from windlass.transports import (
    Deadline,
    MemoryAllocator,
    OneSidedTransport,
    OwnProcess,
    PeerProcesses,
    RegionTransport,
    RemoteRegion,
    TransportConfig,
    TransportTraits,
    WireReport,
    WriteBatch,
    check_alive,
)

NAME = "file_mmap"
_KEY = re.compile(r"(windlass-file-mmap-(\d+)-[0-9a-f]{16}):(\d{1,19})")


class FileMmapConfig(TransportConfig, frozen=True, tag=NAME):
    """Settings of the transport.

    Attributes:
        folder: folder of the files, the same for all peers; empty for the temporary directory.
    """

    is_automatic: ClassVar[bool] = False
    remedy: ClassVar[str] = "name a folder that this user may write"

    folder: str = ""

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """See `TransportConfig.create`."""
        return FileMmapTransport(Path(self.folder or tempfile.gettempdir()))


@dataclass(frozen=True)
class _Mapped:
    """File that is mapped until the last reference to it is dropped."""

    path: Path
    mapping: mmap.mmap
    address: int


@final
class FileMmapTransport(RegionTransport):
    """`OneSidedTransport` over files in `folder`, and `MemoryAllocator` of these files.

    Raises:
        TransportUnavailable: `folder` is not writable.
    """

    traits = TransportTraits(
        same_host=True, one_sided=True, ceiling_bytes_per_s=8e9, allocates=True
    )

    def __init__(self, folder: Path) -> None:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise TransportUnavailable(f"{NAME}: folder must be writable, got {str(folder)!r}")
        self._folder = folder
        self._own, self._processes = OwnProcess(NAME), PeerProcesses()
        super().__init__(self._own.endpoint)
        self._owned: dict[int, _Mapped] = {}

    @property
    def allocator(self) -> MemoryAllocator:
        """Return this allocator. Peers can write only into memory from it."""
        return self

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        return WireReport(NAME, "mmap", f"files in {self._folder}")

    def allocate(self, nbytes: int) -> int:
        """See `MemoryAllocator.allocate`."""
        if nbytes < 1:
            raise RegionError(f"allocate: nbytes must be >= 1, got {nbytes}")
        path = self._folder / f"windlass-file-mmap-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, nbytes)
                mapped = _map(path, handle)
            finally:
                os.close(handle)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransportUnavailable(f"{NAME}: no {nbytes} bytes in {path}: {error}") from error
        with self._lock:
            self._owned[mapped.address] = mapped
        return mapped.address

    def release(self, address: int) -> None:
        """See `MemoryAllocator.release`."""
        with self._lock:
            mapped = self._owned.get(address)
            if mapped is None:
                raise RegionError(f"release: address must come from allocate, got {address:#x}")
            stop = address + len(mapped.mapping)
            if any(address <= start < stop for start, _ in self.table.spans()):
                raise RegionError(f"release: memory at {address:#x} must be unregistered first")
            del self._owned[address]
        mapped.path.unlink(missing_ok=True)

    def close(self) -> None:
        """See `OneSidedTransport.close`."""
        self._own.close()
        super().close()
        with self._lock:
            owned, self._owned = list(self._owned.values()), {}
        for mapped in owned:
            mapped.path.unlink(missing_ok=True)

    def _register(self, address: int, nbytes: int) -> str:
        for mapped in self._owned.values():
            offset = address - mapped.address
            if offset >= 0 and offset + nbytes <= len(mapped.mapping):
                return f"{mapped.path.name}:{offset}"
        return ""

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        self._processes.check(batch.endpoint)
        shifts = []
        # Keeps the files mapped until the copy has ended.
        opened = []
        for region in batch.regions:
            mapped, offset = self._open(region)
            opened.append(mapped)
            shifts.append((region.address, region.nbytes, mapped.address + offset))
        columns = (batch.local_addresses, batch.remote_addresses, batch.nbytes)
        for local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            deadline.check_before_more()
            target = next(
                here + remote - start
                for start, size, here in shifts
                if start <= remote < start + size
            )
            ctypes.memmove(target, local, nbytes)
        check_alive(batch.endpoint)

    def _open(self, region: RemoteRegion) -> tuple[_Mapped, int]:
        """Return a peer's file and the offset of the region in it. The key is not trusted and is checked."""
        match = _KEY.fullmatch(region.key)
        if match is None or match[2] != region.endpoint.address:
            raise RegionError(f"{NAME}: key must name a file of its owner, got {region.key[:80]!r}")
        path, offset = self._folder / match[1], int(match[3])
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                mapped = _map(path, handle)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            check_alive(region.endpoint)
            raise RegionError(f"{NAME}: {path} cannot be mapped: {error}") from error
        if offset + region.nbytes > len(mapped.mapping):
            raise RegionError(f"{NAME}: {path} must have {offset + region.nbytes} bytes")
        return mapped, offset


def _map(path: Path, handle: int) -> _Mapped:
    mapping = mmap.mmap(handle, 0)
    return _Mapped(path, mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
