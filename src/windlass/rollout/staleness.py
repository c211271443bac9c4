"""Bounds on how far rollouts run ahead of the trainer, computed without a clock or I/O.

Admission follows AReaL: at version v (counted from `start_version`), at most max_staleness + v + 1 batches may be
running or accepted. A second bound allows at most max_staleness + 1 batches that are running or wait for the trainer.
Without the second bound, a restarted controller without its old counts would admit more than 50 batches at once if the
engines serve version 50.

The first bound assumes one batch for each version. A trainer that restarts from a checkpoint publishes a version without
a batch, so the caller must start the count again (`count_from`). Otherwise each such version raises the first bound by
one batch too many. This additional batch waits for two steps, and is then too old.

These bounds do not limit the age of a sample, because the version may rise several times while a slow rollout runs.
Therefore the controller checks a sample's oldest token again before it delivers the sample, and `OnStale` decides what
happens to a sample that is too old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.config import check_numbers, take_name
from windlass.errors import RolloutError

_UNBOUNDED = 1 << 40
"""Value of `max_staleness` that no rollout reaches."""


class OnStale(StrEnum):
    """Treatment of an answer whose oldest token is more than `max_staleness` versions old.

    TRAIN: deliver the answer anyway, as AReaL does; the versions of its tokens show its age.
    RESUBMIT: discard the answer and generate another one. After `max_resubmits` such repetitions, act as for DROP.
    DROP: end the rollout and its whole group with an error.
    """

    TRAIN = "train"
    RESUBMIT = "resubmit"
    DROP = "drop"


@dataclass(slots=True)
class StalenessPolicy:
    """Counts of samples, and the number of samples that may start now.

    Attributes:
        max_staleness: largest allowed difference between the trainer's version and the version of a sample's
            oldest token.
        batch_size: number of samples (not groups) in one training batch.
        max_concurrent: largest number of samples that run at a time.
        start_version: version from which the first bound counts batches.
        version: version of the trainer.
        on_stale: treatment of an answer that is too old.
        max_resubmits: with `OnStale.RESUBMIT`, largest number of times that one rollout is generated again.
        running: samples that were admitted and have not ended.
        accepted: samples that ended with tokens.
        consumed: accepted samples that were delivered to the trainer.
        start_consumed: value of `consumed` at the last call of `count_from`; 0 before the first call.
    """

    max_staleness: int
    batch_size: int
    max_concurrent: int
    start_version: int = 0
    version: int = -1
    running: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    consumed: int = field(default=0, init=False)
    start_consumed: int = field(default=0, init=False)
    on_stale: OnStale = OnStale.RESUBMIT
    max_resubmits: int = 3

    def __post_init__(self) -> None:
        least = {"max_staleness": 0, "batch_size": 1, "max_concurrent": 1, "max_resubmits": 0}
        check_numbers(self, least)
        self.on_stale = take_name("StalenessPolicy: on_stale", self.on_stale, OnStale)
        self.version = max(self.version, self.start_version)

    def restore(
        self, *, start_version: int, version: int, running: int, accepted: int, consumed: int
    ) -> None:
        """Continue with the counts of an earlier process. The policy must be unused.

        If the trainer did not acknowledge a delivered group, the group counts as accepted but not as consumed, because
        the controller delivers it again. More samples may then wait than the bound allows; `capacity` stays 0 until the
        trainer has consumed enough of them.

        Raises:
            RolloutError: a count is negative, `consumed` exceeds `accepted`, or the policy has counted samples.
        """
        if self.running or self.accepted or self.consumed:
            raise RolloutError("staleness: restore needs a policy that was never used")
        if running < 0 or not 0 <= consumed <= accepted:
            raise RolloutError(
                "staleness: restore needs running >= 0 and 0 <= consumed <= accepted, got "
                f"{running}, {consumed}, {accepted}"
            )
        self.start_version = start_version
        self.version = max(self.version, version, start_version)
        self.running, self.accepted, self.consumed = running, accepted, consumed

    @classmethod
    def unbounded(cls, max_concurrent: int) -> StalenessPolicy:
        """Return a policy that limits only concurrency, for evaluation and load tests."""
        return cls(max_staleness=_UNBOUNDED, batch_size=1, max_concurrent=max_concurrent)

    def capacity(self) -> int:
        """Return the number of samples that may be admitted now; never negative."""
        return max(0, min(self.max_concurrent - self.running, self._room()))

    @property
    def is_full(self) -> bool:
        """True if no sample may be admitted before the trainer consumes samples or publishes a version."""
        return self._room() < 1

    def _room(self) -> int:
        """Return the number of samples that both bounds admit; negative if there are more samples than the bounds allow."""
        num_batches = self.max_staleness + self.version - self.start_version + 1
        by_version = self.start_consumed + num_batches * self.batch_size
        ahead = self.accepted - self.consumed + self.running
        return min(
            by_version - (self.accepted + self.running),
            (self.max_staleness + 1) * self.batch_size - ahead,
        )

    def throws_away(self, versions: Sequence[int]) -> bool:
        """Return True if a sample with these token versions is too old. Return False if `on_stale` is TRAIN."""
        if self.on_stale is OnStale.TRAIN or not versions:
            return False
        return self.version - min(versions) > self.max_staleness

    def makes_again(self, num_resubmits: int) -> bool:
        """Return whether a sample that is too old may be resubmitted after `num_resubmits` earlier resubmissions."""
        return self.on_stale is OnStale.RESUBMIT and num_resubmits < self.max_resubmits

    def set_version(self, version: int) -> None:
        """Set the trainer's version; a version below the current one is ignored."""
        self.version = max(self.version, version)

    def count_from(self, version: int) -> None:
        """Count batches from `version`, because the trainer publishes `version` without a training step.

        Until the version rises, the policy admits at most `max_staleness` + 1 batches beyond the samples consumed so
        far.
        """
        self.start_version, self.start_consumed = version, self.consumed

    def admit(self) -> None:
        """Count one more running sample.

        Raises:
            RolloutError: the capacity is 0.
        """
        if self.capacity() < 1:
            raise RolloutError("staleness: admit needs capacity >= 1, got 0")
        self.running += 1

    def keep_place(self) -> None:
        """Count a sample as running in place of a discarded answer, whatever the capacity is."""
        self.running += 1

    def accept(self) -> None:
        """Count a sample that has ended successfully: it is accepted, and runs no longer."""
        self.release()
        self.accepted += 1

    def release(self) -> None:
        """Stop counting a sample as running, because it has ended or waits again.

        Raises:
            RolloutError: no sample is running.
        """
        if self.running < 1:
            raise RolloutError("staleness: release needs running >= 1, got 0")
        self.running -= 1

    def discard(self) -> None:
        """Remove an accepted sample from the counts, because it became too old or was cancelled before delivery.

        Raises:
            RolloutError: no accepted sample waits for delivery.
        """
        if self.accepted <= self.consumed:
            raise RolloutError("staleness: discard needs an accepted, unconsumed sample, got none")
        self.accepted -= 1

    def consume(self, num_samples: int) -> None:
        """Count `num_samples` accepted samples as delivered to the trainer.

        Raises:
            RolloutError: fewer than `num_samples` accepted samples wait for delivery.
        """
        waiting = self.accepted - self.consumed
        if not 0 <= num_samples <= waiting:
            raise RolloutError(f"consume: num_samples must be in [0, {waiting}], got {num_samples}")
        self.consumed += num_samples

    def deliver_again(self, num_samples: int) -> None:
        """Count delivered samples as waiting for another delivery.

        More samples may then wait than the bound allows; `capacity` stays 0 until the trainer has consumed enough of them.

        Raises:
            RolloutError: fewer than `num_samples` were delivered.
        """
        self._take_back("deliver_again", num_samples)

    def give_back(self, num_samples: int) -> None:
        """Remove delivered samples from the counts, because the trainer could not use them. New samples may then start.

        Raises:
            RolloutError: fewer than `num_samples` were delivered.
        """
        self._take_back("give_back", num_samples)
        self.accepted -= num_samples

    def _take_back(self, method: str, num_samples: int) -> None:
        """Count delivered samples as not consumed. If there are fewer, raise RolloutError with the name of the method."""
        if not 0 <= num_samples <= self.consumed:
            raise RolloutError(
                f"{method}: num_samples must be in [0, {self.consumed}], got {num_samples}"
            )
        self.consumed -= num_samples
        self.start_consumed = min(self.start_consumed, self.consumed)
