"""Metrics of the samples of a step."""

from __future__ import annotations

import statistics

from windlass.jobs.results import sample_metrics
from windlass.rollout import TrainingSample


def sample(reward: float, *, num_generated: int, finish_reason: str) -> TrainingSample:
    """Return a sample with two tokens that no engine has generated."""
    return TrainingSample(
        prompt_ids=(1,),
        output_ids=(7,) * (num_generated + 2),
        logprobs=(-0.5,) * num_generated + (0.0, 0.0),
        versions=(3,) * num_generated + (-1, -1),
        reward=reward,
        group_id=0,
        engine="e",
        finish_reason=finish_reason,
    )


def test_metrics_of_samples_count_groups_tokens_and_answers_that_were_cut_off() -> None:
    mixed = [
        sample(1.0, num_generated=4, finish_reason="stop"),
        sample(0.0, num_generated=6, finish_reason="length"),
        sample(0.5, num_generated=2, finish_reason="length"),
    ]
    equal = [sample(0.25, num_generated=8, finish_reason="stop")] * 2
    assert sample_metrics([mixed, equal]) == {
        "reward": (1.5 + 0.5) / 5,
        "reward_std": statistics.pstdev([1.0, 0.0, 0.5]) / 2,
        "equal_rewards": 0.5,
        "answer_tokens": (4 + 6 + 2 + 8 + 8) / 5,
        "cut_off": 2 / 5,
    }


def test_a_step_without_samples_has_metrics() -> None:
    assert set(sample_metrics([()]).values()) == {0.0}
