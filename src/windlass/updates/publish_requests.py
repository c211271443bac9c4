"""Which trainer ranks wait for a publish, of which version, and what they were told. No I/O.

PublishRequests are repeated after a reconnection, and reports may get lost with a connection.
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
from windlass.updates.messages import UpdateReport

__all__ = ["KEPT_REPORTS", "PendingPublish", "PublishRequests"]

KEPT_REPORTS = 1024
"""Reports of updates that a coordinator keeps: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPublish:
    """A rank whose weights stand still until it is told how the attempt ended.

    Attributes:
        attempt: of its announcement; 0 where the controller's own process asks for the update.
    """

    trainer: Identity
    version: int
    attempt: int = 0


@final
class PublishRequests:
    """Of all trainer ranks."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingPublish] = {}
        self._begun: dict[str, PendingPublish] = {}
        self._answered: dict[str, tuple[Identity, UpdateReport]] = {}

    def receive(self, pending: PendingPublish) -> UpdateReport | None:
        """Note an announcement; the report that it already has, if it is a repetition."""
        worker = pending.trainer[0]
        identity, report = self._answered.get(worker, (("", ""), None))
        if report is not None and identity == pending.trainer:
            if pending.attempt == report.attempt:
                return report
            if pending.attempt < report.attempt:
                return None
        begun = self._begun.get(worker)
        if begun is None or (begun.trainer, begun.attempt) != (pending.trainer, pending.attempt):
            self._waiting[worker] = pending
        return None

    def withdraw(self, worker: str) -> None:
        """The connection is lost; the rank announces again when it is back."""
        self._waiting.pop(worker, None)

    def give_up(self, worker: str, attempt: int) -> None:
        """The rank's caller waits no longer. Too late for a round that has begun."""
        pending = self._waiting.get(worker)
        if pending is not None and pending.attempt <= attempt:
            del self._waiting[worker]

    def pop_all(self, workers: Collection[str]) -> tuple[PendingPublish, ...]:
        """All of them once every one of `workers` stands still, else none."""
        if not workers or not set(workers) <= set(self._waiting):
            return ()
        begun = {worker: self._waiting.pop(worker) for worker in workers}
        self._begun.update(begun)
        return tuple(begun.values())

    def answer(self, pending: PendingPublish, report: UpdateReport) -> UpdateReport:
        """The attempt is over; returns the report as this rank is to get it."""
        worker = pending.trainer[0]
        answer = msgspec.structs.replace(report, version=pending.version, attempt=pending.attempt)
        if not pending.attempt:
            return answer
        self._answered[worker] = (pending.trainer, answer)
        if self._begun.get(worker) == pending:
            del self._begun[worker]
        return answer
