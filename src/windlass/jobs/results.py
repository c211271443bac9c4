"""Results that a job passes to its recipe and writes to its output folder."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from windlass.control.report import RoundOutcome
from windlass.rollout.messages import TrainingSample
from windlass.rollout.rewards import RewardCounts


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one training step.

    Attributes:
        step: number of the step.
        ranks: metrics of every rank, in rank order.
        metrics: name of a metric -> mean over the ranks; a rank's weight is its number of samples.
    """

    step: int
    ranks: tuple[Mapping[str, float], ...]
    metrics: Mapping[str, float]


def sample_metrics(groups: Collection[Sequence[TrainingSample]]) -> dict[str, float]:
    """Return metrics of the samples of a step, by name. Without samples, all are 0.

    reward: mean reward.
    reward_std: standard deviation of the rewards within a group, as a mean over the groups.
    equal_rewards: share of the groups in which all rewards are equal. With most estimators of advantages, such a group
        does not change the weights.
    answer_tokens: mean number of generated tokens.
    cut_off: share of the samples whose last answer ended because it reached the maximum number of tokens.
    """
    rewards = [[sample.reward for sample in group] for group in groups if group]
    samples = [sample for group in groups for sample in group]
    num_groups, num_samples = max(len(rewards), 1), max(len(samples), 1)
    num_generated = sum(version >= 0 for sample in samples for version in sample.versions)
    return {
        "reward": sum(map(sum, rewards)) / num_samples,
        "reward_std": sum(map(statistics.pstdev, rewards)) / num_groups,
        "equal_rewards": sum(min(group) == max(group) for group in rewards) / num_groups,
        "answer_tokens": num_generated / num_samples,
        "cut_off": sum(sample.finish_reason == "length" for sample in samples) / num_samples,
    }


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job, as it is written to `summary.json`.

    Attributes:
        steps: number of steps that the weights were trained. It includes the steps of the checkpoint from which the job
            started, and excludes steps that were lost when ranks restarted.
        version: version that was published last; -1 for none.
        trainer_restarts: number of restarts of the trainer ranks.
        stopped_by: number of the signal that ended the job; 0 for none.
        outcomes: outcomes of the newest 1024 rounds (weight updates), oldest first.
        rollouts: counts of rollouts at the end, before the job cancelled outstanding rollouts.
        rewards: counts of scored and unscored rollouts, with reasons; None without `[rewards]` in the job.
    """

    steps: int
    version: int
    trainer_restarts: int
    stopped_by: int
    outcomes: tuple[RoundOutcome, ...]
    rollouts: dict[str, int]
    rewards: RewardCounts | None = None
