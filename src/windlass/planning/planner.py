"""Compile the manifests of all ranks into one `TransferPlan` that writes every destination byte once.

    rows        manifests                      => one table per side, names resolved
    intersect   tables                         => pieces: which atom fills which box
    coverage    tables, pieces                 => refuse bytes with two tensors or without a source
    quantize    destination rows               => scales in the coordinates of their weight
    routing     pieces x destination rows      => the source rank of each piece
    ops         routed pieces                  => strides, mode and reason per op; fewer, longer ops

Every step works on whole columns. Python loops run over patterns, tensors and ranks, never over
ops. The plan is symbolic (rank, parameter, byte offset); `planning/program.py` turns it into
programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.config import check_numbers
from windlass.errors import ManifestError
from windlass.layout.manifest import MAX_DIMS, ShardManifest
from windlass.planning.coverage import refuse_hole, refuse_overlaps
from windlass.planning.intersect import (
    Atoms,
    Boxes,
    Holders,
    Pieces,
    atoms_by_pattern,
    classes_by_pattern,
    find_holders,
    intersect_boxes,
    unique_boxes,
)
from windlass.planning.ops import Candidates, RoutedPieces, build_ops, coalesce, place_staged
from windlass.planning.plan import PLAN_SCHEMA_VERSION, TransferPlan
from windlass.planning.quantize import widen_scales
from windlass.planning.routing import assign, group_by_holders, pour
from windlass.planning.rows import RowTable, TensorNames, gather_rows, resolve_names

Planner = Callable[[Sequence[ShardManifest], Sequence[ShardManifest]], TransferPlan]
"""`plan_transfer`, or another function with the same arguments and result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPolicy:
    """Settings of the planner.

    Args:
        direct_min_run_bytes: minimum length of the contiguous runs of a strided op that is written
            run by run, without packing.
        min_split_bytes: minimum size of an op that may be split over several sources.
        staging_alignment: alignment of payloads in staging memory, in bytes.

    Raises:
        ConfigError: a size is < 1.
    """

    direct_min_run_bytes: int = 16 * 1024
    min_split_bytes: int = 256 * 1024
    staging_alignment: int = 256

    def __post_init__(self) -> None:
        sizes = ("direct_min_run_bytes", "min_split_bytes", "staging_alignment")
        check_numbers(self, dict.fromkeys(sizes, 1))


def plan_transfer(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    policy: PlanPolicy | None = None,
) -> TransferPlan:
    """Plan copies from `sources` that write every byte of `destinations` exactly once.

    The same manifests in the same order give the same plan, bit for bit.

    Args:
        sources: manifests of the ranks that send, usually trainer ranks.
        destinations: manifests of the ranks that receive, usually engine ranks.
        policy: settings of the planner; None for the defaults.

    Raises:
        ManifestError: manifests contradict each other, or one side has no manifest.
        IncompleteCoverage: destination bytes have no source.
        UnsupportedLayout: an element cannot be cast to the destination's dtype (`CASTS`), a shard contains only a part of
            a quantisation block, or a destination requests a quantisation that trainers do not support.
    """
    policy = policy or PlanPolicy()
    given = route(sources, destinations, policy)
    ops = coalesce(build_ops(given))
    staging_offset, staging_nbytes = place_staged(ops, len(destinations), policy.staging_alignment)
    ops.staging_offset[:] = staging_offset
    return TransferPlan(
        sources=given.sources,
        destinations=tuple(manifest.worker for manifest in destinations),
        tensors=given.names.names,
        source_digests=tuple(manifest.digest() for manifest in sources),
        destination_digests=tuple(manifest.digest() for manifest in destinations),
        staging_nbytes=staging_nbytes,
        ops=ops,
        schema_version=PLAN_SCHEMA_VERSION,
    )


def route(
    sources: Sequence[ShardManifest], destinations: Sequence[ShardManifest], policy: PlanPolicy
) -> RoutedPieces:
    """Cut destination rows into pieces, and choose the source rank of every piece. `build_ops` turns the result into ops.

    Raises:
        ManifestError: manifests contradict each other, or one side has no manifest.
        IncompleteCoverage: destination bytes have no source.
        UnsupportedLayout: a destination requests a quantisation that trainers do not support.
    """
    if not sources or not destinations:
        side = "destinations" if sources else "sources"
        raise ManifestError(f"plan_transfer: {side} must not be empty")
    names = resolve_names(sources, destinations)
    src = gather_rows(sources, names)
    dst = gather_rows(destinations, names)
    refuse_overlaps(dst, names, destinations)
    dst = widen_scales(dst, names)
    pieces, holders, boxes = _pieces(src, dst, names, destinations)
    candidates = Candidates.expand(pieces, boxes, dst)
    group_of_atom, groups = group_by_holders(src.rank[holders.rows], holders.start)
    group = group_of_atom[pieces.atom[candidates.piece]]
    group_nbytes = np.bincount(group, candidates.nbytes, len(groups)).astype(np.float64)
    shares = pour(group_nbytes, groups, len(sources))
    routed = assign(
        group, candidates.nbytes, candidates.units, groups, shares, policy.min_split_bytes
    )
    return RoutedPieces(
        src=src,
        dst=dst,
        names=names,
        sources=tuple(manifest.worker for manifest in sources),
        pieces=pieces,
        holders=holders,
        candidates=candidates,
        routed=routed,
        direct_min_run_nbytes=policy.direct_min_run_bytes,
    )


def _pieces(
    src: RowTable,
    dst: RowTable,
    names: TensorNames,
    destinations: Sequence[ShardManifest],
) -> tuple[Pieces, Holders, Boxes]:
    """Intersect source boxes with destination boxes.

    A pattern is the set of boxes into which the ranks of one side cut a tensor. A tensor has one pattern at the sources
    and one at the destinations. Many tensors have the same pair of patterns, so intersect each pair once, and repeat the
    result for these tensors.

    Returns:
        The pieces, the holders of each atom, and the boxes of the destinations.

    Raises:
        IncompleteCoverage: a destination element has no source.
    """
    num_classes = len(names.names)
    src_boxes = unique_boxes(src, num_classes)
    dst_boxes = unique_boxes(dst, num_classes)
    atoms = atoms_by_pattern(src_boxes)
    base, holders = find_holders(src_boxes, atoms, src)
    found: list[Pieces] = []
    wide = np.zeros((0, MAX_DIMS), np.int64)
    no_atoms = Atoms(offsets=wide, sizes=wide, members=None)
    for classes in classes_by_pattern(dst_boxes):
        box_rows = slice(int(dst_boxes.start[classes[0]]), int(dst_boxes.start[classes[0] + 1]))
        box_offsets, box_sizes = dst_boxes.offsets[box_rows], dst_boxes.sizes[box_rows]
        src_pattern = src_boxes.pattern[classes]
        for pattern in np.unique(src_pattern).tolist():
            of_pattern = atoms[pattern] if pattern >= 0 else no_atoms
            members = classes[src_pattern == pattern]
            common = intersect_boxes(of_pattern.offsets, of_pattern.sizes, box_offsets, box_sizes)
            covered = np.zeros(len(box_sizes), np.int64)
            np.add.at(covered, common.box, common.sizes.prod(axis=1))
            holes = np.flatnonzero(covered != box_sizes.prod(axis=1))
            if len(holes):
                hole = int(dst_boxes.start[members[0]]) + int(holes[0])
                row = int(dst_boxes.rows[dst_boxes.row_start[hole]])
                refuse_hole(row, dst, names, destinations, of_pattern)
            found.append(
                Pieces(
                    atom=(base[members][:, None] + common.atom).ravel(),
                    box=(dst_boxes.start[members][:, None] + common.box).ravel(),
                    offsets=np.tile(common.offsets, (len(members), 1)),
                    sizes=np.tile(common.sizes, (len(members), 1)),
                )
            )
    return Pieces.join(found), holders, dst_boxes
