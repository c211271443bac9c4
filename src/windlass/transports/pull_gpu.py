"""Reads of `pull` between GPUs of one host: the reader's GPU copies out of memory that the writer exports by CUDA IPC."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import final

import msgspec
import numpy as np

from windlass.errors import DECODE_ERRORS, ProtocolError, RegionError
from windlass.layout.columns import UInt64Array
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, pointer_device
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline


class _Exported(msgspec.Struct, frozen=True, array_like=True):
    """Allocation of the writer: its start, and its CUDA IPC handle."""

    start: int
    handle: bytes


@final
class GpuReads:
    """Both ends of reads out of GPU memory, for one GPU of this process. Reads may run at the same time.

    The reader unmaps the writer's memory after each read. So the writer may free its memory, for example in
    `connect_trainer(release=...)`, and the driver really frees it.

    Args:
        gpu: this rank's GPU, which runs the copies.

    Attributes:
        gpu: see the argument.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._lock = threading.Lock()
        # Handle -> address in this process, and number of reads that use this mapping. CUDA can open a handle only once.
        self._mappings: dict[bytes, tuple[int, int]] = {}

    def exports(self, addresses: UInt64Array) -> bytes:
        """Return the handles of the allocations that contain `addresses`. Another process passes them to `read`.

        Raises:
            RegionError: an address is not in GPU memory, or not in memory from `cudaMalloc`.
        """
        ordered, found, at = np.sort(addresses), list[_Exported](), 0
        while at < len(ordered):
            address = int(ordered[at])
            pointer_device(address)
            start, size = self.gpu.device.allocation(address)
            found.append(_Exported(start, self.gpu.device.export(start)))
            at = int(np.searchsorted(ordered, start + size))
        return msgspec.msgpack.encode(found)

    def read(self, pid: int, exported: bytes, pieces: Pieces, deadline: Deadline) -> None:
        """Copy pieces out of the writer's GPU memory, and wait until the copies have ended.

        Args:
            pid: the writer's process.
            exported: result of `exports` in the writer's process.
            pieces: (n,) addresses in this process, addresses in the writer's process, and sizes.
            deadline: deadline of the whole call.

        Raises:
            ProtocolError: `exported` cannot be decoded.
            RegionError: a piece is outside the exported allocations; nothing was copied.
            TransferFailed: the driver refused to map memory or to copy, or the deadline passed before the copies began.
            TransferOutcomeUnknown: the copies began, and did not end by the deadline.
        """
        targets, sources, nbytes = pieces
        with ExitStack() as opened:
            rows = []
            for one in _decoded(exported):
                base = one.start
                # CUDA cannot open a handle in the process that exported it.
                if pid != os.getpid():
                    deadline.check_before_more()
                    base = opened.enter_context(self._mapped(one.handle))
                size = self.gpu.device.allocation(base)[1]
                rows.append((one.start, one.start + size, base - one.start))
            starts, ends, shifts = np.array(sorted(rows), np.int64).reshape(-1, 3).T
            first = sources.astype(np.int64)
            owner = np.searchsorted(starts, first, "right") - 1
            # If the writer exports nothing, `ends` is empty. Then `owner` is negative, so `or` skips `ends[owner]`.
            if (owner < 0).any() or (first + nbytes.astype(np.int64) > ends[owner]).any():
                raise RegionError("pull: a piece is outside the memory that the writer exports")
            mapped = (first + shifts[owner]).astype(np.uint64)
            deadline.check_before_more()
            copy_ranges(self.gpu, mapped, targets, nbytes, deadline.remaining_s)

    @contextmanager
    def _mapped(self, handle: bytes) -> Iterator[int]:
        """Map an allocation of a writer during the block, and yield its address in this process.

        Reads that run at the same time share one mapping. If a kernel has not ended in time, the allocation stays mapped,
        because the kernel may still read it.
        """
        with self._lock:
            base, num_reads = self._mappings.get(handle, (0, 0))
            base = base or self.gpu.device.open(handle)
            self._mappings[handle] = base, num_reads + 1
        try:
            yield base
        finally:
            with self._lock:
                base, num_reads = self._mappings.pop(handle)
                if num_reads > 1:
                    self._mappings[handle] = base, num_reads - 1
                elif not self.gpu.is_late:
                    self.gpu.device.close_handle(base)


def _decoded(exported: bytes) -> list[_Exported]:
    """Decode the result of `GpuReads.exports`; raise ProtocolError if it is malformed."""
    try:
        found = msgspec.msgpack.decode(exported, type=list[_Exported])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"pull: the exported memory cannot be decoded: {error}") from None
    for one in found:
        if len(one.handle) != IPC_HANDLE_NBYTES:
            raise ProtocolError(
                f"pull: handle must have {IPC_HANDLE_NBYTES} bytes, got {len(one.handle)}"
            )
    return found
