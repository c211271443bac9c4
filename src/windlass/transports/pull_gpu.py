"""Reads of `pull` between GPUs of one host: the reader's GPU copies out of memory that the writer exports."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import final

import msgspec
import numpy as np

from windlass.errors import DECODE_ERRORS, ProtocolError, RegionError
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline
from windlass.transports.gpu_sharing import (
    Exported,
    PeerMemory,
    export_memory,
    open_handle,
    receive_chunks,
)


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
        # Handle -> mapped memory, and number of reads that use it. CUDA can open a handle only once.
        self._mappings: dict[bytes, tuple[PeerMemory, int]] = {}

    def exports(self, pieces: Pieces) -> list[Exported]:
        """Return the memory of this process that contains the writer's pieces. The reader passes it to `read`.

        Args:
            pieces: (n,) addresses in the reader's process, addresses in this process, and sizes.

        Raises:
            RegionError: a piece is not in GPU memory, or no other process can map the memory.
            TransferFailed: the driver returned an error.
        """
        return export_memory(self.gpu.device, *pieces[1:])

    def read(
        self, line: socket.socket, pid: int, exported: bytes, pieces: Pieces, deadline: Deadline
    ) -> None:
        """Copy pieces out of the writer's GPU memory, and wait until the copies have ended.

        Args:
            line: connection to the writer, which calls `send_chunks` for each exported memory.
            pid: the writer's process.
            exported: result of `exports` in the writer's process, as MessagePack.
            pieces: (n,) addresses in this process, addresses in the writer's process, and sizes.
            deadline: deadline of the whole call.

        Raises:
            ProtocolError: `exported` cannot be decoded.
            RegionError: a piece is outside the exported memory; nothing was copied.
            OSError: the writer did not send the descriptors of its memory.
            TransferFailed: the driver refused to map memory or to copy, or the deadline passed before the copies began.
            TransferOutcomeUnknown: the copies began, and did not end by the deadline.
        """
        targets, sources, nbytes = pieces
        with ExitStack() as opened:
            rows = []
            for one in _decoded(exported):
                base, size = one.start, one.nbytes
                # CUDA cannot open a handle in the process that exported it.
                if pid != os.getpid():
                    deadline.check_before_more()
                    mapped = opened.enter_context(self._mapped(line, one, deadline))
                    base, size = mapped.address, mapped.nbytes
                rows.append((one.start, one.start + size, base - one.start))
            starts, ends, shifts = np.array(sorted(rows), np.int64).reshape(-1, 3).T
            first = sources.astype(np.int64)
            owner = np.searchsorted(starts, first, "right") - 1
            # If the writer exports nothing, `ends` is empty. Then `owner` is negative, so `or` skips `ends[owner]`.
            if (owner < 0).any() or (first + nbytes.astype(np.int64) > ends[owner]).any():
                raise RegionError("pull: a piece is outside the memory that the writer exports")
            addresses = (first + shifts[owner]).astype(np.uint64)
            deadline.check_before_more()
            copy_ranges(self.gpu, addresses, targets, nbytes, deadline.remaining_s)

    @contextmanager
    def _mapped(
        self, line: socket.socket, exported: Exported, deadline: Deadline
    ) -> Iterator[PeerMemory]:
        """Map memory of a writer during the block, and yield the mapping.

        Reads that run at the same time share the mapping of a handle. If a kernel has not ended in time, the memory stays
        mapped, because the kernel may still read it.
        """
        if not exported.handle:
            memory = receive_chunks(
                line, self.gpu.device, exported.nbytes, exported.num_chunks, deadline
            )
            try:
                yield memory
            finally:
                if not self.gpu.is_late:
                    memory.close()
            return
        handle = exported.handle
        with self._lock:
            known, num_reads = self._mappings.get(handle, (None, 0))
            memory = known or open_handle(self.gpu.device, handle)
            self._mappings[handle] = memory, num_reads + 1
        try:
            yield memory
        finally:
            with self._lock:
                memory, num_reads = self._mappings.pop(handle)
                if num_reads > 1:
                    self._mappings[handle] = memory, num_reads - 1
                elif not self.gpu.is_late:
                    memory.close()


def _decoded(exported: bytes) -> list[Exported]:
    """Decode the encoded result of `GpuReads.exports`; raise ProtocolError if it is malformed."""
    try:
        found = msgspec.msgpack.decode(exported, type=list[Exported])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"pull: the exported memory cannot be decoded: {error}") from None
    for one in found:
        if len(one.handle) != (0 if one.num_chunks else IPC_HANDLE_NBYTES):
            raise ProtocolError(
                f"pull: handle must have {IPC_HANDLE_NBYTES} bytes, or none for chunks, got {len(one.handle)} bytes and "
                f"{one.num_chunks} chunks"
            )
    return found
