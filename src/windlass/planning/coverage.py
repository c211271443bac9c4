"""Checks that every destination byte belongs to one tensor and has a source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from windlass.errors import IncompleteCoverage, ManifestError
from windlass.layout.box import Box
from windlass.layout.columns import Int64Array
from windlass.layout.manifest import MAX_DIMS, ShardManifest
from windlass.planning.intersect import Atoms, box_of
from windlass.planning.plan import ITEMSIZES
from windlass.planning.rows import RowTable, TensorNames
from windlass.wording import counted


def find_hole(atoms: Atoms, box: Box) -> tuple[Box, ...]:
    """Return the parts of `box` that no atom contains, as disjoint boxes."""
    left: tuple[Box, ...] = (box,)
    for index in range(len(atoms)):
        atom = box_of(atoms.offsets[index], atoms.sizes[index])
        left = tuple(piece for part in left for piece in part.subtract(atom))
        if not left:
            break
    return left


def refuse_hole(
    row: int,
    dst: RowTable,
    names: TensorNames,
    destinations: Sequence[ShardManifest],
    atoms: Atoms,
) -> NoReturn:
    """Raise the error for a destination row that has elements without a source.

    Args:
        row: index of the row in `dst`.
        dst: rows of all destinations.
        names: tensor names of both sides.
        destinations: manifests of the destinations.
        atoms: boxes of the row's tensor that the trainers hold.

    Raises:
        IncompleteCoverage: always. The message names tensor, destination, the first hole, the
            number of holes and the missing bytes.
    """
    name, itemsize = int(dst.name[row]), int(ITEMSIZES[dst.dtype[row]])
    box = box_of(dst.offsets[row], dst.sizes[row])
    holes = find_hole(atoms, box)
    lead = MAX_DIMS - len(names.shapes[name])
    first = Box(holes[0].offsets[lead:], holes[0].sizes[lead:])
    missing = sum(hole.numel for hole in holes) * itemsize
    raise IncompleteCoverage(
        f"tensor {names.names[name]!r} of {destinations[int(dst.rank[row])].worker}: no source has box {first}; "
        f"{missing} of {box.numel * itemsize} bytes are missing, in {counted(len(holes), 'separate part')}"
    )


def refuse_overlaps(
    dst: RowTable, names: TensorNames, destinations: Sequence[ShardManifest]
) -> None:
    """Check that no two rows of `dst` share a byte.

    `ManifestBuilder.build` only compares the sum of the shards' bytes with the size of the parameter. So it accepts two
    shards that overlap if there is a gap of the same size. An update would then write bytes in the overlap twice, and
    no bytes in the gap.

    First compare the address ranges of all rows, with numpy. If rows of a parameter have overlapping ranges (strided
    shards), then compare each address of this parameter. Of parameters with the same arrangement of rows, check only one.

    Raises:
        ManifestError: two rows share memory. The message names worker, parameter and both tensors.
    """
    itemsize = ITEMSIZES[dst.dtype]
    reach = (dst.sizes - 1) * dst.strides_bytes
    low = dst.offset_bytes + np.minimum(reach, 0).sum(axis=1)
    high = dst.offset_bytes + np.maximum(reach, 0).sum(axis=1) + itemsize
    owner = dst.rank.astype(np.int64) << 32 | dst.parameter
    order = np.lexsort([low, owner])
    owner, low, high = owner[order], low[order], high[order]
    # Compute the running maximum of the ends within each parameter. Adding `group * step` makes every end of
    # a parameter larger than all ends of the parameters before it, so one running maximum is enough.
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]]) if len(owner) else owner
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(owner))))
    step = int(high.max(initial=0)) + 1
    so_far = np.maximum.accumulate(high + group * step)[:-1] - group[1:] * step
    crossing = np.unique(group[1:][so_far > low[1:]])
    ends = np.append(starts[1:], len(owner))
    seen: set[bytes] = set()
    for index in crossing.tolist():
        rows = order[starts[index] : ends[index]]
        arrangement = np.concatenate(
            [dst.offset_bytes[rows, None], dst.sizes[rows], dst.strides_bytes[rows]], axis=1
        )
        key = arrangement.tobytes() + bytes([int(itemsize[rows[0]])])
        if key in seen:
            continue
        seen.add(key)
        _check_addresses(rows, dst, names, destinations)


def _check_addresses(
    rows: Int64Array, dst: RowTable, names: TensorNames, destinations: Sequence[ShardManifest]
) -> None:
    """Raise ManifestError if two of `rows` share bytes. All of `rows` are in the same parameter.

    Compare addresses in units of several bytes, because there are fewer units than bytes. The unit is the greatest
    common divisor of all offsets, strides and lengths of runs.
    """
    manifest = destinations[int(dst.rank[rows[0]])]
    parameter = manifest.parameters[int(dst.parameter[rows[0]])]
    shapes = [_runs(dst, row, parameter.dtype.itemsize) for row in rows.tolist()]
    offsets = [int(dst.offset_bytes[row]) for row in rows.tolist()]
    unit = math.gcd(*offsets, *(v for run, dims in shapes for v in (run, *(s for _, s in dims))))
    taken = np.full(parameter.nbytes // unit, -1, np.int32)
    for row, offset, (run, dims) in zip(rows.tolist(), offsets, shapes, strict=True):
        view: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = np.ndarray(
            (*(size for size, _ in dims), run // unit),
            np.int32,
            taken,
            4 * (offset // unit),
            (*(4 * (stride // unit) for _, stride in dims), 4),
        )
        if (view != -1).any():
            other = int(view[view != -1][0])
            raise ManifestError(
                f"{manifest.worker}: parameter {parameter.name!r}: shards of "
                f"{names.names[int(dst.name[other])]!r} and {names.names[int(dst.name[row])]!r} "
                "must not share bytes"
            )
        view[...] = row


def _runs(dst: RowTable, row: int, itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Return one row as contiguous runs: (bytes of a run, [(size, stride) of each outer dim])."""
    sizes, strides = dst.sizes[row].tolist(), dst.strides_bytes[row].tolist()
    dims = sorted(
        ((n, s) for n, s in zip(sizes, strides, strict=True) if n > 1), key=lambda dim: abs(dim[1])
    )
    run = itemsize
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    return run, dims
