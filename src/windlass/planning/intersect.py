"""Intersect source boxes with destination boxes, in whole columns.

A model has tens of thousands of tensors but few *patterns*. A pattern is the set of boxes into
which the ranks of one side cut a tensor. The box algebra runs once per pair of patterns; its
result, a few `Pieces`, is then repeated for every tensor with that pair.

Overlapping source boxes are first cut into disjoint *atoms*. Each atom records all boxes that
contain it. Every destination byte then belongs to exactly one atom, and the ranks that hold an atom
are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.layout.box import Box
from windlass.layout.columns import Columns, Int32Array, Int64Array, column
from windlass.layout.manifest import MAX_DIMS
from windlass.planning.rows import RowTable

_CHUNK_PAIRS = 1 << 20


def box_of(offsets: Int64Array, sizes: Int64Array) -> Box:
    """Return the `Box` with these offsets and sizes, each (MAX_DIMS,). The box keeps the padding dims."""
    return Box(tuple(int(v) for v in offsets), tuple(int(v) for v in sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Distinct boxes of one side, sorted by (tensor class, offsets, sizes).

    Attributes:
        tensor: (b,) tensor class, see `planning/rows.py`.
        offsets, sizes: (b, MAX_DIMS).
        rows: (n,) row indices of the side's `RowTable`, grouped by box and sorted by rank in each
            group.
        row_start: (b + 1,) start of each box's group in `rows`.
        start: (num_classes + 1,) index of the first box of each class.
        pattern: (num_classes,) number of the pattern of each class; -1 for a class without boxes.
        num_patterns: number of distinct patterns.
    """

    tensor: Int32Array
    offsets: Int64Array
    sizes: Int64Array
    rows: Int64Array
    row_start: Int64Array
    start: Int64Array
    pattern: Int64Array
    num_patterns: int


def unique_boxes(table: RowTable, num_classes: int) -> Boxes:
    """Group the rows of one side by tensor class and box. Give classes with equal boxes the same pattern number.

    Args:
        table: rows of the side.
        num_classes: number of tensor classes of both sides.
    """
    columns: list[Int32Array | Int64Array] = [table.rank]
    for wide in (table.sizes, table.offsets):
        for dim in range(MAX_DIMS - 1, -1, -1):
            values = wide[:, dim]
            if len(values) and (values != values[0]).any():
                columns.append(values)
    columns.append(table.tensor)
    rows = np.lexsort(columns)
    tensor, offsets, sizes = table.tensor[rows], table.offsets[rows], table.sizes[rows]
    new = np.ones(len(rows), np.bool_)
    if len(rows):
        new[1:] = tensor[1:] != tensor[:-1]
        new[1:] |= (offsets[1:] != offsets[:-1]).any(axis=1)
        new[1:] |= (sizes[1:] != sizes[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    tensor, offsets, sizes = tensor[first], offsets[first], sizes[first]
    start = np.searchsorted(tensor, np.arange(num_classes + 1))
    pattern = np.full(num_classes, -1, np.int64)
    seen: dict[bytes, int] = {}
    both = np.concatenate([offsets, sizes], axis=1)
    bounds = start.tolist()
    for index in np.unique(tensor).tolist():
        signature = both[bounds[index] : bounds[index + 1]].tobytes()
        pattern[index] = seen.setdefault(signature, len(seen))
    return Boxes(
        tensor=tensor,
        offsets=offsets,
        sizes=sizes,
        rows=rows,
        row_start=np.append(first, len(rows)),
        start=start,
        pattern=pattern,
        num_patterns=len(seen),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Disjoint boxes into which one pattern is cut.

    Attributes:
        offsets, sizes: (a, MAX_DIMS).
        members: per atom, the boxes of the pattern that contain it; None if the boxes are disjoint, so that each box is an atom.
    """

    offsets: Int64Array
    sizes: Int64Array
    members: tuple[tuple[int, ...], ...] | None

    def __len__(self) -> int:
        return len(self.offsets)


def make_atoms(offsets: Int64Array, sizes: Int64Array) -> Atoms:
    """Cut the boxes of one pattern into disjoint atoms.

    `offsets` and `sizes`, (n, MAX_DIMS), describe the n distinct boxes.
    """
    common = intersect_boxes(offsets, sizes, offsets, sizes)
    if (common.atom == common.box).all():
        return Atoms(offsets=offsets, sizes=sizes, members=None)
    atoms: list[tuple[Box, tuple[int, ...]]] = []
    for index in range(len(offsets)):
        new = box_of(offsets[index], sizes[index])
        left: list[Box] = [new]
        refined: list[tuple[Box, tuple[int, ...]]] = []
        for box, members in atoms:
            both = box.intersect(new)
            if both is None:
                refined.append((box, members))
                continue
            refined.append((both, (*members, index)))
            refined.extend((piece, members) for piece in box.subtract(new))
            left = [piece for part in left for piece in part.subtract(box)]
        refined.extend((piece, (index,)) for piece in left)
        atoms = refined
    return Atoms(
        offsets=np.array([box.offsets for box, _ in atoms], np.int64).reshape(-1, MAX_DIMS),
        sizes=np.array([box.sizes for box, _ in atoms], np.int64).reshape(-1, MAX_DIMS),
        members=tuple(members for _, members in atoms),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces(Columns):
    """All (atom, destination box) pairs that have common elements.

    Attributes:
        atom: (n,) number of the atom. `intersect_boxes` numbers the atoms of one pattern, `find_holders` the atoms of
            all tensors.
        box: (n,) index of the destination box. In the result of `intersect_boxes` it is an index into the boxes of one
            pattern; in the planner's result it is an index into `Boxes`.
        offsets, sizes: (n, MAX_DIMS) box of the common elements.
    """

    atom: Int64Array = column("<i8")
    box: Int64Array = column("<i8")
    offsets: Int64Array = column("<i8", MAX_DIMS)
    sizes: Int64Array = column("<i8", MAX_DIMS)


def intersect_boxes(
    a_offsets: Int64Array, a_sizes: Int64Array, b_offsets: Int64Array, b_sizes: Int64Array
) -> Pieces:
    """Return the non-empty intersections of boxes a (the atoms) with boxes b, sorted by (b, a).

    All arguments are (n, MAX_DIMS). In the result, `atom` has indices into `a_offsets`, and `box` has indices into
    `b_offsets`.
    """
    parts: list[Pieces] = []
    step = max(1, _CHUNK_PAIRS // max(1, len(a_offsets)))
    a_ends, b_ends = a_offsets + a_sizes, b_offsets + b_sizes
    for begin in range(0, len(b_offsets), step):
        stop = begin + step
        meets = np.ones((len(b_offsets[begin:stop]), len(a_offsets)), np.bool_)
        for dim in range(a_offsets.shape[1]):
            meets &= a_offsets[None, :, dim] < b_ends[begin:stop, None, dim]
            meets &= b_offsets[begin:stop, None, dim] < a_ends[None, :, dim]
        index_b, index_a = np.nonzero(meets)
        index_b += begin
        offsets = np.maximum(a_offsets[index_a], b_offsets[index_b])
        sizes = np.minimum(a_ends[index_a], b_ends[index_b]) - offsets
        parts.append(Pieces(atom=index_a, box=index_b, offsets=offsets, sizes=sizes))
    return Pieces.join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Source rows that contain each atom; atoms are numbered over all tensors.

    Attributes:
        rows: source rows, grouped by atom and sorted by rank in each group.
        start: (num_atoms + 1,) start of each atom's group.
    """

    rows: Int64Array
    start: Int64Array


def classes_by_pattern(boxes: Boxes) -> list[Int64Array]:
    """Return the tensor classes of each pattern, in ascending order."""
    order = np.argsort(boxes.pattern, kind="stable")
    bounds = np.searchsorted(boxes.pattern[order], np.arange(boxes.num_patterns + 1))
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def atoms_by_pattern(boxes: Boxes) -> list[Atoms]:
    """Cut the boxes of each pattern into atoms. Return the atoms per pattern, in the order of the pattern numbers."""
    atoms: list[Atoms] = []
    for classes in classes_by_pattern(boxes):
        rows = slice(int(boxes.start[classes[0]]), int(boxes.start[classes[0] + 1]))
        atoms.append(make_atoms(boxes.offsets[rows], boxes.sizes[rows]))
    return atoms


def find_holders(
    boxes: Boxes, atoms: Sequence[Atoms], table: RowTable, *, one_per_rank: bool = True
) -> tuple[Int64Array, Holders]:
    """Give each atom of all tensors a number, and find the rows of `table` that contain each atom.

    Args:
        boxes: boxes of `table`.
        atoms: atoms of each pattern of `boxes`.
        table: rows of the sources.
        one_per_rank: True to return at most one row per atom and rank: the first row that contains the atom.

    Returns:
        (base, holders). `base`, (num_classes + 1,): `base[c]` is the number of the first atom of tensor class c, and
        `base[-1]` is the count of all atoms.
    """
    num_classes = len(boxes.pattern)
    counts = np.zeros(num_classes, np.int64)
    groups = classes_by_pattern(boxes)
    for of_pattern, classes in zip(atoms, groups, strict=True):
        counts[classes] = len(of_pattern)
    base = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    atom_parts: list[Int64Array] = [np.zeros(0, np.int64)]
    box_parts: list[Int64Array] = [np.zeros(0, np.int64)]
    for of_pattern, classes in zip(atoms, groups, strict=True):
        if of_pattern.members is None:
            local_atom = local_box = np.arange(len(of_pattern))
        else:
            local_atom = np.repeat(
                np.arange(len(of_pattern)), [len(members) for members in of_pattern.members]
            )
            local_box = np.array([box for members in of_pattern.members for box in members])
        atom_parts.append((base[classes][:, None] + local_atom).ravel())
        box_parts.append((boxes.start[classes][:, None] + local_box).ravel())
    atom, box = np.concatenate(atom_parts), np.concatenate(box_parts)
    num_rows = (boxes.row_start[1:] - boxes.row_start[:-1])[box]
    rows = boxes.rows[ranges(boxes.row_start[box], num_rows)]
    atom = np.repeat(atom, num_rows)
    rank = table.rank[rows]
    order = np.lexsort((rows, rank, atom))
    atom, rank, rows = atom[order], rank[order], rows[order]
    if one_per_rank:
        keep = np.ones(len(rows), np.bool_)
        keep[1:] = (atom[1:] != atom[:-1]) | (rank[1:] != rank[:-1])
        atom, rows = atom[keep], rows[keep]
    start = np.searchsorted(atom, np.arange(int(base[-1]) + 1))
    return base, Holders(rows=rows, start=start)


def ranges(start: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the concatenation of the ranges [start[i], start[i] + counts[i])."""
    values: Int64Array = np.repeat(start, counts) + counted(counts)
    return values


def counted(counts: Int64Array) -> Int64Array:
    """Return the concatenation of the ranges [0, counts[i])."""
    ends = np.cumsum(counts)
    index: Int64Array = np.arange(int(ends[-1]) if len(ends) else 0)
    return index - np.repeat(ends - counts, counts)
