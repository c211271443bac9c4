"""Box algebra, compared with sets of indices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import boxes, grids, shapes

from windlass.errors import ManifestError
from windlass.layout.box import Box


def cells(box: Box) -> set[tuple[int, ...]]:
    spans = (range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
    return set(itertools.product(*spans))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = draw(shapes(max_dims=3, max_size=5))
    return draw(boxes(shape)), draw(boxes(shape))


@given(pairs())
def test_intersection_is_the_set_intersection(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert a.contains(b) == (cells(b) <= cells(a))


@given(pairs())
def test_difference_is_the_set_difference_in_disjoint_pieces(pair: tuple[Box, Box]) -> None:
    a, b = pair
    pieces = a.subtract(b)
    assert set().union(*(cells(p) for p in pieces)) == cells(a) - cells(b)
    assert sum(p.numel for p in pieces) == len(cells(a) - cells(b))


@given(shapes(max_dims=3).flatmap(lambda s: st.tuples(st.just(s), grids(s))))
def test_a_grid_tiles_its_shape(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, grid = drawn
    assert sum(box.numel for box in grid) == Box.full(shape).numel
    assert set().union(*(cells(box) for box in grid)) == cells(Box.full(shape))


def test_an_invalid_box_is_refused() -> None:
    with pytest.raises(ManifestError, match="same length"):
        Box((0,), (1, 2))
    with pytest.raises(ManifestError, match=">= 0"):
        Box((-1,), (2,))
    with pytest.raises(ManifestError, match="same number of dims"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


def test_an_empty_box_has_nothing_in_common_with_any() -> None:
    empty = Box((1, 1), (0, 3))
    assert empty.intersect(Box((0, 0), (4, 4))) is None
    assert empty.subtract(Box((0, 0), (4, 4))) == ()
    assert str(Box((1, 2), (3, 4))) == "[1:4, 2:6]"
