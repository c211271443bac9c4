"""Holes, atoms and patterns, compared with sets of indices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import boxes

from tools.plan.reports import plan_with_reports
from windlass.errors import IncompleteCoverage
from windlass.layout.box import Box
from windlass.layout.columns import Int64Array
from windlass.layout.dtypes import DType
from windlass.layout.manifest import MAX_DIMS, ManifestBuilder, Role
from windlass.planning.coverage import find_hole
from windlass.planning.intersect import intersect_boxes, make_atoms

SHAPE = (1, 1, 1, 5, 4)


def columns(of: list[Box]) -> tuple[Int64Array, Int64Array]:
    distinct = sorted(set(of), key=lambda box: (box.offsets, box.sizes))
    return (
        np.array([box.offsets for box in distinct], np.int64).reshape(-1, MAX_DIMS),
        np.array([box.sizes for box in distinct], np.int64).reshape(-1, MAX_DIMS),
    )


def cells(offsets: Int64Array, sizes: Int64Array) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))))


some_boxes = st.lists(boxes(SHAPE), min_size=1, max_size=6).map(columns)


@settings(deadline=None)
@given(some_boxes)
def test_atoms_are_disjoint_and_list_every_box_that_contains_them(
    drawn: tuple[Int64Array, Int64Array],
) -> None:
    offsets, sizes = drawn
    atoms = make_atoms(offsets, sizes)
    of_atoms = [cells(atoms.offsets[i], atoms.sizes[i]) for i in range(len(atoms))]
    of_boxes = [cells(offsets[i], sizes[i]) for i in range(len(offsets))]
    assert sum(map(len, of_atoms)) == len(set().union(*of_atoms))
    assert set().union(*of_atoms) == set().union(*of_boxes)
    members = atoms.members or tuple((i,) for i in range(len(atoms)))
    for atom, of_atom in zip(of_atoms, members, strict=True):
        assert set(of_atom) == {i for i, box in enumerate(of_boxes) if atom <= box}
        assert all(atom <= box or not atom & box for box in of_boxes)


@settings(deadline=None)
@given(some_boxes, some_boxes)
def test_intersections_are_all_found(
    left: tuple[Int64Array, Int64Array], right: tuple[Int64Array, Int64Array]
) -> None:
    met = intersect_boxes(*left, *right)
    pairs = zip(met.atom.tolist(), met.box.tolist(), strict=True)
    found = {pair: cells(met.offsets[i], met.sizes[i]) for i, pair in enumerate(pairs)}
    for i, j in itertools.product(range(len(left[0])), range(len(right[0]))):
        common = cells(left[0][i], left[1][i]) & cells(right[0][j], right[1][j])
        assert found.get((i, j), set()) == common


@settings(deadline=None)
@given(some_boxes, boxes(SHAPE))
def test_holes_are_the_cells_that_no_atom_covers(
    drawn: tuple[Int64Array, Int64Array], box: Box
) -> None:
    offsets, sizes = drawn
    holes = find_hole(make_atoms(offsets, sizes), box)
    covered = set().union(*(cells(offsets[i], sizes[i]) for i in range(len(offsets))))
    want = cells(np.array(box.offsets), np.array(box.sizes))
    parts = [cells(np.array(hole.offsets), np.array(hole.sizes)) for hole in holes]
    assert set().union(*parts) == want - covered
    assert sum(map(len, parts)) == len(want - covered)


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes((5, 4)), min_size=1, max_size=5), boxes((5, 4)))
def test_a_plan_exists_only_if_every_element_has_a_source(held: list[Box], wanted: Box) -> None:
    sources = []
    for index, box in enumerate(held):
        builder = ManifestBuilder(f"t{index}", Role.TRAINER)
        builder.add_parameter("p", nbytes=box.numel * 4, dtype=DType.FLOAT32)
        builder.add_shard("w", (5, 4), box, "p")
        sources.append(builder.build())
    builder = ManifestBuilder("engine", Role.ENGINE)
    builder.add_parameter("p", nbytes=wanted.numel * 4, dtype=DType.FLOAT32)
    builder.add_shard("w", (5, 4), wanted, "p")
    destinations = [builder.build()]
    grid = np.zeros((5, 4), np.bool_)
    for box in held:
        grid[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))] = True
    region = grid[tuple(slice(o, e) for o, e in zip(wanted.offsets, wanted.ends, strict=True))]
    if region.all():
        report = plan_with_reports(sources, destinations).coverage
        assert report.needed == report.covered == wanted.numel * 4
        assert sum(report.by_mode.values()) == sum(report.by_reason.values()) == report.needed
    else:
        missing = int((~region).sum()) * 4
        with pytest.raises(IncompleteCoverage, match=f"; {missing} of {wanted.numel * 4} bytes"):
            plan_with_reports(sources, destinations)
