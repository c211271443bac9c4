"""Which trainer ranks stand still, with which version, and what they were told. No I/O.

Announcements are repeated after a reconnection, and reports may get lost with a connection.
The attempt number makes both harmless: a repeated attempt gets its report again, and no
announcement outlives the attempt that it belongs to, or a round could begin while one rank
already changes its weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import msgspec

from windlass.updates.fleet import Identity
from windlass.updates.messages import RoundOutcome, UpdateReport

__all__ = ["Announcements", "Standing", "given_up"]

KEPT_REPORTS = 1024
"""Reports of updates that a coordinator keeps: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rank that stands still until it is told how the attempt ended."""

    trainer: Identity
    version: int
    attempt: int


@final
class Announcements:
    """Of all trainer ranks."""

    def __init__(self) -> None:
        self._waiting: dict[str, Standing] = {}
        self._taken: dict[str, Standing] = {}
        self._answered: dict[str, tuple[Identity, UpdateReport]] = {}

    def receive(self, standing: Standing) -> UpdateReport | None:
        """Note an announcement; the report that it already has, if it is a repetition."""
        worker = standing.trainer[0]
        identity, report = self._answered.get(worker, (("", ""), None))
        if report is not None and identity == standing.trainer:
            if standing.attempt == report.attempt:
                return report
            if standing.attempt < report.attempt:
                return None
        taken = self._taken.get(worker)
        if taken is None or (taken.trainer, taken.attempt) != (standing.trainer, standing.attempt):
            self._waiting[worker] = standing
        return None

    def withdraw(self, worker: str) -> None:
        """The connection is lost; the rank announces again when it is back."""
        self._waiting.pop(worker, None)

    def give_up(self, worker: str, attempt: int) -> None:
        """The rank's caller waits no longer. Too late for a round that has begun."""
        standing = self._waiting.get(worker)
        if standing is not None and standing.attempt <= attempt:
            del self._waiting[worker]

    def take(self, workers: Collection[str]) -> tuple[Standing, ...]:
        """All of them once every one of `workers` stands still, else none."""
        if not workers or not set(workers) <= set(self._waiting):
            return ()
        taken = {worker: self._waiting.pop(worker) for worker in workers}
        self._taken.update(taken)
        return tuple(taken.values())

    def answer(self, standing: Standing, report: UpdateReport) -> UpdateReport:
        """The attempt is over; returns the report as this rank is to get it."""
        worker = standing.trainer[0]
        answer = msgspec.structs.replace(report, version=standing.version, attempt=standing.attempt)
        self._answered[worker] = (standing.trainer, answer)
        if self._taken.get(worker) == standing:
            del self._taken[worker]
        return answer


def given_up(version: int, reason: str) -> UpdateReport:
    """The report of a version for which no round was begun."""
    return UpdateReport(
        version=version,
        outcome=RoundOutcome.FAILED,
        reason=reason,
        engines=(),
        left_out={},
        nbytes=0,
        wire_s=0.0,
        update_s=0.0,
        pause_s=0.0,
        phase_s={},
        digest_ok=True,
    )
