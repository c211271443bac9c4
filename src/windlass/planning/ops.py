"""Turn routed pieces into ops, the rows of the plan.

The inputs are `Pieces` (which atom fills which box) and an `Assignment` (which rank sends it). The
output is an `OpTable`: per op both parameters, offsets, strides and dtypes, the mode, and the
reason for the mode. Ops of a link that are adjacent on both sides are then joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from windlass.layout.columns import BoolArray, Columns, Int64Array, UInt8Array, column
from windlass.layout.manifest import MAX_DIMS
from windlass.layout.quantization import BLOCK
from windlass.planning.intersect import Boxes, Holders, Pieces, ranges
from windlass.planning.plan import ITEMSIZES, CopyMode, OpTable, Reason, Transform
from windlass.planning.quantize import (
    payload_sizes,
    refuse_casts,
    refuse_cut_blocks,
    split_units,
)
from windlass.planning.routing import Assignment
from windlass.planning.rows import RowTable, TensorNames

_CHUNK_OPS = 1 << 18
"""Number of ops that `build_ops` makes at a time."""

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Columns):
    """All pieces of all destination rows, before a source rank is chosen; sorted by destination row.

    Attributes:
        piece: (n,) row of `Pieces`.
        row: (n,) row of the destination table.
        nbytes: (n,) bytes at the destination.
        axis: (n,) outermost dim with more than one element, along which an op may be cut.
        units: (n,) number of elements along that axis; number of blocks if the op quantises.
    """

    piece: Int64Array = column("<i8")
    row: Int64Array = column("<i8")
    nbytes: Int64Array = column("<i8")
    axis: Int64Array = column("<i8")
    units: Int64Array = column("<i8")

    @classmethod
    def expand(cls, pieces: Pieces, boxes: Boxes, dst: RowTable) -> Candidates:
        """Repeat the pieces of each box for every destination row with that box."""
        count = (boxes.row_start[1:] - boxes.row_start[:-1])[pieces.box]
        piece = np.repeat(np.arange(len(count)), count)
        row = boxes.rows[ranges(boxes.row_start[pieces.box], count)]
        order = np.lexsort([piece, row])
        piece, row = piece[order], row[order]
        transform = dst.transform[row]
        axis = (pieces.sizes > 1).argmax(axis=1)
        units = np.take_along_axis(pieces.sizes, axis[:, None], axis=1)[:, 0]
        numel = pieces.sizes.prod(axis=1)[piece]
        scales = np.flatnonzero(transform == Transform.FP8_BLOCK_SCALES)
        of_scales = payload_sizes(pieces.sizes[piece[scales]], transform[scales])
        numel[scales] = of_scales.prod(axis=1)
        return cls(
            piece=piece,
            row=row,
            nbytes=numel * ITEMSIZES[dst.dtype[row]],
            axis=axis[piece],
            units=split_units(units[piece], transform),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPieces:
    """Input of `build_ops`.

    Attributes:
        src, dst: shards of both sides.
        names: tensor names of both sides.
        sources: worker names of the source ranks.
        pieces: atoms and the destination boxes that they fill.
        holders: source rows that hold each atom.
        candidates: pieces of every destination row.
        routed: source ranks that send the candidates.
        direct_min_run_nbytes: see `PlanPolicy.direct_min_run_bytes`.
    """

    src: RowTable
    dst: RowTable
    names: TensorNames
    sources: tuple[str, ...]
    pieces: Pieces
    holders: Holders
    candidates: Candidates
    routed: Assignment
    direct_min_run_nbytes: int


def build_ops(given: RoutedPieces) -> OpTable:
    """Turn routed pieces into ops, in plan order. Work in chunks to bound memory.

    Raises:
        UnsupportedLayout: an element cannot be cast to the destination's dtype (`CASTS`), or a
            shard contains only a part of a quantisation block.
    """
    src, dst, routed = given.src, given.dst, given.routed
    atom = given.pieces.atom[given.candidates.piece[routed.op]]
    src_row, dst_row = _source_rows(given, atom), given.candidates.row[routed.op]
    refuse_casts(src, dst, src_row, dst_row, given.names)
    order = _plan_order(src, dst, src_row, dst_row, routed)
    ops = OpTable.empty(len(order))
    for first in range(0, len(order), _CHUNK_OPS):
        part = order[first : first + _CHUNK_OPS]
        ops.fill(first, _ops(given, part, src_row[part], dst_row[part]))
    return ops


def _ops(given: RoutedPieces, part: Rows, s: Int64Array, d: Int64Array) -> OpTable:
    """Return the ops of the routed pieces with indices `part`.

    `s` and `d` are the rows of these pieces in the source table and in the destination table.
    """
    src, dst = given.src, given.dst
    transform = dst.transform[d]
    offsets, sizes = _shares(given, part, transform)
    refuse_cut_blocks(offsets, sizes, dst, d, src.rank[s], given.names, given.sources)
    from_start = (offsets - src.offsets[s]) * src.strides_bytes[s]
    per_scale = np.where(transform == Transform.FP8_BLOCK_SCALES, BLOCK, 1)[:, None]
    steps = (offsets - dst.offsets[d]) // per_scale
    geometry = collapse(
        Strided(sizes=sizes, src_strides=src.strides_bytes[s], dst_strides=dst.strides_bytes[d]),
        # The two dims of a quantising op define its blocks, so they must not be joined.
        kept=transform != Transform.NONE,
    )
    payload = payload_sizes(geometry.sizes, transform)
    dst_itemsize = ITEMSIZES[dst.dtype[d]]
    mode, reason, run_nbytes = choose_modes(
        replace(geometry, sizes=payload),
        ITEMSIZES[src.dtype[s]],
        dst_itemsize,
        src.dtype[s] != dst.dtype[d],
        transform != Transform.NONE,
        given.direct_min_run_nbytes,
    )
    return OpTable(
        src=src.rank[s],
        dst=dst.rank[d],
        tensor=dst.name[d],
        src_parameter=src.parameter[s],
        dst_parameter=dst.parameter[d],
        mode=mode,
        reason=reason,
        src_dtype=src.dtype[s],
        dst_dtype=dst.dtype[d],
        transform=transform,
        sizes=geometry.sizes,
        src_offset=src.offset_bytes[s] + from_start.sum(axis=1),
        src_strides=geometry.src_strides,
        dst_offset=dst.offset_bytes[d] + (steps * dst.strides_bytes[d]).sum(axis=1),
        dst_strides=geometry.dst_strides,
        run_nbytes=run_nbytes,
        nbytes=payload.prod(axis=1) * dst_itemsize,
        staging_offset=np.full(len(part), -1, np.int64),
    )


def _shares(
    given: RoutedPieces, part: Rows, transform: UInt8Array
) -> tuple[Int64Array, Int64Array]:
    """Return the box of each op, as offsets and sizes: a whole piece, or the slice of a piece that one source sends."""
    routed, candidates = given.routed, given.candidates
    op = routed.op[part]
    piece = candidates.piece[op]
    offsets, sizes = given.pieces.offsets[piece], given.pieces.sizes[piece]
    rows, axis = np.arange(len(part)), candidates.axis[op]
    unit = np.where(transform != Transform.NONE, BLOCK, 1)
    begin = routed.begin[part] * unit
    sizes[rows, axis] = np.minimum(routed.end[part] * unit, sizes[rows, axis]) - begin
    offsets[rows, axis] += begin
    return offsets, sizes


def _source_rows(given: RoutedPieces, atom: Int64Array) -> Int64Array:
    """Return the source row of each routed piece: the row of the chosen rank that contains the piece's atom.

    `atom`, (m,), has the atom of each routed piece.
    """
    src, holders = given.src, given.holders
    num_ranks = int(src.rank.max(initial=0)) + 1
    atom_of_row = np.repeat(np.arange(len(holders.start) - 1), np.diff(holders.start))
    keys = atom_of_row * num_ranks + src.rank[holders.rows]
    return holders.rows[np.searchsorted(keys, atom * num_ranks + given.routed.rank)]


def _plan_order(
    src: RowTable,
    dst: RowTable,
    src_row: Int64Array,
    dst_row: Int64Array,
    routed: Assignment,
) -> Rows:
    """Return the indices that sort the routed pieces in plan order.

    The order is by source, destination, source parameter, destination parameter, offset of the destination row,
    destination row, piece, and slice of the piece.
    """
    link = src.rank[src_row].astype(np.int64) << 32 | dst.rank[dst_row]
    parameters = src.parameter[src_row].astype(np.int64) << 32 | dst.parameter[dst_row]
    place = dst.offset_bytes[dst_row]
    return np.lexsort([routed.begin, routed.op, dst_row, place, parameters, link])


# --- from boxes to bytes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided(Columns):
    """Geometry of n ops, dims left-padded with size 1 and stride 0.

    Attributes:
        sizes: (n, MAX_DIMS) elements.
        src_strides, dst_strides: (n, MAX_DIMS) bytes.
    """

    sizes: Int64Array = column("<i8", MAX_DIMS)
    src_strides: Int64Array = column("<i8", MAX_DIMS)
    dst_strides: Int64Array = column("<i8", MAX_DIMS)


def collapse(given: Strided, kept: BoolArray) -> Strided:
    """Order the dims of each op by descending destination stride, and join dims that are contiguous on both sides.

    Args:
        given: geometry of n ops.
        kept: (n,) True for ops that must not change.
    """
    sizes, src_strides, dst_strides = given.sizes, given.src_strides, given.dst_strides
    unit = sizes == 1
    key = np.where(unit, np.iinfo(np.int64).max, np.abs(dst_strides))
    if not (key[:, :-1] >= key[:, 1:]).all():
        order = np.argsort(-key, axis=1, kind="stable")
        sizes = np.take_along_axis(sizes, order, axis=1)
        src_strides = np.take_along_axis(src_strides, order, axis=1)
        dst_strides = np.take_along_axis(dst_strides, order, axis=1)
        unit = sizes == 1
    inner = sizes[:, 1:]
    joins = (src_strides[:, :-1] == inner * src_strides[:, 1:]) & (
        dst_strides[:, :-1] == inner * dst_strides[:, 1:]
    )
    joins |= unit[:, :-1]
    num_rows = len(sizes)
    zeros = np.zeros_like(sizes)
    out = Strided(sizes=np.ones_like(sizes), src_strides=zeros, dst_strides=zeros.copy())
    rows, at = np.arange(num_rows), np.full(num_rows, MAX_DIMS - 1)
    opens = np.ones(num_rows, np.bool_)
    for dim in range(MAX_DIMS - 1, -1, -1):
        if dim < MAX_DIMS - 1:
            opens = ~joins[:, dim]
            at = at - opens
        out.sizes[rows, at] *= sizes[:, dim]
        out.src_strides[rows[opens], at[opens]] = src_strides[opens, dim]
        out.dst_strides[rows[opens], at[opens]] = dst_strides[opens, dim]
    flat = out.sizes == 1
    out.src_strides[flat] = out.dst_strides[flat] = 0
    if kept.any():
        for name, values in out.columns().items():
            values[kept] = getattr(given, name)[kept]
    return out


def _is_row_major(sizes: Int64Array, strides: Int64Array, itemsize: Int64Array) -> BoolArray:
    """Return, for each of n ops, whether its elements are contiguous in row-major order on the side with these strides."""
    expected = itemsize
    contiguous = np.ones(len(sizes), np.bool_)
    for dim in range(MAX_DIMS - 1, -1, -1):
        contiguous &= (sizes[:, dim] == 1) | (strides[:, dim] == expected)
        expected = expected * sizes[:, dim]
    return contiguous


def choose_modes(
    geometry: Strided,
    src_itemsize: Int64Array,
    dst_itemsize: Int64Array,
    casts: BoolArray,
    quantizes: BoolArray,
    direct_min_run_bytes: int,
) -> tuple[UInt8Array, UInt8Array, Int64Array]:
    """Choose the mode of each of n ops.

    Args:
        geometry: sizes of the payload, and strides on both sides, with collapsed dims.
        src_itemsize: (n,) bytes of an element at the source.
        dst_itemsize: (n,) bytes of an element at the destination.
        casts: (n,) whether the dtypes of the two sides differ.
        quantizes: (n,) whether the op has a transform.
        direct_min_run_bytes: see `PlanPolicy`.

    Returns:
        (mode, reason, run_nbytes), each (n,).
    """
    sizes = geometry.sizes
    nbytes = sizes.prod(axis=1) * dst_itemsize
    inner = sizes[:, -1]
    src_inner = (inner == 1) | (geometry.src_strides[:, -1] == src_itemsize)
    dst_inner = (inner == 1) | (geometry.dst_strides[:, -1] == dst_itemsize)
    run = np.where(src_inner & dst_inner, inner, 1) * dst_itemsize
    dst_whole = _is_row_major(sizes, geometry.dst_strides, dst_itemsize)
    casts = casts | quantizes
    # The order matters: the first matching rule applies.
    rules: tuple[tuple[BoolArray, CopyMode, Reason], ...] = (
        (~casts & (run == nbytes), CopyMode.DIRECT, Reason.CONTIGUOUS),
        (~casts & (run >= direct_min_run_bytes), CopyMode.DIRECT, Reason.LONG_RUNS),
        (~dst_whole, CopyMode.SCATTER, Reason.DESTINATION_STRIDED),
        (quantizes, CopyMode.PACKED, Reason.QUANTIZED),
        (casts, CopyMode.PACKED, Reason.CAST),
    )
    masks = [rule[0] for rule in rules]
    mode = np.select(masks, [int(rule[1]) for rule in rules], int(CopyMode.PACKED))
    reason = np.select(masks, [int(rule[2]) for rule in rules], int(Reason.SOURCE_STRIDED))
    run_nbytes = np.where(mode == CopyMode.DIRECT, run, nbytes)
    return mode.astype(np.uint8), reason.astype(np.uint8), run_nbytes


# --- the ops of a link --------------------------------------------------------------------------


def coalesce(ops: OpTable) -> OpTable:
    """Replace several ops of a link by one longer op where possible.

    First join contiguous direct ops that are adjacent on both sides. Stacked experts, and
    projections that trainer and engine fuse in the same way, become one long run. Then join ops
    that repeat at a constant distance. The shards of all experts of a layer become one strided op.
    Every rank binds each op in Python, so ranks of a mixture of experts connect faster if there are fewer ops.

    Args:
        ops: sorted by (src, dst, src_parameter, dst_parameter, dst_offset).

    Returns:
        Ops for the same bytes in the same order. A joined op keeps the name of its first tensor.
    """
    ops = _join_adjacent(ops)
    # The first pass may join the two halves of each expert. The next pass may then join the experts.
    while len(joined := _join_repeated(ops)) < len(ops):
        ops = joined
    return ops


def _join_adjacent(ops: OpTable) -> OpTable:
    """Join consecutive contiguous direct ops that are adjacent at the source and at the destination."""
    if len(ops) < 2:
        return ops
    simple = (ops.mode == CopyMode.DIRECT) & (ops.reason == Reason.CONTIGUOUS)
    joins = simple[1:] & simple[:-1]
    for same in (ops.src, ops.dst, ops.src_parameter, ops.dst_parameter, ops.dst_dtype):
        joins &= same[1:] == same[:-1]
    joins &= ops.src_offset[1:] == ops.src_offset[:-1] + ops.nbytes[:-1]
    joins &= ops.dst_offset[1:] == ops.dst_offset[:-1] + ops.nbytes[:-1]
    if not joins.any():
        return ops
    first = np.flatnonzero(np.r_[True, ~joins])
    nbytes = np.add.reduceat(ops.nbytes, first)
    joined = ops.select(first)
    grown = nbytes != joined.nbytes
    itemsize = joined.nbytes // joined.sizes.prod(axis=1)
    sizes, run_nbytes = joined.sizes.copy(), joined.run_nbytes.copy()
    src_strides, dst_strides = joined.src_strides.copy(), joined.dst_strides.copy()
    sizes[grown, -1] = nbytes[grown] // itemsize[grown]
    src_strides[grown, -1] = dst_strides[grown, -1] = itemsize[grown]
    run_nbytes[grown] = nbytes[grown]
    return replace(
        joined,
        sizes=sizes,
        nbytes=nbytes,
        run_nbytes=run_nbytes,
        src_strides=src_strides,
        dst_strides=dst_strides,
    )


def _join_repeated(ops: OpTable) -> OpTable:
    """Join consecutive ops of equal shape whose addresses differ by a constant distance into one op with one more dim.

    The size of the new outermost dim is the number of ops, and its stride is the distance. A joined op has only the
    name of its first tensor. Ops that cast are not joined, because the error of a failed cast must name the right
    tensor. Ops that quantise are not joined, because their two dims define blocks.
    """
    if len(ops) < 2:
        return ops
    free = (ops.sizes[:, 0] == 1) & (ops.transform == Transform.NONE)
    free &= ops.src_dtype == ops.dst_dtype
    same = free[1:] & free[:-1]
    for values in (ops.src, ops.dst, ops.src_parameter, ops.dst_parameter, ops.src_dtype, ops.mode):
        same &= values[1:] == values[:-1]
    for wide in (ops.sizes, ops.src_strides, ops.dst_strides):
        same &= (wide[1:] == wide[:-1]).all(axis=1)
    src_step, dst_step = np.diff(ops.src_offset), np.diff(ops.dst_offset)
    itemsize = ITEMSIZES[ops.dst_dtype]
    for step, strides in ((src_step, ops.src_strides), (dst_step, ops.dst_strides)):
        same &= step >= (((ops.sizes - 1) * strides).sum(axis=1) + itemsize)[:-1]
    # A PACKED op must stay contiguous at the destination, because one write sends it.
    same &= (ops.mode[1:] != CopyMode.PACKED) | (dst_step == ops.nbytes[:-1])
    if not same.any():
        return ops
    # All rows of a joined op have the same distance from their predecessor. `changes[i]` is True if the distance from
    # row i - 1 to row i differs from the distance before it. Then row i begins a new op. The new op takes its distance
    # from rows i and i + 1, so row i + 1 belongs to it even if `changes[i + 1]` is True. Therefore, in a sequence of
    # consecutive changes, the first, the third, the fifth and so on begin an op.
    changes = np.zeros(len(ops), np.bool_)
    changes[2:] = same[1:] & same[:-1] & ((np.diff(src_step) != 0) | (np.diff(dst_step) != 0))
    row = np.arange(len(ops))
    nth_change = row - np.maximum.accumulate(np.where(changes, 0, row))
    first = np.flatnonzero(np.r_[True, ~same] | (nth_change % 2 == 1))
    count = np.diff(np.r_[first, len(ops)])
    joined, grown = ops.select(first), count > 1
    geometry = Strided(
        sizes=joined.sizes, src_strides=joined.src_strides, dst_strides=joined.dst_strides
    )
    geometry.sizes[grown, 0] = count[grown]
    geometry.src_strides[grown, 0] = src_step[first[grown]]
    geometry.dst_strides[grown, 0] = dst_step[first[grown]]
    geometry = collapse(geometry, kept=~grown)
    direct, nbytes = joined.mode == CopyMode.DIRECT, joined.nbytes * count
    return replace(
        joined,
        **geometry.columns(),
        nbytes=nbytes,
        run_nbytes=np.where(direct, joined.run_nbytes, nbytes),
        reason=np.where(direct & grown, np.uint8(Reason.LONG_RUNS), joined.reason),
    )


def place_staged(
    ops: OpTable, num_destinations: int, align: int
) -> tuple[Int64Array, tuple[int, ...]]:
    """Give every SCATTER payload an offset in its destination's staging memory.

    Args:
        ops: all ops of the plan.
        num_destinations: number of destination ranks.
        align: alignment of each payload in bytes.

    Returns:
        (offset per op, -1 for other modes; bytes of staging memory per destination).
    """
    offsets = np.full(len(ops), -1, np.int64)
    needs = np.flatnonzero(ops.mode == CopyMode.SCATTER)
    needs = needs[np.argsort(ops.dst[needs], kind="stable")]
    extent = -(-ops.nbytes[needs] // align) * align
    stop = np.cumsum(extent)
    bounds = np.searchsorted(ops.dst[needs], np.arange(num_destinations + 1))
    edges = np.concatenate([np.zeros(1, np.int64), stop])[bounds]
    offsets[needs] = stop - extent - edges[ops.dst[needs]]
    return offsets, tuple(int(v) for v in np.diff(edges))
