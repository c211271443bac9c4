"""Advantages equal the published formulas, evaluated sample by sample and token by token in plain Python."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from windlass.training import (
    generalized_advantages,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    whitened,
)

GROUPS = torch.tensor([7, 7, 3, 7, 3, 9, 3, 3])
"""Group of each sample: of 3, of 4, and of one sample, mixed."""
REWARDS = torch.tensor([0.5, -1.25, 2.0, 3.75, 0.125, 1.5, -0.75, 4.5], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.float64)
"""Tokens that the model generated. The zeros in the middle are tokens of a tool, and those at the end are padding."""


def of_tokens(first: float) -> torch.Tensor:
    """Return distinct values (3, 5), also where the mask is 0."""
    return torch.sin(torch.arange(15, dtype=torch.float64).reshape(3, 5) * 0.7 + first)


def members() -> dict[int, list[float]]:
    found = defaultdict(list)
    for group, reward in zip(GROUPS.tolist(), REWARDS.tolist(), strict=True):
        found[group].append(reward)
    return found


@pytest.mark.parametrize("scale", [True, False])
def test_group_relative_advantages_are_those_of_grpo(scale: bool) -> None:
    expected = []
    for group, reward in zip(GROUPS.tolist(), REWARDS.tolist(), strict=True):
        rewards = members()[group]
        centred = reward - statistics.mean(rewards)
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        expected.append(centred / (deviation + 1e-4) if scale else centred)
    found = group_relative(REWARDS, GROUPS, scale=scale)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert expected[5] == 0.0


def test_leave_one_out_advantages_subtract_the_mean_of_the_others() -> None:
    expected = []
    for group, reward in zip(GROUPS.tolist(), REWARDS.tolist(), strict=True):
        others = list(members()[group])
        others.remove(reward)
        expected.append(reward - statistics.mean(others) if others else 0.0)
    assert leave_one_out(REWARDS, GROUPS).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.8, 0.0)])
def test_generalized_advantages_are_the_sums_of_discounted_errors(gamma: float, lam: float) -> None:
    rewards, values = of_tokens(0.1), of_tokens(2.3)
    advantages, returns = generalized_advantages(rewards, values, MASK, gamma=gamma, lam=lam)
    for row in range(3):
        # GAE of the sequence that has only the generated tokens.
        own = [token for token in range(5) if MASK[row, token]]
        value = [*values[row, own].tolist(), 0.0]
        delta = [
            float(rewards[row, token]) + gamma * value[n + 1] - value[n]
            for n, token in enumerate(own)
        ]
        for n, token in enumerate(own):
            expected = sum(
                (gamma * lam) ** (later - n) * delta[later] for later in range(n, len(own))
            )
            assert float(advantages[row, token]) == pytest.approx(expected, rel=1e-12)
            assert float(returns[row, token]) == pytest.approx(expected + value[n], rel=1e-12)
    assert not (advantages * (1 - MASK)).any()
    assert not (returns * (1 - MASK)).any()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_normalises_returns_over_all_tokens(gamma: float) -> None:
    rewards = of_tokens(0.4)
    returns = {}
    for row in range(3):
        own = [token for token in range(5) if MASK[row, token]]
        for n, token in enumerate(own):
            returns[row, token] = sum(
                gamma ** (later - n) * float(rewards[row, own[later]])
                for later in range(n, len(own))
            )
    mean, deviation = statistics.mean(returns.values()), statistics.stdev(returns.values())
    found = reinforce_plus_plus(rewards, MASK, gamma=gamma)
    for (row, token), value in returns.items():
        assert float(found[row, token]) == pytest.approx((value - mean) / deviation, rel=1e-6)
    assert not (found * (1 - MASK)).any()


def test_whitening_over_ranks_equals_whitening_of_all_samples() -> None:
    values = of_tokens(1.1)
    expected = whitened(values, MASK)
    parts = [values[:1], values[1:]], [MASK[:1], MASK[1:]]
    # Sums of both parts: of the counts and totals first, then of the squares around the common mean.
    mean = (values * MASK).sum() / MASK.sum()
    sums = [
        torch.stack([MASK.sum(), (values * MASK).sum()]),
        (((values - mean) * MASK) ** 2).sum(),
    ]
    for part, mask in zip(*parts, strict=True):
        answers = iter(sums)

        def total(_: torch.Tensor, left: Iterator[torch.Tensor] = answers) -> torch.Tensor:
            return next(left)

        found = whitened(part, mask, sum_over_ranks=total)
        row = 0 if len(part) == 1 else 1
        assert torch.allclose(found, expected[row : row + len(part)], rtol=1e-12)
    generated = expected[MASK.bool()]
    assert math.isclose(float(generated.mean()), 0.0, abs_tol=1e-12)
    assert math.isclose(float(generated.std()), 1.0, rel_tol=1e-6)
