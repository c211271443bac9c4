"""Results that a job passes to its recipe and writes to its output folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from windlass.control.report import RoundOutcome
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
