"""Ops cut into blocks of rows: what a device kernel stores piece by piece, at both ends alike.

Both ends of a link cut the same ops in the same way, so their digests agree. Where kernels store
into the peer, nothing is packed and nothing lands beside its place, whatever the op's mode says:
they store strided and cast on the way. Where a NIC carries the bytes, pieces are stored packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np

from windlass.errors import PlanError, UnsupportedLayout
from windlass.layout.columns import Int64Array, StructuredArray, UInt64Array
from windlass.layout.dtypes import DType, can_overflow
from windlass.layout.quantization import BLOCK
from windlass.memory.cuda.kernels import MAX_PIECE_NBYTES, PIECE, put_kernel, raw_pieces
from windlass.memory.packing import StridedCopy
from windlass.planning.plan import Transform
from windlass.planning.program import BoundOp, LinkProgram


class PieceKind(NamedTuple):
    """What a kernel does with a piece."""

    transform: Transform
    src_dtype: DType
    dst_dtype: DType

    @property
    def may_overflow(self) -> bool:
        """Whether a finite element may become infinite."""
        return self.src_dtype is not self.dst_dtype and can_overflow(self.src_dtype, self.dst_dtype)

    @property
    def kernel(self) -> str:
        """Name of the kernel, without the suffix of a hashing one.

        Raises:
            ConfigError: nothing casts between the dtypes.
        """
        match self.transform:
            case Transform.NONE:
                return put_kernel(self.src_dtype, self.dst_dtype)
            case Transform.FP8_BLOCK_VALUES:
                return f"fp8_values_{self.src_dtype}"
            case Transform.FP8_BLOCK_SCALES:
                return f"fp8_scales_{self.src_dtype}"
            case _:
                assert_never(self.transform)


KindOfPieces = tuple[PieceKind, StructuredArray]


def block_tables(
    program: LinkProgram,
    sources: UInt64Array | None,
    targets: UInt64Array,
    staging_address: int = 0,
) -> dict[PieceKind, StructuredArray]:
    """Return the pieces of a link by what a kernel does with them.

    Args:
        program: of the link.
        sources: (num_parameters,) where the source's parameters begin; None at the destination,
            which only hashes: there scales are rows of one element, as the source sends them.
        targets: (num_parameters,) where the destination's begin, as the kernel reaches them.
        staging_address: of the payload of ops that are staged; 0: they are stored in their places.

    Returns:
        `PIECE` arrays. Positions count the link's payload from 0.
    """
    found = []
    for op, position, pieces in cut_ops(program, at_source=sources is not None):
        if sources is not None:
            pieces["src"] += sources[op.src_parameter]
        if op.lands and staging_address:
            store_packed(pieces, position, staging_address + op.staging_offset)
        else:
            pieces["dst"] += targets[op.dst_parameter]
        found.append((kind_of(op), pieces))
    return join_tables(found)


class OpPieces(NamedTuple):
    """The pieces of one op; `src` and `dst` count from where its parameters begin.

    `position`: of the op's payload in the link's.
    """

    op: BoundOp
    position: int
    pieces: StructuredArray


def cut_ops(program: LinkProgram, *, at_source: bool) -> Iterator[OpPieces]:
    """Yield the ops of a link in plan order, cut as both ends cut them."""
    position = 0
    for op in program.ops:
        yield OpPieces(op, position, _cut_op(op, position, at_source=at_source))
        position += op.nbytes


def kind_of(op: BoundOp) -> PieceKind:
    """Return what a kernel does with its pieces."""
    return PieceKind(op.transform, op.src_dtype, op.dst_dtype)


def cut_ranges(addresses: UInt64Array, nbytes: Int64Array) -> tuple[StructuredArray, Int64Array]:
    """Return pieces of raw bytes, hashed where they lie, of (n,) ranges in the order of the payload.

    Returns:
        The pieces, and (n + 1,) which of them is the first of each range, and how many there are.
    """
    first = np.append(0, np.cumsum(-(-nbytes // MAX_PIECE_NBYTES)))
    pieces = raw_pieces(addresses, addresses, nbytes.astype(np.uint64), MAX_PIECE_NBYTES)
    return pieces, first


def join_tables(
    found: Iterable[KindOfPieces],
) -> dict[PieceKind, StructuredArray]:
    """Return one table per kind, each in the order given."""
    parts: dict[PieceKind, list[StructuredArray]] = {}
    for kind, pieces in found:
        parts.setdefault(kind, []).append(pieces)
    return {kind: np.concatenate(pieces) for kind, pieces in parts.items()}


def store_packed(pieces: StructuredArray, first: int, address: int) -> None:
    """Let pieces, changed in place, store their payload row-major behind each other, wherever they are read.

    `first`: position in the link's payload that `address` is for.
    """
    pieces["dst"] = pieces["pos"] - np.uint64(first) + np.uint64(address)
    pieces["dst_pitch"] = pieces["pos_pitch"]


def _cut_op(op: BoundOp, position: int, *, at_source: bool) -> StructuredArray:
    match op.transform:
        case Transform.NONE:
            # At offsets from where the parameters of both sides begin.
            return cut_copy(StridedCopy.of_op(op, op.src_offset, op.dst_offset), position)
        case Transform.FP8_BLOCK_VALUES:
            return _cut_values(op, position)
        case Transform.FP8_BLOCK_SCALES:
            return _cut_scales(op, position, at_source=at_source)
        case _:
            assert_never(op.transform)


def _cut_values(op: BoundOp, position: int) -> StructuredArray:
    """Cut one piece per block of the matrix, cut alike at both ends."""
    (rows, columns), (src_row, src_col) = op.src_sizes, op.src_strides
    dst_row, dst_col = op.dst_strides
    if src_col != op.src_dtype.itemsize or dst_col != op.dst_dtype.itemsize:
        raise UnsupportedLayout(
            f"cuda: quantised rows must be contiguous, got column strides {src_col} and {dst_col}"
        )
    row, col = np.arange(0, rows, BLOCK)[:, None], np.arange(0, columns, BLOCK)[None, :]
    pieces = np.zeros((len(row), col.shape[1]), PIECE)
    pieces["src"] = op.src_offset + row * src_row + col * src_col
    pieces["dst"] = op.dst_offset + row * dst_row + col * dst_col
    pieces["pos"] = position + row * columns + col
    pieces["src_pitch"], pieces["dst_pitch"], pieces["pos_pitch"] = src_row, dst_row, columns
    pieces["rows"] = np.minimum(rows - row, BLOCK)
    pieces["row_elems"] = np.minimum(columns - col, BLOCK)
    return pieces.reshape(-1)


def _cut_scales(op: BoundOp, position: int, *, at_source: bool) -> StructuredArray:
    """Cut one piece per scale: a block at the source, one element at the destination."""
    (rows, columns), (dst_row, dst_col) = op.src_sizes, op.dst_strides
    num_rows, num_columns = op.sizes
    row, col = np.arange(num_rows)[:, None], np.arange(num_columns)[None, :]
    pieces = np.zeros((num_rows, num_columns), PIECE)
    pieces["src"] = op.src_offset + BLOCK * (row * op.src_strides[0] + col * op.src_strides[1])
    pieces["dst"] = op.dst_offset + row * dst_row + col * dst_col
    pieces["pos"] = position + (row * num_columns + col) * op.dst_dtype.itemsize
    pieces["src_pitch"] = op.src_strides[0]
    pieces["rows"] = np.minimum(rows - row * BLOCK, BLOCK) if at_source else 1
    pieces["row_elems"] = np.minimum(columns - col * BLOCK, BLOCK) if at_source else 1
    return pieces.reshape(-1)


def cut_copy(copy: StridedCopy, position: int) -> StructuredArray:
    """Return all pieces of one copy, whose payload begins at `position`."""
    sizes, src, dst = list(copy.sizes), list(copy.src_strides), list(copy.dst_strides)
    itemsize = copy.dst_dtype.itemsize
    run = 1
    while sizes and src[-1] == run * copy.src_dtype.itemsize and dst[-1] == run * itemsize:
        run *= sizes.pop()
        src.pop()
        dst.pop()
    rows, src_pitch, dst_pitch = (sizes.pop(), src.pop(), dst.pop()) if sizes else (1, 0, 0)
    run_nbytes = run * itemsize
    rows_at_once = max(MAX_PIECE_NBYTES // run_nbytes, 1)
    elems_at_once = min(run, MAX_PIECE_NBYTES // itemsize)
    row_starts = np.arange(0, rows, rows_at_once)
    col_starts = np.arange(0, run, elems_at_once)
    outer = np.array([(0, 0)], np.int64)
    for size, s, d in zip(sizes, src, dst, strict=True):
        steps = np.arange(size)[:, None] * np.array([s, d])
        outer = (outer[:, None, :] + steps[None, :, :]).reshape(-1, 2)
    shape = (len(outer), len(row_starts), len(col_starts))
    pieces = np.zeros(shape, PIECE)
    row, col = row_starts[None, :, None], col_starts[None, None, :]
    pieces["src"] = (
        copy.src_address
        + outer[:, 0][:, None, None]
        + row * src_pitch
        + col * copy.src_dtype.itemsize
    )
    pieces["dst"] = copy.dst_address + outer[:, 1][:, None, None] + row * dst_pitch + col * itemsize
    payload = np.arange(len(outer))[:, None, None] * (rows * run_nbytes)
    pieces["pos"] = position + payload + row * run_nbytes + col * itemsize
    pieces["src_pitch"], pieces["dst_pitch"] = src_pitch, dst_pitch
    pieces["pos_pitch"] = run_nbytes
    pieces["rows"] = np.minimum(rows - row, rows_at_once)
    pieces["row_elems"] = np.minimum(run - col, elems_at_once)
    return pieces.reshape(-1)


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """Pieces whose payload is bytes [start, start + nbytes) of their op's."""

    start: int
    nbytes: int
    pieces: StructuredArray


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


def _closed_ends(found: OpPieces, pieces: StructuredArray, starts: Int64Array) -> Int64Array:
    """Return numbers of pieces after which no earlier one reaches further: (n,), ascending."""
    itemsize = found.op.dst_dtype.itemsize
    if found.op.transform is Transform.FP8_BLOCK_SCALES:  # a block at the source, one scale here
        reach = starts + itemsize
    else:
        rows = (pieces["rows"].astype(np.int64) - 1) * pieces["pos_pitch"].astype(np.int64)
        reach = starts + rows + pieces["row_elems"].astype(np.int64) * itemsize
    closed = np.maximum.accumulate(reach)[:-1] <= starts[1:]
    return np.append(np.flatnonzero(closed) + 1, len(pieces))


def _ends_at(cuts: Int64Array, starts: Int64Array, nbytes: int) -> Int64Array:
    """Return where the payload of the pieces before each cut ends."""
    return np.append(starts, nbytes)[cuts]


def least_packed_nbytes(program: LinkProgram) -> int:
    """Return bytes that hold any piece of a link, or row of blocks that is quantised, which are not cut."""
    rows_of_blocks = (
        BLOCK * op.packed_strides[0]
        for op in program.ops
        if op.transform is Transform.FP8_BLOCK_VALUES
    )
    return max((MAX_PIECE_NBYTES, *rows_of_blocks))
