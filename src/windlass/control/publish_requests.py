"""Which trainer ranks wait for a publish, of which version, and what they were told.

Requests are repeated after a reconnection, and reports may get lost with a connection.
The attempt number makes both harmless: a repeated attempt gets its report again, and no
announcement outlives the attempt that it belongs to, or a round could begin while one rank
already changes its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import msgspec

from windlass.control.connect_messages import Identity
from windlass.control.report import UpdateReport

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


@dataclass(frozen=True, slots=True)
class CalledUpdate:
    """A version that the controller's own process publishes.

    Attributes:
        copied: set once no trainer rank reads its weights any more, where all send from replicas.
        report: how it ended.
    """

    copied: asyncio.Event
    report: asyncio.Task[UpdateReport]


@dataclass(slots=True)
class _Request:
    pending: PendingPublish
    has_begun: bool = False
    report: UpdateReport | None = None


@final
class PublishRequests:
    """The newest request of every trainer rank."""

    def __init__(self) -> None:
        self._newest: dict[str, _Request] = {}
        self._waiting: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Ranks that stand still, and whose update has not begun."""
        return len(self._waiting)

    def receive(self, pending: PendingPublish) -> UpdateReport | None:
        """Note an announcement; the report that it already has, if it is a repetition."""
        worker = pending.trainer[0]
        known = self._newest.get(worker)
        if known is not None and known.has_begun and known.pending.trainer == pending.trainer:
            if pending.attempt == known.pending.attempt:
                return known.report
            if pending.attempt < known.pending.attempt:
                return None
        self._newest[worker] = _Request(pending)
        self._waiting.add(worker)
        return None

    def withdraw(self, worker: str) -> None:
        """The connection is lost; the rank announces again when it is back."""
        if (known := self._newest.get(worker)) is not None and not known.has_begun:
            del self._newest[worker]
            self._waiting.discard(worker)

    def give_up(self, worker: str, attempt: int) -> PendingPublish | None:
        """Forget the request of a rank whose caller waits no longer.

        Returns:
            The request; None if its update has begun, or if the rank has made another one.
        """
        known = self._newest.get(worker)
        if known is None or known.pending.attempt > attempt or known.has_begun:
            return None
        self.withdraw(worker)
        return known.pending

    def is_waiting(self, worker: str) -> bool:
        """Return whether a rank stands still and its update has not begun."""
        return worker in self._waiting

    def pop_all(self, workers: Collection[str]) -> tuple[PendingPublish, ...]:
        """All of them once every one of `workers` stands still, else none."""
        found = [self._newest[worker] for worker in workers if worker in self._newest]
        if len(found) < len(workers) or any(request.has_begun for request in found):
            return ()
        for request in found:
            request.has_begun = True
        self._waiting.difference_update(workers)
        return tuple(request.pending for request in found)

    def answer(self, pending: PendingPublish, report: UpdateReport) -> UpdateReport:
        """The attempt is over; returns the report as this rank is to get it."""
        answer = msgspec.structs.replace(report, version=pending.version, attempt=pending.attempt)
        known = self._newest.get(pending.trainer[0])
        if known is not None and known.pending == pending:
            known.report = answer
        return answer
