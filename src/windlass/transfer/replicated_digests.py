"""Digests of what this rank holds and others hold too, for the controller to compare.

In host memory by `memory/digest.py`, on GPUs by the kernels of `memory/position_digest.py`, wherever each
parameter lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import UnsupportedLayout
from windlass.layout.manifest import MAX_DIMS, Int64Array, ShardManifest
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.cuda.gpu import shared_gpu
from windlass.memory.cuda.kernels import PIECE, PieceTable
from windlass.memory.cuda.links import WORDS_NBYTES
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.ops import OWN_WORK_S, DigestKind
from windlass.planning.replicated import (
    DIGESTED,
    HELD,
    BlockSchedule,
    DueBlocks,
    ReplicatedPart,
    counted,
)
from windlass.transfer.base import ParameterMemory
from windlass.transfer.parameters import check_described

__all__ = ["ReplicatedDigests"]

UInt64Array = npt.NDArray[np.uint64]
_KINDS = tuple(DigestKind)


@final
class ReplicatedDigests:
    """Of one rank. Not thread-safe.

    Args:
        manifest: of the rank.
        parameters: where the parameters lie now, in manifest order; asked at every `take`.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self._manifest, self._parameters = manifest, parameters
        self._part = ReplicatedPart(np.zeros(0, HELD))
        self._itemsizes = np.zeros(0, np.int64)
        self._schedule = BlockSchedule(self._part.held, self._itemsizes)

    def bind(self, part: bytes) -> None:
        """Take `ReplicatedPart.encode()`; empty for none.

        Raises:
            ProtocolError, PlanError: see `ReplicatedPart.decode`.
        """
        self._part = ReplicatedPart.decode(part, self._manifest)
        of_parameter = np.array([p.dtype.itemsize for p in self._manifest.parameters], np.int64)
        self._itemsizes = of_parameter[self._part.held["parameter"]]
        self._schedule = BlockSchedule(self._part.held, self._itemsizes)

    def __len__(self) -> int:
        return len(self._part)

    def take(self, turn: int, period: int) -> npt.NDArray[np.void]:
        """Digest the blocks whose turn it is; reads the parameters, which must stand still.

        On a GPU it waits first for all that this process has queued there.

        Args:
            turn: see `BlockSchedule.due`.
            period: see there.

        Returns:
            (n,) `DIGESTED`, one for every box of which a block was due.

        Raises:
            PlanError: parameters have another number or other sizes than when described.
            UnsupportedLayout: on a GPU: rows with gaps between their elements.
            TransferFailed, TransferOutcomeUnknown: see `Gpu.settle` and `Gpu.finish`.
        """
        located = tuple(self._parameters())
        check_described(self._manifest, located)
        due = self._schedule.due(turn, period)
        rows, first = np.unique(due.row, return_index=True)
        ends = np.append(first[1:], len(due.row))
        found = np.zeros(len(rows), DIGESTED)
        found["box"] = self._part.held["box"][rows]
        parameter = self._part.held["parameter"][rows]
        lies_on = {p: gpu_of(located[p].address) for p in np.unique(parameter).tolist()}
        ordinals = np.array([lies_on[p] for p in parameter.tolist()], np.int64)
        starts = np.array([memory.address for memory in located], np.uint64)
        address = starts[self._part.held["parameter"][due.row]] + due.offset.astype(np.uint64)
        for ordinal in np.unique(ordinals).tolist():
            mine = np.flatnonzero(ordinals == ordinal)
            if ordinal < 0:
                spans = [range(int(first[i]), int(ends[i])) for i in mine]
                found["kind"][mine] = _KINDS.index(DigestKind.XXH3)
                words = self._in_host_memory(due, address, spans)
            else:
                found["kind"][mine] = _KINDS.index(DigestKind.POSITION)
                words = self._on_gpu(due, address, first[mine], ends[mine], ordinal)
            found["a"][mine], found["b"][mine] = words[:, 0], words[:, 1]
        return found

    def _in_host_memory(
        self, due: DueBlocks, address: UInt64Array, spans: Sequence[range]
    ) -> UInt64Array:
        specs = self._manifest.parameters
        sizes, addresses = due.sizes.tolist(), address.tolist()
        words = np.zeros((len(spans), 2), np.uint64)
        for index, span in enumerate(spans):
            held = self._part.held[int(due.row[span.start])]
            digest, strides = new_digest(), held["strides"].tolist()
            for block in span:
                hash_strided(
                    digest,
                    address=addresses[block],
                    sizes=sizes[block],
                    strides_bytes=strides,
                    dtype=specs[int(held["parameter"])].dtype,
                )
            words[index] = np.frombuffer(digest.digest(), "<u8")
        return words

    def _on_gpu(
        self,
        due: DueBlocks,
        address: UInt64Array,
        first: Int64Array,
        ends: Int64Array,
        ordinal: int,
    ) -> UInt64Array:
        gpu = shared_gpu(ordinal)
        gpu.settle(OWN_WORK_S)
        itemsizes = self._itemsizes[due.row[first]]
        with ExitStack() as undo:
            nbytes = len(first) * WORDS_NBYTES
            words = gpu.device.allocate(nbytes)
            undo.callback(gpu.device.free, words)
            gpu.device.clear(words, nbytes, gpu.stream)
            for itemsize in np.unique(itemsizes).tolist():
                mine = np.flatnonzero(itemsizes == itemsize)
                pieces, counts = self._pieces(due, address, first[mine], ends[mine], itemsize)
                table = PieceTable(gpu.device, pieces, f"put_{itemsize}", itemsize)
                undo.callback(table.close)
                stop = 0
                for index, count in zip(mine.tolist(), counts.tolist(), strict=True):
                    start, stop = stop, stop + count
                    place = words + index * WORDS_NBYTES
                    gpu.kernels.hash(table, gpu.stream, place, range(start, stop))
            try:
                gpu.finish(OWN_WORK_S)
            except BaseException:
                if gpu.is_late:
                    undo.pop_all()  # kernels may still read the tables
                raise
            return np.frombuffer(gpu.device.download(words, nbytes, gpu.stream), "<u8").reshape(
                -1, WORDS_NBYTES // 8
            )

    def _pieces(
        self,
        due: DueBlocks,
        address: UInt64Array,
        first: Int64Array,
        ends: Int64Array,
        itemsize: int,
    ) -> tuple[npt.NDArray[np.void], Int64Array]:
        """The rows of boxes' blocks, cut by sizes alone: every holder must cut alike.

        Args:
            due: all blocks.
            address: (n,) where each begins.
            first: (m,) first block of each of these boxes.
            ends: (m,) where its blocks end.
            itemsize: of their elements.

        Returns:
            `PIECE`s box after box, and how many each box has.
        """
        num_blocks = ends - first
        block = np.repeat(first, num_blocks) + counted(num_blocks)
        sizes, strides = due.sizes[block], self._part.held["strides"][due.row[block]]
        gaps = (strides[:, -1] != itemsize) & (sizes[:, -1] > 1)
        if gaps.any():
            row = int(due.row[block[int(gaps.argmax())]])
            name = self._manifest.parameters[int(self._part.held["parameter"][row])].name
            raise UnsupportedLayout(
                f"parameter {name!r}: on a GPU its rows must be contiguous, as at other ranks that hold "
                f"the same, got a stride of {self._part.held['strides'][row][-1]} bytes between elements "
                f"of {itemsize}"
            )
        numel = sizes.prod(axis=1)
        start_of_box = np.cumsum(num_blocks) - num_blocks
        ahead = np.cumsum(numel) - numel
        ahead -= np.repeat(ahead[start_of_box], num_blocks)
        num_outer = sizes[:, : MAX_DIMS - 2].prod(axis=1)
        of = np.repeat(np.arange(len(block)), num_outer)
        outer = counted(num_outer)
        sizes, strides, per_outer = sizes[of], strides[of], (numel // num_outer)[of]
        pieces = np.zeros(len(of), PIECE)
        at, left = np.zeros(len(of), np.int64), outer
        for axis in range(MAX_DIMS - 3, -1, -1):
            at += left % sizes[:, axis] * strides[:, axis]
            left = left // sizes[:, axis]
        pieces["dst"] = address[block[of]] + at.astype(np.uint64)
        pieces["dst_pitch"] = strides[:, -2]
        pieces["pos"] = (ahead[of] + outer * per_outer) * itemsize
        pieces["pos_pitch"] = sizes[:, -1] * itemsize
        pieces["rows"], pieces["row_elems"] = sizes[:, -2], sizes[:, -1]
        return pieces, np.add.reduceat(num_outer, start_of_box)
