"""Digests of what this rank holds and others hold too, for the controller to compare.

In host memory by `memory/digest.py`, on GPUs by the kernels of `memory/position_digest.py`, wherever each
parameter lies. What is due, and the piece tables of GPUs, are cut for one turn; once it is over the next
turn's can be, so that an update finds them ready. The memory of the tables stays from turn to turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import numpy as np

from windlass.errors import TransferFailed, TransferOutcomeUnknown, UnsupportedLayout
from windlass.layout.columns import Int64Array, StructuredArray, UInt64Array
from windlass.layout.manifest import MAX_DIMS, ShardManifest
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.cuda.gpu import Gpu, shared_gpu
from windlass.memory.cuda.kernels import PIECE, PieceTable
from windlass.memory.cuda.links import WORDS_NBYTES
from windlass.memory.ops import OWN_WORK_S
from windlass.memory.packing import hash_strided, new_digest
from windlass.planning.intersect import counted
from windlass.planning.program import DigestKind
from windlass.planning.replicated import (
    DIGESTED,
    HELD,
    BlockSchedule,
    DueBlocks,
    ReplicatedPart,
)
from windlass.transfer.base import ParameterMemory
from windlass.transfer.source import check_described

_KINDS = tuple(DigestKind)
LEAST_NBYTES, KEPT_NBYTES = 64 << 10, 16 << 20
"""Of a GPU's memory for tables: allocated at least, and kept for the next turn. Tables of everything take
more, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnGpu:
    """Boxes of a turn on one GPU.

    Attributes:
        memory: where the tables lie.
        rows: (b,) of `_Cut.found`.
        tables: of each itemsize: the table, which of the b boxes it has, and how many pieces of each.
    """

    memory: _TableMemory
    rows: Int64Array
    tables: tuple[tuple[PieceTable, Int64Array, Int64Array], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What is due in a turn.

    Attributes:
        turn, period: see `BlockSchedule.due`.
        parameters: (p,) those that boxes of the turn lie in. addresses: (p,) where they lay.
        ordinals: (p,) of the GPU that each is on, -1 for host memory.
        found: (n,) `DIGESTED`, without the digests.
        due, address: all blocks, and where each begins.
        in_host: rows of `found` whose boxes are in host memory, and the blocks of each.
        on_gpus: the others.
    """

    turn: int
    period: int
    parameters: tuple[int, ...]
    addresses: tuple[int, ...]
    ordinals: tuple[int, ...]
    found: StructuredArray
    due: DueBlocks
    address: UInt64Array
    in_host: tuple[Int64Array, Sequence[range]]
    on_gpus: tuple[_OnGpu, ...]


@final
class _TableMemory:
    """Of one GPU: the words of digests, behind them piece tables. Kept from turn to turn."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._address = self._nbytes = 0
        self._uploaded = np.zeros(0, np.uint8)

    def load(
        self, num_boxes: int, pieces: Sequence[tuple[int, StructuredArray]]
    ) -> list[PieceTable]:
        """Queue the upload of tables. `pieces`: itemsize and `PIECE`s of each.

        Raises:
            TransferFailed: the GPU has no room for them.
            TransferOutcomeUnknown: late kernels may still read the last ones.
        """
        self.gpu.refuse_late()
        start = num_boxes * WORDS_NBYTES
        self._uploaded = np.concatenate(
            [
                np.zeros(start, np.uint8),
                *(np.ascontiguousarray(p).view(np.uint8) for _, p in pieces),
            ]
        )
        self._fit(self._uploaded.nbytes)
        device, stream = self.gpu.device, self.gpu.stream
        device.copy(self._address, int(self._uploaded.ctypes.data), self._uploaded.nbytes, stream)
        tables, at = [], self._address + start
        for itemsize, table in pieces:
            tables.append(PieceTable(device, table, f"put_{itemsize}", itemsize, uploaded_at=at))
            at += table.nbytes
        return tables

    def digest(self, on_gpu: _OnGpu) -> tuple[UInt64Array, float]:
        """(num_boxes, words) of digests, and seconds that the GPU had other work to finish first.

        Once for what `load` uploaded last: the words are added to.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `Gpu.settle` and `Gpu.finish`.
        """
        gpu = self.gpu
        waited_s = gpu.settle(OWN_WORK_S)
        nbytes = len(on_gpu.rows) * WORDS_NBYTES
        for table, boxes, counts in on_gpu.tables:
            stop = 0
            for index, count in zip(boxes.tolist(), counts.tolist(), strict=True):
                start, stop = stop, stop + count
                place = self._address + index * WORDS_NBYTES
                gpu.kernels.hash(table, gpu.stream, place, range(start, stop))
        gpu.finish(OWN_WORK_S)
        words = np.frombuffer(gpu.device.download(self._address, nbytes, gpu.stream), "<u8")
        if self._nbytes > KEPT_NBYTES:
            self._free()
        return words.reshape(-1, WORDS_NBYTES // 8), waited_s

    def close(self) -> None:
        """Free it, unless late kernels may still read it. Idempotent."""
        if self._address and not self.gpu.is_late:
            self.gpu.finish(OWN_WORK_S)  # an upload may be queued
            self._free()

    def _free(self) -> None:
        self.gpu.device.free(self._address)
        self._address = self._nbytes = 0

    def _fit(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            self.close()
            room = max(1 << (nbytes - 1).bit_length(), LEAST_NBYTES)  # turns differ a little
            self._address, self._nbytes = self.gpu.device.allocate(room), room


@final
class ReplicatedDigests:
    """Of one rank. Calls from several threads run one at a time.

    Args:
        manifest: of the rank.
        parameters: where the parameters lie now, in manifest order; asked at every `take`.

    Attributes:
        compare_s: seconds that the last `take` spent, without locating parameters and without what the
            process had queued on a GPU before.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self._manifest, self._parameters = manifest, parameters
        self._itemsizes_of = np.array([p.dtype.itemsize for p in manifest.parameters], np.int64)
        self._memory: dict[int, _TableMemory] = {}
        self._lock = threading.Lock()
        self.compare_s = 0.0
        self._replace(ReplicatedPart(np.zeros(0, HELD)))

    def _replace(self, part: ReplicatedPart) -> None:
        self._part = part
        self._itemsizes = self._itemsizes_of[part.held["parameter"]]
        self._schedule = BlockSchedule(part.held, self._itemsizes)
        self._last: tuple[int, int, Sequence[ParameterMemory]] | None = None
        self._ahead: _Cut | None = None

    def bind(self, part: bytes) -> None:
        """Take `ReplicatedPart.encode()`; empty for none.

        Raises:
            ProtocolError, PlanError: see `ReplicatedPart.decode`.
        """
        with self._lock:
            self._replace(ReplicatedPart.decode(part, self._manifest))

    def __len__(self) -> int:
        return len(self._part)

    def take(self, turn: int, period: int) -> StructuredArray:
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
        located = self._parameters()
        with self._lock:
            began = time.perf_counter()
            cut, self._ahead = self._ahead, None
            if cut is None or not self._still_holds(cut, turn, period, located):
                check_described(self._manifest, located)
                cut = self._cut(turn, period, located)
            waited_s = self._digest(cut)
            self._last = turn, period, located
            self.compare_s = time.perf_counter() - began - waited_s
            return cut.found

    def cut_ahead(self) -> None:
        """Cut what is due in the turn after the last, if parameters stay where they were; reads none.

        Raises:
            UnsupportedLayout, TransferFailed, TransferOutcomeUnknown: see `take`, which tries again.
        """
        with self._lock:
            if self._last is not None and self._ahead is None:
                turn, period, located = self._last
                self._last = None
                if period > 1:  # else everything was compared, as is done once
                    self._ahead = self._cut(turn + 1, period, located)

    def close(self) -> None:
        """Free what is kept on GPUs, unless late kernels may still read it. Idempotent."""
        with self._lock:
            self._last = self._ahead = None
            for memory in self._memory.values():
                with suppress(
                    TransferFailed, TransferOutcomeUnknown
                ):  # it stays until the process ends
                    memory.close()
            self._memory = {}

    def _still_holds(
        self, cut: _Cut, turn: int, period: int, located: Sequence[ParameterMemory]
    ) -> bool:
        specs = self._manifest.parameters
        return (cut.turn, cut.period, len(specs)) == (turn, period, len(located)) and all(
            located[p].address == address
            and located[p].nbytes == specs[p].nbytes
            and gpu_of(address) == ordinal  # memory may have been freed, and be of another kind now
            for p, address, ordinal in zip(cut.parameters, cut.addresses, cut.ordinals, strict=True)
        )

    def _cut(self, turn: int, period: int, located: Sequence[ParameterMemory]) -> _Cut:
        due = self._schedule.due(turn, period)
        rows, first = np.unique(due.row, return_index=True)
        ends = np.append(first[1:], len(due.row))
        found = np.zeros(len(rows), DIGESTED)
        found["box"] = self._part.held["box"][rows]
        of_row = self._part.held["parameter"]
        parameters, index = np.unique(of_row[rows], return_inverse=True)
        addresses = [located[p].address for p in parameters.tolist()]
        on = [gpu_of(address) for address in addresses]
        ordinals = np.array(on, np.int64)[index]
        starts = np.array(addresses, np.uint64)[index]
        address = np.repeat(starts, ends - first) + due.offset.astype(np.uint64)
        in_host = np.flatnonzero(ordinals < 0)
        found["kind"] = np.where(
            ordinals < 0, _KINDS.index(DigestKind.XXH3), _KINDS.index(DigestKind.POSITION)
        )
        return _Cut(
            turn=turn,
            period=period,
            parameters=tuple(parameters.tolist()),
            addresses=tuple(addresses),
            ordinals=tuple(on),
            found=found,
            due=due,
            address=address,
            in_host=(in_host, [range(int(first[i]), int(ends[i])) for i in in_host]),
            on_gpus=tuple(
                self._cut_for_gpu(
                    ordinal, np.flatnonzero(ordinals == ordinal), due, address, first, ends
                )
                for ordinal in np.unique(ordinals[ordinals >= 0]).tolist()
            ),
        )

    def _digest(self, cut: _Cut) -> float:
        """Fill in `cut.found`; seconds that GPUs had other work to finish first."""
        waited_s, (rows, spans) = 0.0, cut.in_host
        if len(rows):
            words = self._in_host_memory(cut.due, cut.address, spans)
            cut.found["a"][rows], cut.found["b"][rows] = words[:, 0], words[:, 1]
        for on_gpu in cut.on_gpus:
            words, busy_s = on_gpu.memory.digest(on_gpu)
            waited_s += busy_s
            cut.found["a"][on_gpu.rows], cut.found["b"][on_gpu.rows] = words[:, 0], words[:, 1]
        return waited_s

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

    def _cut_for_gpu(
        self,
        ordinal: int,
        rows: Int64Array,
        due: DueBlocks,
        address: UInt64Array,
        first: Int64Array,
        ends: Int64Array,
    ) -> _OnGpu:
        if ordinal not in self._memory:
            self._memory[ordinal] = _TableMemory(shared_gpu(ordinal))
        memory = self._memory[ordinal]
        itemsizes = self._itemsizes[due.row[first[rows]]]
        groups, pieces = [], []
        for itemsize in np.unique(itemsizes).tolist():
            boxes = np.flatnonzero(itemsizes == itemsize)
            of_boxes = first[rows[boxes]], ends[rows[boxes]]
            table, counts = self._pieces(due, address, *of_boxes, itemsize)
            pieces.append((itemsize, table))
            groups.append((boxes, counts))
        tables = memory.load(len(rows), pieces)
        return _OnGpu(
            memory=memory,
            rows=rows,
            tables=tuple((t, *group) for t, group in zip(tables, groups, strict=True)),
        )

    def _pieces(
        self,
        due: DueBlocks,
        address: UInt64Array,
        first: Int64Array,
        ends: Int64Array,
        itemsize: int,
    ) -> tuple[StructuredArray, Int64Array]:
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
