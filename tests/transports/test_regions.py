from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windlass.errors import RegionError
from windlass.memory.ranges import (
    calls,
    cut_at_edges,
    edges_of,
    merge_adjacent,
    split_pieces,
)
from windlass.transports.base import MemoryRegion
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.regions import RegionTable, check_inside

ENDPOINT = PeerEndpoint("memory", "x", "1")
extents = st.tuples(st.integers(1, 200), st.integers(1, 60))
pieces = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 40)), max_size=30
)


def region(address: int, nbytes: int) -> MemoryRegion:
    return MemoryRegion(address, nbytes, RemoteRegion(ENDPOINT, address, nbytes))


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def bytes_of(local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray) -> list[tuple[int, int]]:
    rows = zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True)
    return [(a + i, b + i) for a, b, n in rows for i in range(n)]


@given(st.lists(extents, max_size=12))
def test_a_region_can_be_registered_only_if_no_byte_of_it_is_registered(
    regions: list[tuple[int, int]],
) -> None:
    table, taken = RegionTable(), set[int]()
    for address, nbytes in regions:
        mine = set(range(address, address + nbytes))
        if mine & taken:
            with pytest.raises(RegionError, match="overlaps"):
                table.add(region(address, nbytes))
        else:
            table.add(region(address, nbytes))
            taken |= mine
    assert taken == {a + i for a, n in table.spans() for i in range(n)}
    for address, nbytes in table.spans():
        table.remove(region(address, nbytes))
    assert table.spans() == []


@given(st.lists(extents, max_size=6), extents)
def test_a_piece_is_inside_if_one_region_contains_all_its_bytes(
    regions: list[tuple[int, int]], piece: tuple[int, int]
) -> None:
    table = RegionTable()
    for address, nbytes in regions:
        try:
            table.add(region(address, nbytes))
        except RegionError:
            continue
    spans = table.spans()
    inside = any(a <= piece[0] and piece[0] + piece[1] <= a + n for a, n in spans)
    addresses, sizes = np.array([piece[0]], np.uint64), np.array([piece[1]], np.uint64)
    if inside:
        check_inside(addresses, sizes, spans, "here")
    else:
        with pytest.raises(RegionError, match="inside here"):
            check_inside(addresses, sizes, spans, "here")


def test_only_an_added_region_can_be_removed() -> None:
    table = RegionTable()
    table.add(region(100, 10))
    for wrong in (region(100, 9), region(101, 10), region(99, 10)):
        with pytest.raises(RegionError, match="not registered"):
            table.remove(wrong)
    assert table.spans() == [(100, 10)]


@pytest.mark.parametrize(
    ("address", "nbytes"), [(1, 0), (1, -5), (0, 8), (-8, 4), ((1 << 63) - 4, 8)]
)
def test_an_impossible_region_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(RegionError):
        RegionTable().add(region(address, nbytes))


@given(pieces)
def test_joining_pieces_moves_the_same_bytes_to_the_same_places(
    rows: list[tuple[int, int, int]],
) -> None:
    before = columns(rows)
    after = merge_adjacent(*before)
    assert bytes_of(*after) == bytes_of(*before)
    ends = after[0] + after[2], after[1] + after[2]
    joinable = (ends[0][:-1] == after[0][1:]) & (ends[1][:-1] == after[1][1:])
    assert not joinable.any()


@given(pieces, st.integers(1, 50))
def test_cutting_pieces_moves_the_same_bytes_in_pieces_of_at_most_the_limit(
    rows: list[tuple[int, int, int]], limit: int
) -> None:
    before = columns(rows)
    after = split_pieces(*before, limit)
    assert bytes_of(*after) == bytes_of(*before)
    assert (after[2] <= limit).all()
    assert (after[2] >= 1).all()


@given(st.lists(st.integers(1, 40)), st.integers(1, 5), st.integers(1, 100))
def test_every_piece_is_in_one_call_and_calls_are_filled_to_the_limits(
    sizes: list[int], max_pieces: int, max_nbytes: int
) -> None:
    parts = list(calls(np.array(sizes, np.uint64), max_pieces=max_pieces, max_nbytes=max_nbytes))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(sizes)))
    for part in parts:
        carried = sizes[part]
        assert len(carried) == 1 or (len(carried) <= max_pieces and sum(carried) <= max_nbytes)
        if part.stop < len(sizes):
            more = sum(carried) + sizes[part.stop]
            assert len(carried) == max_pieces or more > max_nbytes


def test_pieces_near_a_multiple_of_the_limit_are_cut_correctly() -> None:
    for nbytes, expected in (
        (9, [9]),
        (10, [10]),
        (11, [10, 1]),
        (20, [10, 10]),
        (21, [10, 10, 1]),
    ):
        cut = split_pieces(*columns([(0, 0, nbytes)]), 10)
        assert cut[2].tolist() == expected


# Name one seam twice.
@example([(0, 0, 2)], [], [1, 1])
@given(pieces, st.lists(st.integers(0, 400), unique=True), st.lists(st.integers(0, 400)))
def test_pieces_cut_at_seams_move_the_same_bytes_and_cross_none(
    rows: list[tuple[int, int, int]], here: list[int], there: list[int]
) -> None:
    before = columns(rows)
    local, remote, nbytes = cut_at_edges(before, local=here, remote=there)
    assert bytes_of(local, remote, nbytes) == bytes_of(*before)
    for addresses, edges in ((local, here), (remote, there)):
        for edge in edges:
            assert not ((addresses < edge) & (edge < addresses + nbytes)).any()
    assert (nbytes >= 1).all()
    seams = len(set(here)) + len(set(there))
    assert len(nbytes) <= len(rows) * (1 + seams)


def test_seams_are_at_multiples_of_the_step_inside_the_region() -> None:
    assert edges_of(100, 30, 0) == []
    assert edges_of(100, 30, 30) == []
    assert edges_of(100, 30, 10) == [110, 120]
    assert edges_of(100, 31, 10) == [110, 120, 130]
