"""How far rollouts may run ahead of the trainer. Pure: no clock, no I/O.

Admission follows AReaL: at version v no more than (max_staleness + v + 1) batches may
have been accepted or be running. That alone does not bound the age of a sample, because
a slow rollout is overtaken by updates while it runs; so age is checked again when a
sample is consumed, token by token, and `OnStale` says what becomes of one that is too old. And the count starts at the version that the process
started with, and never lets more than max_staleness + 1 batches wait unconsumed, so a
recovered controller does not find capacity that was used up before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.config import check_numbers, take_name
from windlass.errors import RolloutError

_UNBOUNDED = 1 << 40


class OnStale(StrEnum):
    """What becomes of an answer whose oldest token is more than `max_staleness` versions old.

    TRAIN: it is handed out all the same; its versions per token say how old it is (AReaL does this).
    RESUBMIT: it is thrown away and made again, `max_resubmits` times at most, then dropped.
    DROP: the rollout ends with an error, and its whole group with it.
    """

    TRAIN = "train"
    RESUBMIT = "resubmit"
    DROP = "drop"


@dataclass(slots=True)
class StalenessPolicy:
    """Counts rollouts and says how many more may start.

    Attributes:
        max_staleness: how many versions older than the consumer's the oldest token may be.
        batch_size: samples (not groups) that one version consumes.
        max_concurrent: samples that run at a time.
        start_version: version at which the counts are zero.
        version: the consumer's.
        on_stale: what becomes of an answer that is too old. max_resubmits: how often one rollout is
            made again for that, with `OnStale.RESUBMIT`.
        running: admitted, not ended. accepted: ended with tokens. consumed: of those, handed out.
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
        """Go on with the counts of an earlier process; only of a policy that was never used.

        What was consumed and not acknowledged counts as waiting again, so that there may be
        more ahead than the bound allows; nothing is admitted until it has been consumed.

        Raises:
            RolloutError: counts that no sequence of events leads to, or a policy in use.
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
        """Only concurrency is limited: evaluation, load tests."""
        return cls(max_staleness=_UNBOUNDED, batch_size=1, max_concurrent=max_concurrent)

    def capacity(self) -> int:
        """How many samples may be admitted now; never negative."""
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
        """Whether a sample with these token versions may not be consumed any more."""
        if self.on_stale is OnStale.TRAIN or not versions:
            return False
        return self.version - min(versions) > self.max_staleness

    def makes_again(self, num_resubmits: int) -> bool:
        """Whether a sample that is too old is made once more after so many times."""
        return self.on_stale is OnStale.RESUBMIT and num_resubmits < self.max_resubmits

    def set_version(self, version: int) -> None:
        """The consumer holds `version` now; older ones are ignored."""
        self.version = max(self.version, version)

    def admit(self) -> None:
        """One sample starts.

        Raises:
            RolloutError: there is no capacity.
        """
        if self.capacity() < 1:
            raise RolloutError("staleness: admit needs capacity >= 1, got 0")
        self.running += 1

    def accept(self) -> None:
        """A running sample ended with tokens."""
        self.release()
        self.accepted += 1

    def release(self) -> None:
        """A running sample ended without tokens that can be used.

        Raises:
            RolloutError: nothing is running.
        """
        if self.running < 1:
            raise RolloutError("staleness: release needs running >= 1, got 0")
        self.running -= 1

    def discard(self) -> None:
        """An accepted, unconsumed sample will never be consumed (it grew stale, or was cancelled).

        Raises:
            RolloutError: nothing is waiting.
        """
        if self.accepted <= self.consumed:
            raise RolloutError("staleness: discard needs an accepted, unconsumed sample, got none")
        self.accepted -= 1

    def consume(self, num_samples: int) -> None:
        """Accepted samples were handed to the consumer.

        Raises:
            RolloutError: fewer are waiting.
        """
        waiting = self.accepted - self.consumed
        if not 0 <= num_samples <= waiting:
            raise RolloutError(f"staleness: consume needs 0 <= n <= {waiting}, got {num_samples}")
        self.consumed += num_samples

    def give_back(self, num_samples: int) -> None:
        """Consumed samples were of no use: the consumer's version needs others in their place.

        Raises:
            RolloutError: fewer were consumed.
        """
        if not 0 <= num_samples <= self.consumed:
            raise RolloutError(
                f"staleness: give_back needs 0 <= n <= {self.consumed}, got {num_samples}"
            )
        self.consumed -= num_samples
        self.accepted -= num_samples
