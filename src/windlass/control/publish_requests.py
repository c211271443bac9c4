"""Publish requests of the trainer ranks, and the reports that answered them.

A lost connection can lose a report, so a trainer rank repeats its request after it has connected again. A repetition
has the attempt number of the first request. If the update of this request has begun, the repetition never begins
another round, because the rank may change its weights once it has the report. The rank gets the stored report instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import msgspec

from windlass.control.binding import Binding
from windlass.control.changes import Changes
from windlass.control.connect_messages import Identity
from windlass.control.fleet import Fleet
from windlass.control.report import UpdateReport
from windlass.errors import RoundAborted
from windlass.wording import counted, listed

_log = logging.getLogger(__name__)

KEPT_REPORTS = 1024
"""Number of newest update reports that a coordinator keeps."""
NAME_MISSING_S = 15.0
"""Seconds between the log lines that name the trainer ranks that a publish waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPublish:
    """Request of a trainer rank, which keeps its weights unchanged until it receives the report.

    Attributes:
        trainer: the rank that requests the publish.
        version: the version that it announced.
        attempt: attempt number of its announcement; 0 if the controller's own process requests the update.
    """

    trainer: Identity
    version: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class CalledUpdate:
    """Update that the controller's own process requested.

    Attributes:
        copied: set when trainer ranks begin to write. From then on, ranks that send from replicas do not read their
            weights any more.
        report: task that returns the report of the update.
    """

    copied: asyncio.Event
    report: asyncio.Task[UpdateReport]


def check_same_version(announced: Collection[PendingPublish]) -> None:
    """Check that all trainer ranks announced the same version.

    Raises:
        RoundAborted: the ranks announced different versions.
    """
    versions = {rank.trainer[0]: rank.version for rank in announced}
    if len(set(versions.values())) > 1:
        raise RoundAborted(f"trainer ranks announced different versions: {versions}")


def check_same_ranks(announced: Collection[PendingPublish], binding: Binding) -> None:
    """Check that the trainer processes in `binding` are exactly the processes in `announced`.

    Raises:
        RoundAborted: a trainer rank left or connected after the announcements, and before the fleet was bound.
    """
    moved = {rank.trainer for rank in announced} - binding.signature
    if moved:
        changed = f"{listed(sorted(name for name, _ in moved))} left or connected again"
    elif len(announced) != len(binding.trainers):
        changed = f"{counted(len(announced), 'rank')} announced, and the job has {len(binding.trainers)} now"
    else:
        return
    raise RoundAborted(
        f"the trainer ranks changed after they announced the version: {changed}; publish again"
    )


async def until_connected(
    fleet: Fleet, changes: Changes, version: int, deadline_s: float
) -> tuple[PendingPublish, ...]:
    """Wait until all trainer ranks are connected; return one request for `version` per rank.

    Raises:
        PeerTimeout: a rank is not connected after `deadline_s`; the message names the missing ranks.
    """

    def ranks() -> tuple[PendingPublish, ...]:
        trainers = fleet.trainers()
        if trainers is None or not trainers.complete:
            return ()
        agents = trainers.agents.values()
        return tuple(PendingPublish(trainer=a.identity, version=version) for a in agents)

    await changes.until(
        lambda: bool(ranks()),
        deadline_s,
        lambda: (
            f"publish: all trainer ranks must be connected within {deadline_s} s, missing: "
            f"{listed(fleet.away()) or 'all'}"
        ),
    )
    return ranks()


@dataclass(slots=True)
class _Request:
    pending: PendingPublish
    has_begun: bool = False
    report: UpdateReport | None = None


@final
class PublishRequests:
    """Newest request of every trainer rank."""

    def __init__(self) -> None:
        self._newest: dict[str, _Request] = {}
        self._waiting: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Number of ranks that wait for their update to begin."""
        return len(self._waiting)

    def receive(self, pending: PendingPublish) -> UpdateReport | None:
        """Record an announcement as the newest request of its rank.

        If the update of the rank's newest request has begun, record `pending` only if it is a newer attempt or comes from
        a new process of the rank.

        Returns:
            Report to send to the rank if `pending` repeats a request whose update has ended; otherwise None.
        """
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
        """Drop the newest request of a rank that has lost its connection, unless the update of this request has begun.

        The rank announces its version again when it connects again.
        """
        if (known := self._newest.get(worker)) is not None and not known.has_begun:
            del self._newest[worker]
            self._waiting.discard(worker)

    def give_up(self, worker: str, attempt: int) -> PendingPublish | None:
        """Drop the request of a rank that sent `Withdraw`.

        The rank sends this message when its trainer no longer waits for the report of the update.

        Args:
            worker: name of the rank.
            attempt: attempt number of the withdrawn request.

        Returns:
            The dropped request. None if nothing was dropped: the rank has no request, the update of its request has
            begun, or the rank has made a newer request.
        """
        known = self._newest.get(worker)
        if known is None or known.pending.attempt > attempt or known.has_begun:
            return None
        self.withdraw(worker)
        return known.pending

    def is_waiting(self, worker: str) -> bool:
        """Return whether a rank waits for its update to begin."""
        return worker in self._waiting

    def pop_all(self, workers: Collection[str]) -> tuple[PendingPublish, ...]:
        """Return the newest requests of all `workers`, and mark them as begun.

        If one of these ranks has no request, or the update of its request has begun, return () and mark nothing.
        """
        found = [self._newest[worker] for worker in workers if worker in self._newest]
        if len(found) < len(workers) or any(request.has_begun for request in found):
            return ()
        for request in found:
            request.has_begun = True
        self._waiting.difference_update(workers)
        return tuple(request.pending for request in found)

    def answer(self, pending: PendingPublish, report: UpdateReport) -> UpdateReport:
        """Return a copy of `report` for the rank that requested the update. Keep the copy in case the rank asks again.

        The copy has the version and the attempt number of `pending`. The copy is not kept if the rank has made a newer
        request.
        """
        answer = msgspec.structs.replace(report, version=pending.version, attempt=pending.attempt)
        known = self._newest.get(pending.trainer[0])
        if known is not None and known.pending == pending:
            known.report = answer
        return answer


@final
class MissingRanks:
    """Trainer ranks that a publish waits for. While other ranks wait for these, the log names them.

    Args:
        fleet: connected ranks.
        requests: requests of the trainer ranks.
    """

    def __init__(self, fleet: Fleet, requests: PublishRequests) -> None:
        self._fleet, self._requests = fleet, requests
        self._timer: asyncio.TimerHandle | None = None

    def text(self) -> str:
        """Return a text that names the ranks that are not connected or have not announced; empty if no rank is missing."""
        trainers = self._fleet.trainers()
        workers = () if trainers is None else trainers.workers
        idle = [worker for worker in workers if not self._requests.is_waiting(worker)]
        reasons = ((self._fleet.away(), "not connected"), (idle, "has not called publish"))
        return "; ".join(f"{listed(names)} ({reason})" for names, reason in reasons if names)

    def name_later(self) -> None:
        """Start to log the missing ranks every `NAME_MISSING_S` seconds, as long as a rank waits. Idempotent."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NAME_MISSING_S, self._name)

    def stop(self) -> None:
        """Stop the log lines of `name_later`, until it is called again. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _name(self) -> None:
        self._timer = None
        if self._requests.num_waiting:
            if missing := self.text():
                _log.warning("publish waits for %s", missing)
            self.name_later()
