"""Bounds on how far rollouts run ahead of the trainer. Pure: no clock, no I/O.

Admission follows AReaL: at version v at most (max_staleness + v + 1) batches may have been accepted or be
running. This alone does not bound the age of a sample, because updates overtake a slow rollout while it runs.
Therefore the age is checked again when a sample is consumed, token by token, and `OnStale` decides about a
sample that is too old. The count starts at the version that the process started with, and at most
max_staleness + 1 batches wait unconsumed, so that a recovered controller does not admit again the capacity
that was used before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.config import check_numbers, take_name
from windlass.errors import RolloutError

_UNBOUNDED = 1 << 40


class OnStale(StrEnum):
    """Treatment of an answer whose oldest token is more than `max_staleness` versions old.

    TRAIN: deliver it anyway; its versions per token show its age (as AReaL does).
    RESUBMIT: discard it and generate it again, `max_resubmits` times at most, then drop it.
    DROP: end the rollout, and its whole group, with an error.
    """

    TRAIN = "train"
    RESUBMIT = "resubmit"
    DROP = "drop"


@dataclass(slots=True)
class StalenessPolicy:
    """Counts of rollouts, and the number that may still start.

    Attributes:
        max_staleness: largest number of versions between the oldest token and the consumer.
        batch_size: samples (not groups) that one version consumes.
        max_concurrent: largest number of samples that run at a time.
        start_version: version at which the counts are zero.
        version: the consumer's version.
        on_stale: treatment of an answer that is too old.
        max_resubmits: number of times that one rollout is generated again, with `OnStale.RESUBMIT`.
        running: samples admitted and not ended.
        accepted: samples that ended with tokens.
        consumed: accepted samples that were delivered.
    """

    max_staleness: int
    batch_size: int
    max_concurrent: int
    start_version: int = 0
    version: int = -1
    running: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    consumed: int = field(default=0, init=False)
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
        """Continue with the counts of an earlier process; only for a policy that was never used.

        Samples that were consumed without an acknowledgement count as waiting again, so that more may be
        ahead than the bound allows; nothing is admitted until they have been consumed.

        Raises:
            RolloutError: the counts are impossible, or the policy is in use.
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
        by_version = (self.max_staleness + self.version - self.start_version + 1) * self.batch_size
        ahead = self.accepted - self.consumed + self.running
        return max(
            0,
            min(
                self.max_concurrent - self.running,
                by_version - (self.accepted + self.running),
                (self.max_staleness + 1) * self.batch_size - ahead,
            ),
        )

    def throws_away(self, versions: Sequence[int]) -> bool:
        """Return whether a sample with these token versions is too old to be consumed."""
        if self.on_stale is OnStale.TRAIN or not versions:
            return False
        return self.version - min(versions) > self.max_staleness

    def makes_again(self, num_resubmits: int) -> bool:
        """Return whether a sample that is too old is generated again after this number of resubmits."""
        return self.on_stale is OnStale.RESUBMIT and num_resubmits < self.max_resubmits

    def set_version(self, version: int) -> None:
        """Set the consumer's version; older versions are ignored."""
        self.version = max(self.version, version)

    def admit(self) -> None:
        """Count one sample that starts.

        Raises:
            RolloutError: the capacity is 0.
        """
        if self.capacity() < 1:
            raise RolloutError("staleness: admit needs capacity >= 1, got 0")
        self.running += 1

    def accept(self) -> None:
        """Count a running sample that ended with tokens."""
        self.release()
        self.accepted += 1

    def release(self) -> None:
        """Count a running sample that ended without usable tokens.

        Raises:
            RolloutError: no sample is running.
        """
        if self.running < 1:
            raise RolloutError("staleness: release needs running >= 1, got 0")
        self.running -= 1

    def discard(self) -> None:
        """Discard an accepted, unconsumed sample (it grew stale, or was cancelled).

        Raises:
            RolloutError: no sample is waiting.
        """
        if self.accepted <= self.consumed:
            raise RolloutError("staleness: discard needs an accepted, unconsumed sample, got none")
        self.accepted -= 1

    def consume(self, num_samples: int) -> None:
        """Count accepted samples that were delivered to the consumer.

        Raises:
            RolloutError: fewer samples are waiting.
        """
        waiting = self.accepted - self.consumed
        if not 0 <= num_samples <= waiting:
            raise RolloutError(f"staleness: consume needs 0 <= n <= {waiting}, got {num_samples}")
        self.consumed += num_samples

    def give_back(self, num_samples: int) -> None:
        """Take back consumed samples that were of no use: the consumer's version needs others instead.

        Raises:
            RolloutError: fewer samples were consumed.
        """
        if not 0 <= num_samples <= self.consumed:
            raise RolloutError(
                f"staleness: give_back needs 0 <= n <= {self.consumed}, got {num_samples}"
            )
        self.consumed -= num_samples
        self.accepted -= num_samples
