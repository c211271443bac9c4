"""Reads of `pull` between GPUs of one host: the reader's GPU copies out of memory that the writer exports by CUDA IPC."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import final

import msgspec
import numpy as np

from windlass.errors import DECODE_ERRORS, ProtocolError, RegionError, TransferFailed
from windlass.layout.columns import UInt64Array
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, pointer_device
from windlass.memory.cuda.gpu import shared_gpu
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline


class _Exported(msgspec.Struct, frozen=True, array_like=True):
    """Allocation of the writer: its start, and its CUDA IPC handle."""

    start: int
    handle: bytes


@final
class GpuReads:
    """Both ends of reads out of GPU memory, for one GPU of this process.

    The reader unmaps the writer's memory after each read. So the writer may free its memory, for example in
    `connect_trainer(release=...)`, and the driver really frees it.

    Args:
        ordinal: ordinal of this rank's GPU, which runs the copies.

    Attributes:
        gpu: GPU that runs the copies.
        turn: lock that a read holds, because a process can open a handle only once at a time.

    Raises:
        TransportUnavailable: the NVIDIA driver, the GPU or NVRTC is missing.
    """

    def __init__(self, ordinal: int) -> None:
        self.gpu = shared_gpu(ordinal)
        self.turn = threading.Lock()

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
            TransferFailed: the driver refused to map memory or to copy, or earlier reads did not end by the deadline.
            TransferOutcomeUnknown: the copies did not end by the deadline.
        """
        targets, sources, nbytes = pieces
        with ExitStack() as opened:
            if not self.turn.acquire(timeout=deadline.remaining_s):
                raise TransferFailed(
                    f"pull: earlier reads by this GPU did not end within {deadline.seconds:.3g} s"
                )
            opened.callback(self.turn.release)
            device, rows = self.gpu.device, []
            for one in _decoded(exported):
                base = one.start
                # CUDA cannot open a handle in the process that exported it.
                if pid != os.getpid():
                    base = device.open(one.handle)
                    opened.callback(self._close, base)
                rows.append((one.start, one.start + device.allocation(base)[1], base - one.start))
            starts, ends, shifts = np.array(sorted(rows), np.int64).reshape(-1, 3).T
            first = sources.astype(np.int64)
            owner = np.searchsorted(starts, first, "right") - 1
            # If the writer exports nothing, `ends` is empty. Then `owner` is negative, so `or` skips `ends[owner]`.
            if (owner < 0).any() or (first + nbytes.astype(np.int64) > ends[owner]).any():
                raise RegionError("pull: a piece is outside the memory that the writer exports")
            mapped = (first + shifts[owner]).astype(np.uint64)
            deadline.check_before_more()
            copy_ranges(self.gpu, mapped, targets, nbytes, deadline.remaining_s)

    def _close(self, base: int) -> None:
        """Unmap an allocation of the writer. After a late kernel it stays mapped, because the kernel may still read it."""
        if not self.gpu.is_late:
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
