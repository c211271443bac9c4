"""Properties of the account that limits the time for comparing replicas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.config import ControlConfig
from windlass.control.comparisons import Comparison, Comparisons
from windlass.errors import ConfigError

SECONDS = st.floats(1e-6, 1e3)
UPDATES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60)
"""Pairs of seconds: the comparison, and the rest of the update."""


def run(
    comparisons: Comparisons, updates: Sequence[tuple[float, float]], sources: str = "a"
) -> list[tuple[Comparison | None, float, float]]:
    """Publish the updates in order and return (decision, compare_s, update_s) of each."""
    done = []
    for version, (cost, rest) in enumerate(updates):
        decided = comparisons.begin(version, sources)
        spent = 0.0 if decided is None else cost
        comparisons.conclude(compare_s=spent, update_s=spent + rest, is_published=True)
        done.append((decided, spent, spent + rest))
    return done


@given(UPDATES, st.floats(0, 1, exclude_max=True))
def test_comparisons_spend_at_most_their_share(
    updates: list[tuple[float, float]], share: float
) -> None:
    done = run(Comparisons(share), updates)
    charged: list[float] = []
    took, excess = done[0][2], 0.0
    for decided, spent, update_s in done[1:]:
        took += update_s
        if decided is not None:
            excess = max(excess, spent - min(charged, default=0.0))
            charged.append(spent)
        assert sum(charged) <= share * took + excess + 1e-6 * took


@given(UPDATES, st.floats(0, 1))
def test_the_first_comparison_is_whole_and_turns_advance_with_each_comparison(
    updates: list[tuple[float, float]], share: float
) -> None:
    compared = [decided for decided, _, _ in run(Comparisons(share), updates) if decided]
    assert compared[0] == Comparison(0, is_first=True)
    assert compared[1:] == [Comparison(turn, is_first=False) for turn in range(1, len(compared))]


@given(SECONDS, SECONDS, st.floats(0.001, 1, exclude_max=True))
def test_equal_updates_compare_as_often_as_the_share_allows(
    cost: float, rest: float, share: float
) -> None:
    num = 400
    done = run(Comparisons(share), [(cost, rest)] * num)
    charged = sum(spent for _, spent, _ in done[1:])
    assert charged > 0
    allowed = share * sum(update_s for _, _, update_s in done)
    # Then some updates do not compare, and the time of at most two comparisons stays unused.
    if share * (cost + rest) < cost:
        assert charged >= allowed - 2 * cost - share * (cost + rest) - 1e-6 * allowed


@given(UPDATES)
def test_a_share_of_one_compares_in_every_update(updates: list[tuple[float, float]]) -> None:
    assert all(decided is not None for decided, _, _ in run(Comparisons(1.0), updates))


def test_a_share_of_zero_compares_only_twice() -> None:
    decided = [found for found, _, _ in run(Comparisons(0.0), [(0.5, 1.0)] * 50)]
    assert [found is not None for found in decided[:3]] == [True, True, False]
    assert not any(decided[2:])


def test_a_repeated_attempt_makes_the_comparison_of_the_first_attempt() -> None:
    comparisons = Comparisons(0.02)
    run(comparisons, [(1.0, 1.0), (1.0, 1.0)])
    for _ in range(3):
        assert comparisons.begin(7, "a") is None
        comparisons.conclude(compare_s=0.0, update_s=100.0, is_published=False)
    assert comparisons.begin(7, "b") == Comparison(2, is_first=True)


def test_the_version_after_a_disagreement_is_compared_at_any_cost() -> None:
    comparisons = Comparisons(0.02)
    run(comparisons, [(1.0, 1.0), (1e-3, 1.0)])
    found = comparisons.begin(5, "a")
    assert found == Comparison(2, is_first=False)
    comparisons.conclude(compare_s=50.0, update_s=50.0, is_published=False)
    for version in (6, 7):
        assert comparisons.begin(version, "a") == found
        comparisons.conclude(compare_s=50.0, update_s=50.0, is_published=False)
    assert comparisons.begin(8, "a") == found
    comparisons.conclude(compare_s=1.0, update_s=2.0, is_published=True)
    assert comparisons.begin(9, "a") is None


def test_an_unpublished_first_comparison_is_repeated() -> None:
    comparisons = Comparisons(0.02)
    for version in range(3):
        assert comparisons.begin(version, "a") == Comparison(0, is_first=True)
        comparisons.conclude(compare_s=1.0, update_s=1.0, is_published=False)


def test_new_trainers_start_with_a_first_comparison() -> None:
    comparisons = Comparisons(0.02)
    run(comparisons, [(1.0, 1.0)] * 3)
    again = run(comparisons, [(1.0, 1.0)] * 3, "b")
    assert [found and found.is_first for found, _, _ in again] == [True, False, None]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), "half"])
def test_an_invalid_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="compare_share must be"):
        ControlConfig(compare_share=share)
