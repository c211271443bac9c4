"""Stage 3: from any set of source manifests to any set of destination manifests.

    rows        manifests                      => one table per side, names resolved
    intersect   tables                         => pieces: which atom fills which box
    coverage    pieces                         => refuse holes
    routing     pieces x destination rows      => who sends what
    modes       chosen rows                    => strides, mode and reason per op
    coalesce    ops of a link                  => fewer, longer ops

Every step works on whole columns; Python loops run over patterns, tensors and ranks, never ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.errors import ConfigError, ManifestError, UnsupportedLayout
from windlass.layout.manifest import MAX_DIMS, Int64Array, ShardManifest
from windlass.layout.quantization import BLOCK
from windlass.planning.coalesce import coalesce, empty_ops, fill_ops
from windlass.planning.coverage import CoverageReport, refuse_hole
from windlass.planning.intersect import (
    Atoms,
    Boxes,
    Holders,
    Pieces,
    atoms_by_pattern,
    classes_by_pattern,
    find_holders,
    intersect_boxes,
    ranges,
    unique_boxes,
)
from windlass.planning.modes import Strided, choose_modes, collapse
from windlass.planning.overlap import refuse_overlaps
from windlass.planning.plan import DTYPES, CopyMode, OpTable, Reason, TransferPlan, Transform
from windlass.planning.quantize import (
    keep_blocks,
    payload_sizes,
    refuse_cut_blocks,
    refuse_unquantized,
    split_units,
    widen_scales,
)
from windlass.planning.routing import (
    Assignment,
    RoutingReport,
    assign,
    certify,
    group_by_holders,
    pour,
)
from windlass.planning.rows import RowTable, TensorNames, gather_rows, resolve_names

__all__ = ["PlanPolicy", "PlannedTransfer", "plan_transfer", "plan_with_reports"]

_CHUNK_OPS = 1 << 18
_ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], np.int64)
_FLOATING = np.array([dtype.is_floating for dtype in DTYPES], np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPolicy:
    """What the planner may choose.

    Args:
        direct_min_run_bytes: a strided op whose contiguous runs, on both sides, are at least
            this long is written run by run without packing.
        min_split_bytes: an op smaller than this is never split over several sources.
        landing_alignment: bytes; every payload in a landing region starts at a multiple.
        loader_tensors: checkpoint names that the engine's own loader must be given.
        forbid_unused: refuse tensors that sources hold and no destination wants.

    Raises:
        ConfigError: a size is < 1.
    """

    direct_min_run_bytes: int = 16 * 1024
    min_split_bytes: int = 256 * 1024
    landing_alignment: int = 256
    loader_tensors: frozenset[str] = frozenset()
    forbid_unused: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("direct_min_run_bytes", self.direct_min_run_bytes),
            ("min_split_bytes", self.min_split_bytes),
            ("landing_alignment", self.landing_alignment),
        ):
            if value < 1:
                raise ConfigError(f"PlanPolicy: {name} must be >= 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """A plan and what was learnt while making it."""

    plan: TransferPlan
    coverage: CoverageReport
    routing: RoutingReport


def plan_transfer(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    policy: PlanPolicy | None = None,
) -> TransferPlan:
    """Plan how the bytes of `sources` fill every byte of `destinations`, each exactly once.

    The same manifests in the same order give the same plan, bit for bit.

    Raises:
        ManifestError: manifests contradict each other.
        IncompleteCoverage: destination bytes have no source.
        UnsupportedLayout: dtypes differ and are not both floating.
    """
    return plan_with_reports(sources, destinations, policy).plan


def plan_with_reports(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    policy: PlanPolicy | None = None,
) -> PlannedTransfer:
    """As `plan_transfer`, with coverage and routing measured."""
    policy = policy or PlanPolicy()
    if not sources or not destinations:
        side = "destinations" if sources else "sources"
        raise ManifestError(f"plan_transfer: {side} must not be empty")
    names = resolve_names(sources, destinations)
    src = gather_rows(sources, names)
    dst = gather_rows(destinations, names)
    refuse_overlaps(dst, names, destinations)
    dst = widen_scales(dst, names)
    unused = _unused_tensors(src, dst, names)
    if unused and policy.forbid_unused:
        raise ManifestError(
            f"tensor {unused[0]!r} is held by a source and wanted by no destination "
            f"({len(unused)} such tensor(s), PlanPolicy.forbid_unused is set)"
        )
    pieces, holders, boxes = _pieces(src, dst, names, destinations)
    candidates = _Candidates.expand(pieces, boxes, dst)
    group_of_atom, groups = group_by_holders(src.rank[holders.rows], holders.start)
    group = group_of_atom[pieces.atom[candidates.piece]]
    group_nbytes = np.bincount(group, candidates.nbytes, len(groups)).astype(np.float64)
    shares = pour(group_nbytes, groups, len(sources))
    routed = assign(
        group, candidates.nbytes, candidates.units, groups, shares, policy.min_split_bytes
    )
    ops = _build_ops(src, dst, names, pieces, holders, candidates, routed, policy, sources)
    egress = np.zeros(len(sources), np.int64)
    np.add.at(egress, ops.src, ops.nbytes)
    routing = certify(egress, group_nbytes.astype(np.int64), groups)
    payload = payload_sizes(dst.sizes, dst.transform)
    needed = int((payload.prod(axis=1) * _ITEMSIZES[dst.dtype]).sum())
    coverage = CoverageReport(
        needed=needed,
        covered=int(ops.nbytes.sum()),
        by_mode={m: int(ops.nbytes[ops.mode == m].sum()) for m in CopyMode},
        by_reason={r: int(ops.nbytes[ops.reason == r].sum()) for r in Reason},
        unused_tensors=unused,
    )
    ops = coalesce(ops)
    landing_offset, landing_nbytes = _place_landing(ops, len(destinations), policy)
    ops.landing_offset[:] = landing_offset
    plan = TransferPlan(
        sources=tuple(manifest.worker for manifest in sources),
        destinations=tuple(manifest.worker for manifest in destinations),
        tensors=names.names,
        source_digests=tuple(manifest.digest() for manifest in sources),
        destination_digests=tuple(manifest.digest() for manifest in destinations),
        landing_nbytes=landing_nbytes,
        ops=ops,
    )
    return PlannedTransfer(plan=plan, coverage=coverage, routing=routing)


def _unused_tensors(src: RowTable, dst: RowTable, names: TensorNames) -> tuple[str, ...]:
    unused = np.setdiff1d(src.tensor, dst.tensor)
    return tuple(sorted(names.names[int(index)] for index in unused))


def _pieces(
    src: RowTable,
    dst: RowTable,
    names: TensorNames,
    destinations: Sequence[ShardManifest],
) -> tuple[Pieces, Holders, Boxes]:
    """Intersect both sides, pattern by pattern, and refuse holes."""
    num_classes = len(names.names)
    src_boxes = unique_boxes(src, num_classes)
    dst_boxes = unique_boxes(dst, num_classes)
    atoms = atoms_by_pattern(src_boxes)
    base, holders = find_holders(src_boxes, atoms, src)
    atom_parts: list[Int64Array] = [np.zeros(0, np.int64)]
    box_parts: list[Int64Array] = [np.zeros(0, np.int64)]
    template_parts: list[Int64Array] = [np.zeros(0, np.int64)]
    offset_parts: list[Int64Array] = [np.zeros((0, MAX_DIMS), np.int64)]
    size_parts: list[Int64Array] = [np.zeros((0, MAX_DIMS), np.int64)]
    num_templates = 0
    no_atoms = Atoms(offsets=offset_parts[0], sizes=size_parts[0], members=None)
    for classes in classes_by_pattern(dst_boxes):
        box_rows = slice(int(dst_boxes.start[classes[0]]), int(dst_boxes.start[classes[0] + 1]))
        box_offsets, box_sizes = dst_boxes.offsets[box_rows], dst_boxes.sizes[box_rows]
        src_pattern = src_boxes.pattern[classes]
        for pattern in np.unique(src_pattern).tolist():
            of_pattern = atoms[pattern] if pattern >= 0 else no_atoms
            members = classes[src_pattern == pattern]
            atom, box, offsets, sizes = intersect_boxes(
                of_pattern.offsets, of_pattern.sizes, box_offsets, box_sizes
            )
            covered = np.zeros(len(box_sizes), np.int64)
            np.add.at(covered, box, sizes.prod(axis=1))
            holes = np.flatnonzero(covered != box_sizes.prod(axis=1))
            if len(holes):
                hole = int(dst_boxes.start[members[0]]) + int(holes[0])
                row = int(dst_boxes.rows[dst_boxes.row_start[hole]])
                refuse_hole(
                    tensor=names.names[int(dst.name[row])],
                    num_dims=len(names.shapes[int(dst.name[row])]),
                    worker=destinations[int(dst.rank[row])].worker,
                    atoms=of_pattern,
                    offsets=dst.offsets[row],
                    sizes=dst.sizes[row],
                    itemsize=int(_ITEMSIZES[dst.dtype[row]]),
                )
            atom_parts.append((base[members][:, None] + atom).ravel())
            box_parts.append((dst_boxes.start[members][:, None] + box).ravel())
            template = num_templates + np.arange(len(atom))
            template_parts.append(np.tile(template, len(members)))
            offset_parts.append(offsets)
            size_parts.append(sizes)
            num_templates += len(atom)
    pieces = Pieces(
        atom=np.concatenate(atom_parts),
        box=np.concatenate(box_parts),
        template=np.concatenate(template_parts),
        offsets=np.concatenate(offset_parts),
        sizes=np.concatenate(size_parts),
    )
    return pieces, holders, dst_boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Every piece at every destination row, before a source is chosen; sorted by destination.

    Attributes:
        piece: (n,) row of `Pieces`.
        row: (n,) row of the destination table.
        nbytes: (n,) bytes at the destination.
        axis: (n,) outermost dim with more than one element, where an op may be cut.
        units: (n,) extent of that dim, in blocks where the op quantises.
    """

    piece: Int64Array
    row: Int64Array
    nbytes: Int64Array
    axis: Int64Array
    units: Int64Array

    @classmethod
    def expand(cls, pieces: Pieces, boxes: Boxes, dst: RowTable) -> _Candidates:
        count = (boxes.row_start[1:] - boxes.row_start[:-1])[pieces.box]
        piece = np.repeat(np.arange(len(count)), count)
        row = boxes.rows[ranges(boxes.row_start[pieces.box], count)]
        order = np.lexsort([pieces.template[piece], row])  # rows ascend with the rank
        piece, row = piece[order], row[order]
        axis = (pieces.sizes > 1).argmax(axis=1)
        units = np.take_along_axis(pieces.sizes, axis[:, None], axis=1)[:, 0]
        template = pieces.template[piece]
        numel = pieces.sizes.prod(axis=1)[template]
        scales = np.flatnonzero(dst.transform[row] == Transform.FP8_BLOCK_SCALES)
        numel[scales] = payload_sizes(
            pieces.sizes[template[scales]], dst.transform[row[scales]]
        ).prod(axis=1)
        return cls(
            piece=piece,
            row=row,
            nbytes=numel * _ITEMSIZES[dst.dtype[row]],
            axis=axis[template],
            units=split_units(units[template], dst.transform[row]),
        )


def _build_ops(
    src: RowTable,
    dst: RowTable,
    names: TensorNames,
    pieces: Pieces,
    holders: Holders,
    candidates: _Candidates,
    routed: Assignment,
    policy: PlanPolicy,
    sources: Sequence[ShardManifest],
) -> OpTable:
    """Turn routed candidates into ops, in plan order, chunk by chunk to bound memory."""
    dst_row = candidates.row[routed.op]
    src_row = _source_rows(src, holders, pieces.atom[candidates.piece[routed.op]], routed.rank)
    _refuse_casts(src, dst, src_row, dst_row, names)
    refuse_unquantized(src, dst, src_row, dst_row, names)
    order = _plan_order(src, dst, src_row, dst_row, routed)
    is_loader = np.zeros(len(names.names), np.bool_)
    is_loader[[names.index[n] for n in policy.loader_tensors if n in names.index]] = True
    ops = empty_ops(len(order))
    for first in range(0, len(order), _CHUNK_OPS):
        part = order[first : first + _CHUNK_OPS]
        op, s, d = routed.op[part], src_row[part], dst_row[part]
        template = pieces.template[candidates.piece[op]]
        offsets, sizes = pieces.offsets[template], pieces.sizes[template]
        rows, axis = np.arange(len(part)), candidates.axis[op]
        transform = dst.transform[d]
        unit = np.where(transform != Transform.NONE, BLOCK, 1)
        begin = routed.begin[part] * unit
        sizes[rows, axis] = np.minimum(routed.end[part] * unit, sizes[rows, axis]) - begin
        offsets[rows, axis] += begin
        refuse_cut_blocks(offsets, sizes, dst, d, src.rank[s], names, sources)
        src_offset = src.offset_bytes[s] + ((offsets - src.offsets[s]) * src.strides_bytes[s]).sum(
            axis=1
        )
        per_scale = np.where(transform == Transform.FP8_BLOCK_SCALES, BLOCK, 1)[:, None]
        steps = (offsets - dst.offsets[d]) // per_scale
        dst_offset = dst.offset_bytes[d] + (steps * dst.strides_bytes[d]).sum(axis=1)
        strides = src.strides_bytes[s], dst.strides_bytes[d]
        geometry = keep_blocks(collapse(sizes, *strides), sizes, *strides, transform)
        payload = payload_sizes(geometry.sizes, transform)
        dst_itemsize = _ITEMSIZES[dst.dtype[d]]
        mode, reason, run_nbytes = choose_modes(
            Strided(
                sizes=payload,
                src_strides=geometry.src_strides,
                dst_strides=geometry.dst_strides,
            ),
            _ITEMSIZES[src.dtype[s]],
            dst_itemsize,
            src.dtype[s] != dst.dtype[d],
            transform != Transform.NONE,
            is_loader[dst.name[d]],
            policy.direct_min_run_bytes,
        )
        fill_ops(
            ops,
            first,
            OpTable(
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
                src_offset=src_offset,
                src_strides=geometry.src_strides,
                dst_offset=dst_offset,
                dst_strides=geometry.dst_strides,
                run_nbytes=run_nbytes,
                nbytes=payload.prod(axis=1) * dst_itemsize,
                landing_offset=np.full(len(part), -1, np.int64),
            ),
        )
    return ops


def _source_rows(src: RowTable, holders: Holders, atom: Int64Array, rank: Int64Array) -> Int64Array:
    """The row of `rank` that holds `atom`."""
    num_ranks = int(src.rank.max(initial=0)) + 1
    atom_of_row = np.repeat(np.arange(len(holders.start) - 1), np.diff(holders.start))
    keys = atom_of_row * num_ranks + src.rank[holders.rows]
    return holders.rows[np.searchsorted(keys, atom * num_ranks + rank)]


def _refuse_casts(
    src: RowTable, dst: RowTable, src_row: Int64Array, dst_row: Int64Array, names: TensorNames
) -> None:
    have, want = src.dtype[src_row], dst.dtype[dst_row]
    bad = (have != want) & ~(_FLOATING[have] & _FLOATING[want])
    if bad.any():
        op = int(bad.argmax())
        raise UnsupportedLayout(
            f"tensor {names.names[int(dst.name[dst_row[op]])]!r}: only floating dtypes are cast, "
            f"got {DTYPES[int(have[op])]} at the source and {DTYPES[int(want[op])]} at the "
            "destination"
        )


def _plan_order(
    src: RowTable,
    dst: RowTable,
    src_row: Int64Array,
    dst_row: Int64Array,
    routed: Assignment,
) -> npt.NDArray[np.intp]:
    """Sort by (src, dst, src parameter, dst parameter, source row, destination row, slice)."""
    link = src.rank[src_row].astype(np.int64) << 32 | dst.rank[dst_row]
    parameters = src.parameter[src_row].astype(np.int64) << 32 | dst.parameter[dst_row]
    place = dst.offset_bytes[dst_row]
    return np.lexsort([routed.begin, routed.op, dst_row, place, parameters, link])


def _place_landing(
    ops: OpTable, num_destinations: int, policy: PlanPolicy
) -> tuple[Int64Array, tuple[int, ...]]:
    """Give every payload that needs unpacking its place in its destination's landing region."""
    offsets = np.full(len(ops), -1, np.int64)
    needs = np.flatnonzero((ops.mode == CopyMode.SCATTER) | (ops.mode == CopyMode.LOADER))
    needs = needs[np.argsort(ops.dst[needs], kind="stable")]
    align = policy.landing_alignment
    extent = -(-ops.nbytes[needs] // align) * align
    stop = np.cumsum(extent)
    bounds = np.searchsorted(ops.dst[needs], np.arange(num_destinations + 1))
    edges = np.concatenate([np.zeros(1, np.int64), stop])[bounds]
    offsets[needs] = stop - extent - edges[ops.dst[needs]]
    return offsets, tuple(int(v) for v in np.diff(edges))
