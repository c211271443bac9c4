"""Cut ops into pieces (blocks of rows), which kernels copy.

Both ends of a link cut the same ops in the same way, because the digest depends on the pieces. If
kernels write into the peer's memory, they cast each element and write it to its final address. They
pack and stage nothing, for every mode of an op. If a NIC sends the bytes, kernels pack the pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np

from windlass.errors import PlanError, UnsupportedLayout
from windlass.layout.columns import BoolArray, Int64Array, StructuredArray, UInt64Array
from windlass.layout.dtypes import DType, can_overflow
from windlass.layout.quantization import BLOCK
from windlass.memory.cuda.kernels import MAX_PIECE_NBYTES, PIECE, put_kernel, raw_pieces
from windlass.memory.packing import StridedCopy
from windlass.planning.plan import Transform
from windlass.planning.program import BoundOp, LinkProgram


class PieceKind(NamedTuple):
    """Operation of a kernel on a piece."""

    transform: Transform
    src_dtype: DType
    dst_dtype: DType

    @property
    def may_overflow(self) -> bool:
        """True if the cast of a finite element may give an infinity."""
        return self.src_dtype is not self.dst_dtype and can_overflow(self.src_dtype, self.dst_dtype)

    @property
    def kernel(self) -> str:
        """Name of the kernel, without the suffix `_hashed`.

        Raises:
            ConfigError: no cast exists between the dtypes.
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
"""Kind, and an (n,) `PIECE` array of pieces of this kind."""


class OpPieces(NamedTuple):
    """The pieces of one op.

    `position` is the position of the op's payload in the link's payload. `pieces` are rows of `CutLink.pieces`.
    """

    op: BoundOp
    position: int
    pieces: StructuredArray


@dataclass(frozen=True, slots=True)
class CutLink:
    """Pieces of all ops of a link, in plan order.

    Attributes:
        ops: (num_ops,) the ops.
        kinds: (num_ops,) kind of each op's pieces.
        positions: (num_ops,) position of each op's payload in the link's payload.
        first: (num_ops + 1,) index of each op's first piece, then the number of all pieces.
        pieces: (num_pieces,) `PIECE` array. `src` and `dst` are relative to the starts of the ops' parameters; callers add
            the addresses in place.
    """

    ops: tuple[BoundOp, ...]
    kinds: tuple[PieceKind, ...]
    positions: Int64Array
    first: Int64Array
    pieces: StructuredArray

    def per_piece(self, values: Int64Array | UInt64Array) -> UInt64Array:
        """Repeat the value of each op once for each piece of the op. `values` has shape (num_ops,)."""
        return np.repeat(values.astype(np.uint64), np.diff(self.first))

    def tables(self, chosen: BoolArray | None = None) -> dict[PieceKind, StructuredArray]:
        """Return one table per kind, with the pieces in plan order.

        Args:
            chosen: (num_ops,) whether the tables contain the op's pieces; None for all ops.
        """
        number: dict[PieceKind, int] = {}
        of_op = np.array([number.setdefault(kind, len(number)) for kind in self.kinds], np.int64)
        is_whole = chosen is None or bool(chosen.all())
        if is_whole and len(number) == 1:
            # Copy nothing: a large link has a million pieces.
            return {self.kinds[0]: self.pieces}
        if chosen is not None:
            of_op[~chosen] = -1
        of_piece = np.repeat(of_op, np.diff(self.first))
        found = ((kind, self.pieces[of_piece == k]) for kind, k in number.items())
        return {kind: pieces for kind, pieces in found if len(pieces)}

    def by_op(self) -> Iterator[OpPieces]:
        """Yield each op, in plan order, with a view of its rows of `pieces`."""
        rows = itertools.pairwise(self.first.tolist())
        for op, position, (start, stop) in zip(
            self.ops, self.positions.tolist(), rows, strict=True
        ):
            yield OpPieces(op, position, self.pieces[start:stop])


def cut_link(program: LinkProgram, *, at_source: bool) -> CutLink:
    """Cut the ops of a link. Both ends cut the payload of an op in the same way.

    Ops that differ only in their offsets are cut once, because a mixture of experts has thousands of such ops.

    Raises:
        UnsupportedLayout: see `cut_op`.
    """
    ops, cuts = program.ops, list[StructuredArray]()
    kinds = tuple(kind_of(op) for op in ops)
    seen: dict[object, int] = {}
    which = np.empty(len(ops), np.int64)
    for number, (kind, op) in enumerate(zip(kinds, ops, strict=True)):
        alike = kind, op.sizes, op.src_sizes, op.src_strides, op.dst_strides
        if alike not in seen:
            seen[alike] = len(cuts)
            cuts.append(cut_op(op, at_source=at_source))
        which[number] = seen[alike]
    sizes = np.array([len(cut) for cut in cuts], np.int64)
    counts = sizes[which]
    first = np.append(0, np.cumsum(counts))
    payloads = _numbers(op.nbytes for op in ops)
    # Ops that are alike share one cut. `rows` says, for each piece, which row of the concatenated cuts it copies.
    rows = np.repeat((np.cumsum(sizes) - sizes)[which] - first[:-1], counts) + np.arange(first[-1])
    # Copy the rows as opaque bytes: numpy copies structured rows field by field, which is slow.
    opaque = np.dtype((np.void, PIECE.itemsize))
    joined = np.concatenate([np.zeros(0, PIECE), *cuts]).view(opaque)
    cut = CutLink(
        ops=ops,
        kinds=kinds,
        positions=np.cumsum(payloads) - payloads,
        first=first,
        pieces=joined[rows].view(PIECE),
    )
    cut.pieces["src"] += cut.per_piece(_numbers(op.src_offset for op in ops))
    cut.pieces["dst"] += cut.per_piece(_numbers(op.dst_offset for op in ops))
    cut.pieces["pos"] += cut.per_piece(cut.positions)
    return cut


def block_tables(
    program: LinkProgram,
    sources: UInt64Array | None,
    targets: UInt64Array,
    staging_address: int = 0,
) -> dict[PieceKind, StructuredArray]:
    """Return the pieces of a link by kind.

    Args:
        program: program of the link.
        sources: (num_parameters,) addresses of the source's parameters. None to build the destination's pieces, whose
            kernels only hash the bytes that arrived. For a float8 scale, the source's piece reads a whole block to
            compute the scale, and the destination's piece hashes one element.
        targets: (num_parameters,) addresses of the destination's parameters, as the kernels of this GPU see them.
        staging_address: address of the staging memory. Pieces of ops whose payload goes there (`BoundOp.lands`) point into
            it, packed. 0: all pieces point into the parameters.

    Returns:
        Kind -> `PIECE` array. Positions count from the start of the link's payload.
    """
    cut = cut_link(program, at_source=sources is not None)
    if sources is not None:
        add_sources(cut, sources)
    cut.pieces["dst"] += cut.per_piece(targets[_numbers(op.dst_parameter for op in program.ops)])
    for op, position, pieces in cut.by_op() if staging_address else ():
        if op.lands:
            store_packed(pieces, position, staging_address + op.staging_offset)
    return cut.tables()


def add_sources(cut: CutLink, sources: UInt64Array) -> None:
    """Make `src` of all pieces absolute, in place. `sources`: (num_parameters,) addresses of the source's parameters."""
    cut.pieces["src"] += cut.per_piece(sources[_numbers(op.src_parameter for op in cut.ops)])


def _numbers(values: Iterable[int]) -> Int64Array:
    return np.fromiter(values, np.int64)


def kind_of(op: BoundOp) -> PieceKind:
    """Return the kind of an op's pieces: its transform and its dtypes."""
    return PieceKind(op.transform, op.src_dtype, op.dst_dtype)


def cut_ranges(addresses: UInt64Array, nbytes: Int64Array) -> tuple[StructuredArray, Int64Array]:
    """Cut n ranges of bytes into pieces that are hashed in place.

    Returns:
        The pieces in the order of the ranges, and an array of n + 1 numbers: the index of each range's first piece,
        then the number of all pieces.
    """
    first = np.append(0, np.cumsum(-(-nbytes // MAX_PIECE_NBYTES)))
    pieces = raw_pieces(addresses, addresses, nbytes.astype(np.uint64), MAX_PIECE_NBYTES)
    return pieces, first


def join_tables(
    found: Iterable[KindOfPieces],
) -> dict[PieceKind, StructuredArray]:
    """Return one table per kind. A table keeps the given order of its pieces."""
    parts: dict[PieceKind, list[StructuredArray]] = {}
    for kind, pieces in found:
        parts.setdefault(kind, []).append(pieces)
    # Join the rows as opaque bytes: with fields, numpy would compare the dtypes of every pair of arrays, which is slow.
    row = np.dtype((np.void, PIECE.itemsize))
    return {
        kind: np.concatenate([each.view(row) for each in pieces]).view(PIECE)
        for kind, pieces in parts.items()
    }


def store_packed(pieces: StructuredArray, first: int, address: int) -> None:
    """Change the destinations of pieces in place, so that kernels store the payload packed and row-major.

    The byte at position `first` of the link's payload is stored at `address`.
    """
    pieces["dst"] = pieces["pos"] - np.uint64(first) + np.uint64(address)
    pieces["dst_pitch"] = pieces["pos_pitch"]


def cut_op(op: BoundOp, *, at_source: bool) -> StructuredArray:
    """Return the pieces of an op. In each piece, `src`, `dst` and `pos` are offsets from the op's first element.

    Raises:
        UnsupportedLayout: the op quantises, and its rows are not contiguous.
    """
    match op.transform:
        case Transform.NONE:
            return cut_copy(StridedCopy.of_op(op, 0, 0), 0)
        case Transform.FP8_BLOCK_VALUES:
            return _cut_values(op)
        case Transform.FP8_BLOCK_SCALES:
            return _cut_scales(op, at_source=at_source)
        case _:
            assert_never(op.transform)


def _cut_values(op: BoundOp) -> StructuredArray:
    """Return one piece per quantisation block. Both ends of the link get the same pieces.

    Raises:
        UnsupportedLayout: the elements of a row are not contiguous.
    """
    (rows, columns), (src_row, src_col) = op.src_sizes, op.src_strides
    dst_row, dst_col = op.dst_strides
    if src_col != op.src_dtype.itemsize or dst_col != op.dst_dtype.itemsize:
        raise UnsupportedLayout(
            f"cuda: quantised rows must be contiguous, got column strides of {src_col} bytes at the source and "
            f"{dst_col} bytes at the destination"
        )
    row, col = np.arange(0, rows, BLOCK)[:, None], np.arange(0, columns, BLOCK)[None, :]
    pieces = np.zeros((len(row), col.shape[1]), PIECE)
    pieces["src"] = row * src_row + col * src_col
    pieces["dst"] = row * dst_row + col * dst_col
    pieces["pos"] = row * columns + col
    pieces["src_pitch"], pieces["dst_pitch"], pieces["pos_pitch"] = src_row, dst_row, columns
    pieces["rows"] = np.minimum(rows - row, BLOCK)
    pieces["row_elems"] = np.minimum(columns - col, BLOCK)
    return pieces.reshape(-1)


def _cut_scales(op: BoundOp, *, at_source: bool) -> StructuredArray:
    """Return one piece per scale. The source's piece is the block to scale; the destination's piece is the scale."""
    (rows, columns), (dst_row, dst_col) = op.src_sizes, op.dst_strides
    num_rows, num_columns = op.sizes
    row, col = np.arange(num_rows)[:, None], np.arange(num_columns)[None, :]
    pieces = np.zeros((num_rows, num_columns), PIECE)
    pieces["src"] = BLOCK * (row * op.src_strides[0] + col * op.src_strides[1])
    pieces["dst"] = row * dst_row + col * dst_col
    pieces["pos"] = (row * num_columns + col) * op.dst_dtype.itemsize
    pieces["src_pitch"] = op.src_strides[0]
    pieces["rows"] = np.minimum(rows - row * BLOCK, BLOCK) if at_source else 1
    pieces["row_elems"] = np.minimum(columns - col * BLOCK, BLOCK) if at_source else 1
    return pieces.reshape(-1)


def cut_copy(copy: StridedCopy, position: int) -> StructuredArray:
    """Return the pieces of one copy. `position` is the position of the copy's payload in the link's payload."""
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
    """Pieces with bytes [start, start + nbytes) of the payload of their op."""

    start: int
    nbytes: int
    pieces: StructuredArray


def payload_parts(found: OpPieces, limit: int) -> Iterator[PayloadPart]:
    """Divide the pieces of an op into parts with at most `limit` bytes of payload each.

    Raises:
        PlanError: a row of quantisation blocks, which cannot be divided, has more than `limit` bytes.
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
            raise PlanError(
                f"arena_nbytes: half of the arena must hold {needed} bytes, got {limit}"
            )
        stop = int(fitting[-1])
        end = op.nbytes if stop == len(pieces) else int(starts[stop])
        yield PayloadPart(begin, end - begin, pieces[first:stop].copy())
        first = stop


def _closed_ends(found: OpPieces, pieces: StructuredArray, starts: Int64Array) -> Int64Array:
    """Return the indices at which the sorted pieces can be divided, ascending; the last is `len(pieces)`.

    They can be divided at index i if no piece before i has payload bytes at or after the start of piece i.

    Args:
        found: the op. Its dtype and its transform give the payload size of a piece.
        pieces: the sorted pieces.
        starts: (num_pieces,) position of each piece in the op's payload, in bytes.
    """
    itemsize = found.op.dst_dtype.itemsize
    # A piece of scales is a block at the source but one element in the payload.
    if found.op.transform is Transform.FP8_BLOCK_SCALES:
        reach = starts + itemsize
    else:
        rows = (pieces["rows"].astype(np.int64) - 1) * pieces["pos_pitch"].astype(np.int64)
        reach = starts + rows + pieces["row_elems"].astype(np.int64) * itemsize
    closed = np.maximum.accumulate(reach)[:-1] <= starts[1:]
    return np.append(np.flatnonzero(closed) + 1, len(pieces))


def _ends_at(cuts: Int64Array, starts: Int64Array, nbytes: int) -> Int64Array:
    """Return, per cut, the payload position at which the pieces before the cut end."""
    return np.append(starts, nbytes)[cuts]


def least_packed_nbytes(program: LinkProgram) -> int:
    """Return the size in bytes of a link's largest unit that cannot be cut: a piece, or a row of quantisation blocks."""
    rows_of_blocks = (
        BLOCK * op.packed_strides[0]
        for op in program.ops
        if op.transform is Transform.FP8_BLOCK_VALUES
    )
    return max((MAX_PIECE_NBYTES, *rows_of_blocks))
