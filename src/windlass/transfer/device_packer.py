"""Stage 5 on a GPU: kernels pack and hash what a NIC then reads out of GPU memory.

What goes as it lies (DIRECT) is hashed where it lies and read from there; everything else is
gathered, cast or quantised into an arena in GPU memory. Both ends cut ops alike, because a digest by
position depends on how rows are cut (`blocks.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import PlanError, TransferFailed
from windlass.layout.quantization import BLOCK
from windlass.memory.cuda import pieces as blocks
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PieceTable
from windlass.memory.cuda.links import WORDS_NBYTES, load_table, read_sent
from windlass.memory.cuda.ops import CudaMemory
from windlass.memory.cuda.pieces import (
    OpPieces,
    PieceArray,
    PieceKind,
    cut_ops,
    join_tables,
    kind_of,
    store_packed,
)
from windlass.memory.ops import ALIGNMENT, OWN_WORK_S, DigestKind, aligned
from windlass.planning.plan import Transform
from windlass.planning.program import LinkProgram
from windlass.transfer.arena import Arena, ArenaSlot
from windlass.transfer.packer import PackedLink, Peer, as_pieces
from windlass.transfer.pieces import Pieces, batches, direct_pieces, packed_capacity
from windlass.transports.base import OneSidedTransport

__all__ = ["DevicePacker", "payload_parts"]


@dataclass(frozen=True, slots=True)
class _Wave:
    """What the arena, or half of it, holds at once.

    Attributes:
        packed: pieces that are stored into the arena and hashed.
        direct: pieces of DIRECT ops, hashed where they lie.
        writes: of the packed bytes.
    """

    packed: tuple[PieceTable, ...]
    direct: tuple[PieceTable, ...]
    writes: Pieces

    def close(self) -> None:
        for table in (*self.packed, *self.direct):
            table.close()


@final
class DevicePacker:
    """The arena of one rank in GPU memory. See `Packer`. Not thread-safe.

    Tables are cut once and kept until a parameter or the arena moves.

    Args:
        gpu: that the parameters are on.
        transport: registers the arena.
        limit_nbytes: capacity of the arena; 0 for as much as one update needs.
    """

    digest_kind = DigestKind.POSITION

    def __init__(self, gpu: Gpu, transport: OneSidedTransport, limit_nbytes: int) -> None:
        self._gpu = gpu
        self._slot = ArenaSlot(
            lambda nbytes: Arena(transport, nbytes, CudaMemory(gpu)), limit_nbytes
        )
        self._sources = np.zeros(0, np.uint64)
        self._words = 0
        self._waves: dict[tuple[str, int], tuple[_Wave, ...]] = {}

    @property
    def sources(self) -> npt.NDArray[np.uint64]:
        """See `Packer`."""
        return self._sources

    @sources.setter
    def sources(self, addresses: npt.NDArray[np.uint64]) -> None:
        if not np.array_equal(addresses, self._sources):
            self._drop_waves()
        self._sources = addresses

    @property
    def arena(self) -> Arena | None:
        """See `Packer`."""
        return self._slot.arena

    @property
    def nbytes(self) -> int:
        """See `Packer`."""
        return self._slot.nbytes

    def holds(self, programs: Sequence[LinkProgram]) -> bool:
        """See `Packer`."""
        return packed_capacity(programs) <= self.nbytes

    def fit(self, programs: Sequence[LinkProgram]) -> None:
        """See `Packer`."""
        self._gpu.refuse_late()
        self._drop_waves()
        needed = packed_capacity(programs)
        capacity = self._slot.capacity_for(needed)
        if capacity < needed and capacity < (least := _least_nbytes(programs)):
            raise PlanError(
                f"arena_nbytes: must be 0 or at least {least}, got {self._slot.limit_nbytes}"
            )
        self._slot.fit(capacity)

    def abandon(self, *, renew: bool = True) -> None:
        """See `Packer`."""
        try:
            if self._slot.arena is not None:
                self._drop_waves()
        finally:  # a table that cannot be freed must not leave the arena in use
            self._slot.abandon(renew=renew)

    def close(self) -> None:
        """See `Packer`."""
        if self._gpu.is_late:
            self.abandon(renew=False)
            return
        self._drop_waves()
        if self._words:
            self._gpu.device.free(self._words)
            self._words = 0
        self._slot.close()

    def _digest_of(self, program: LinkProgram) -> str:
        """What kernels have noted since `_begin_digest`.

        Raises:
            TransferFailed: a cast overflowed.
        """
        digest, overflow = read_sent(self._gpu, self._words, program)
        if overflow:
            raise TransferFailed(overflow)
        return digest

    def hash_links(
        self,
        links: Sequence[tuple[LinkProgram, Peer]],
        pool: Executor,  # noqa: ARG002
    ) -> tuple[str, ...]:
        """See `Packer`. Packs as well, since the kernels that cast are those that hash."""
        digests = []
        for program, peer in links:
            self._begin_digest()
            for wave in self._ring_waves(program, peer):
                self._run(wave)
            digests.append(self._digest_of(program))
        return tuple(digests)

    def _begin_digest(self) -> None:
        """Also waits for what this process has queued on the GPU, such as an optimiser step.

        Raises:
            TransferFailed: that is not over within `OWN_WORK_S`.
        """
        device = self._gpu.device
        self._gpu.settle(OWN_WORK_S)
        if not self._words:
            self._words = device.allocate(WORDS_NBYTES)
        device.clear(self._words, WORDS_NBYTES, self._gpu.stream)

    def pack_link(self, program: LinkProgram, peer: Peer, offset: int) -> tuple[PackedLink, int]:
        """See `Packer`."""
        nbytes = packed_capacity((program,))
        if (program.peer, offset) not in self._waves:
            cut = self._cut(program, peer, (offset,), nbytes)
            self._waves[program.peer, offset] = _all_or_none(cut)
        self._begin_digest()
        writes: list[Pieces] = []
        for wave in self._waves[program.peer, offset]:
            self._run(wave)
            writes += batches(wave.writes)
        found = (*batches(self._direct(program, peer)), *writes)
        return PackedLink(found, self._digest_of(program)), offset + nbytes

    def pack_ops(self, program: LinkProgram, offset: int) -> tuple[dict[int, int], int]:
        """Refused: relays hash in host memory, so the controller plans none for GPUs."""
        raise PlanError(f"relay: the link to {program.peer} is of GPU memory, got offset {offset}")

    def ring(self, program: LinkProgram, peer: Peer) -> Iterator[Pieces]:
        """See `Packer`."""
        self._begin_digest()
        yield from batches(self._direct(program, peer))
        for wave in self._ring_waves(program, peer):
            self._run(wave, direct=False)
            yield from batches(wave.writes)

    def _ring_waves(self, program: LinkProgram, peer: Peer) -> tuple[_Wave, ...]:
        if (program.peer, -1) not in self._waves:
            nbytes = self.nbytes // 2 & -ALIGNMENT
            offsets: tuple[int, ...] = (0, nbytes)
            if self.nbytes < _least_nbytes((program,)) and self.holds((program,)):
                nbytes, offsets = self.nbytes, (0,)  # of a link that is written again
            cut = self._cut(program, peer, offsets, nbytes)
            self._waves[program.peer, -1] = _all_or_none(cut)
        return self._waves[program.peer, -1]

    def _direct(self, program: LinkProgram, peer: Peer) -> Pieces:
        return direct_pieces(program.direct, self._sources, peer.targets)

    def _run(self, wave: _Wave, *, direct: bool = True) -> None:
        """Pack and hash; `direct`: hash what goes as it lies, too."""
        for table in wave.packed:
            self._gpu.kernels.put(table, self._gpu.stream, self._words)
        for table in wave.direct if direct else ():
            self._gpu.kernels.hash(table, self._gpu.stream, self._words)
        self._gpu.finish(OWN_WORK_S)

    def _cut(
        self, program: LinkProgram, peer: Peer, offsets: Sequence[int], capacity: int
    ) -> Iterator[_Wave]:
        """Fill `capacity` bytes at each of `offsets` in turn."""
        start = self._slot.arena.address if self._slot.arena is not None else 0
        packed: list[tuple[PieceKind, PieceArray]] = []
        direct: list[tuple[PieceKind, PieceArray]] = []
        rows: list[tuple[int, int, int]] = []
        turn, used = 0, 0
        for found in cut_ops(program, at_source=True):
            op, pieces = found.op, found.pieces
            pieces["src"] += self._sources[op.src_parameter]
            if op.is_direct:
                pieces["dst"], pieces["dst_pitch"] = pieces["src"], pieces["src_pitch"]
                direct.append((kind_of(op), pieces))
                continue
            for part in payload_parts(found, capacity):
                if used + aligned(part.nbytes) > capacity:
                    yield self._load(packed, direct, rows)
                    packed, direct, rows = [], [], []
                    turn, used = turn + 1, 0
                address = start + offsets[turn % len(offsets)] + used
                store_packed(part.pieces, found.position + part.start, address)
                packed.append((kind_of(op), part.pieces))
                rows.append((address, peer.address_of(op) + part.start, part.nbytes))
                used += aligned(part.nbytes)
        yield self._load(packed, direct, rows)

    def _load(
        self,
        packed: Sequence[tuple[PieceKind, PieceArray]],
        direct: Sequence[tuple[PieceKind, PieceArray]],
        rows: Sequence[tuple[int, int, int]],
    ) -> _Wave:
        loaded = [
            tuple(load_table(self._gpu, kind, table) for kind, table in join_tables(found).items())
            for found in (packed, direct)
        ]
        return _Wave(loaded[0], loaded[1], as_pieces(rows))

    def _drop_waves(self) -> None:
        waves, self._waves = self._waves, {}
        if self._gpu.is_late:
            return  # kernels may still read the tables
        for wave in itertools.chain.from_iterable(waves.values()):
            wave.close()


def _all_or_none(waves: Iterator[_Wave]) -> tuple[_Wave, ...]:
    """Waves; those that were loaded are freed again when a later one cannot be."""
    with ExitStack() as undo:
        loaded = []
        for wave in waves:
            loaded.append(wave)
            undo.callback(wave.close)
        undo.pop_all()
    return tuple(loaded)


def _least_nbytes(programs: Sequence[LinkProgram]) -> int:
    """Of an arena of two halves: each holds a piece, or a row of blocks that is quantised."""
    rows_of_blocks = [
        BLOCK * op.packed_strides[0]
        for program in programs
        for op in program.ops
        if op.transform is Transform.FP8_BLOCK_VALUES
    ]
    return 2 * max(aligned(nbytes) for nbytes in (blocks.MAX_PIECE_NBYTES, *rows_of_blocks))


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """Pieces whose payload is bytes [start, start + nbytes) of their op's."""

    start: int
    nbytes: int
    pieces: PieceArray


def payload_parts(found: OpPieces, limit: int) -> Iterator[PayloadPart]:
    """Cut an op between pieces, so that a part has at most `limit` bytes, none left out.

    Raises:
        PlanError: pieces that lie between each other (a row of blocks) are more than that.
    """
    op, pieces = found.op, found.pieces
    if op.nbytes <= limit:
        yield PayloadPart(0, op.nbytes, pieces)
        return
    pieces = pieces[np.argsort(pieces["pos"], kind="stable")]
    starts = pieces["pos"].astype(np.int64) - found.position
    cuts = _closed_ends(found, pieces, starts)
    first = 0
    while first < len(pieces):
        begin = int(starts[first])
        fitting = cuts[(cuts > first) & (_ends_at(cuts, starts, op.nbytes) - begin <= limit)]
        if not len(fitting):
            needed = int(_ends_at(cuts[cuts > first][:1], starts, op.nbytes)[0]) - begin
            raise PlanError(f"arena_nbytes: half of it must hold {needed} bytes, got {limit}")
        stop = int(fitting[-1])
        end = op.nbytes if stop == len(pieces) else int(starts[stop])
        yield PayloadPart(begin, end - begin, pieces[first:stop].copy())
        first = stop


def _closed_ends(
    found: OpPieces, pieces: PieceArray, starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Numbers of pieces after which no earlier one reaches further: (n,), ascending."""
    itemsize = found.op.dst_dtype.itemsize
    if found.op.transform is Transform.FP8_BLOCK_SCALES:  # a block at the source, one scale here
        reach = starts + itemsize
    else:
        rows = (pieces["rows"].astype(np.int64) - 1) * pieces["pos_pitch"].astype(np.int64)
        reach = starts + rows + pieces["row_elems"].astype(np.int64) * itemsize
    closed = np.maximum.accumulate(reach)[:-1] <= starts[1:]
    return np.append(np.flatnonzero(closed) + 1, len(pieces))


def _ends_at(
    cuts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], nbytes: int
) -> npt.NDArray[np.int64]:
    """Where the payload of the pieces before each cut ends."""
    return np.append(starts, nbytes)[cuts]
