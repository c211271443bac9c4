"""Copies of many memory ranges by one GPU in one stream; copy engines copy large ranges."""

from __future__ import annotations

from typing import final

from windlass.layout.columns import UInt64Array
from windlass.memory.cuda.gpu import Gpu, end_queued
from windlass.memory.cuda.kernels import MAX_PIECE_NBYTES, PieceTable, raw_pieces

COPY_ENGINE_NBYTES = 32 << 20
"""Smallest range in bytes that a copy engine copies as fast as the kernel (H200, 2026-11-21: 380 GB/s at
32 MiB, 268 at 2 MiB) without occupying multiprocessors."""


@final
class RangeCopy:
    """Copies that are prepared once and queued any number of times. One kernel copies all small ranges.

    Memory: a piece table on the GPU, from construction to `close`.

    Args:
        gpu: GPU that copies.
        sources, targets: (num_ranges,) addresses for the GPU's kernels.
        nbytes: (num_ranges,) bytes of each range.
        engine_nbytes: smallest range that a copy engine copies.

    Raises:
        TransferFailed: the GPU has too little free memory for the table.
    """

    def __init__(
        self,
        gpu: Gpu,
        sources: UInt64Array,
        targets: UInt64Array,
        nbytes: UInt64Array,
        engine_nbytes: int = COPY_ENGINE_NBYTES,
    ) -> None:
        self._gpu = gpu
        large = nbytes >= engine_nbytes
        self._large = tuple(
            zip(sources[large].tolist(), targets[large].tolist(), nbytes[large].tolist(), strict=True)
        )  # fmt: skip
        self._table: PieceTable | None = None
        if not large.all():
            small = ~large
            pieces = raw_pieces(sources[small], targets[small], nbytes[small], MAX_PIECE_NBYTES)
            self._table = PieceTable(gpu.device, pieces, "put_1", 1)

    def queue(self) -> None:
        """Queue all copies in the GPU's stream.

        Raises:
            TransferFailed: the driver refused a copy; earlier copies are queued.
        """
        for source, target, size in self._large:
            self._gpu.device.copy(target, source, size, self._gpu.stream)
        if self._table is not None:
            self._gpu.kernels.put(self._table, self._gpu.stream)

    def close(self) -> None:
        """Free the table. The caller first waits for all queued copies. Idempotent."""
        if self._table is not None:
            self._table.close()


def copy_ranges(
    gpu: Gpu,
    sources: UInt64Array,
    targets: UInt64Array,
    nbytes: UInt64Array,
    deadline_s: float,
    engine_nbytes: int = COPY_ENGINE_NBYTES,
) -> None:
    """Copy ranges once, and wait until they are copied. For the arguments, see `RangeCopy`.

    Raises:
        TransferFailed: the driver refused a copy; earlier copies have ended.
        TransferOutcomeUnknown: the copies did not end within `deadline_s`.
    """
    copy = RangeCopy(gpu, sources, targets, nbytes, engine_nbytes)
    try:
        copy.queue()
        event = gpu.stream.record()
    # If queuing fails, copies that were queued before may still be running.
    except Exception as error:
        end_queued(gpu, error, deadline_s)
        copy.close()
        raise
    # If this raises, `copy` is not closed, because a kernel may still read its table.
    gpu.wait(event, deadline_s)
    copy.close()
