"""The facts in a rollout controller's journal, and the state that they add up to. Pure.

Any prefix of a journal is a state in which the staleness bound holds, because facts stand in
the order in which they became true: so a file that lost its end to a power cut is an older
state, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from windlass.rollout.messages import RolloutOutcome, Work

__all__ = [
    "Accepted",
    "Attempted",
    "Ended",
    "Entry",
    "Resubmitted",
    "PersistedState",
    "PersistedTask",
    "Started",
    "Submitted",
    "VersionReached",
]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A process took over; what it knows of the past beside the tasks that follow.

    Attributes:
        identity: of the controller, the same in every process; workers know it by this.
        run: how many processes there were before.
        start_version, version, consumed: of the staleness policy.
    """

    identity: str
    run: int
    start_version: int
    version: int
    consumed: int


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """Tasks that differ in nothing but their id; `group_id` is -1 for one alone."""

    task_ids: tuple[str, ...]
    group_id: int
    work: Work
    metadata: bytes


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """A worker was given it. `num_dispatches`: how often one was. Counts as running from here on.

    `resubmits` and `oldest_version` are those of `table.Record`.
    """

    task_id: str
    attempt: int
    num_dispatches: int
    engine: str
    worker: str
    failures: int = 0
    rejections: int = 0
    resubmits: int = 0
    oldest_version: int | None = None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """It has an outcome."""

    outcome: RolloutOutcome


class Resubmitted(msgspec.Struct, frozen=True, tag="resubmitted"):
    """It waits for admission again, without an outcome."""

    task_id: str
    rejections: int
    resubmits: int = 0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Nothing more is owed. `num_consumed`: how many of them were consumed, not given up.

    Below 0: so many of those that ended earlier were handed back by the owner.
    """

    task_ids: tuple[str, ...]
    num_consumed: int = 0


class VersionReached(msgspec.Struct, frozen=True, tag="version"):
    """The consumer holds `version`."""

    version: int


Entry = Started | Submitted | Attempted | Accepted | Resubmitted | Ended | VersionReached


@dataclass(slots=True, eq=False)
class PersistedTask:
    """One task that has not ended: submitted, at a worker, or with an outcome."""

    task_id: str
    submission: Submitted
    attempt: Attempted | None = None
    running: bool = False
    outcome: RolloutOutcome | None = None


@dataclass(slots=True)
class PersistedState:
    """What a journal adds up to; see `Started` for the first five."""

    identity: str
    run: int = 0
    start_version: int = 0
    version: int = -1
    consumed: int = 0
    tasks: dict[str, PersistedTask] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> PersistedState | None:
        """The state after these entries; None for none. Ids that are not known are ignored."""
        persisted: PersistedState | None = None
        for entry in entries:
            if isinstance(entry, Started):
                tasks = {} if persisted is None else persisted.tasks
                persisted = cls(**msgspec.structs.asdict(entry), tasks=tasks)
            elif persisted is not None:
                persisted._apply(entry)
        if persisted is not None:
            persisted._drop_broken_groups()
        return persisted

    def _apply(
        self, entry: Submitted | Attempted | Accepted | Resubmitted | Ended | VersionReached
    ) -> None:
        match entry:
            case Submitted():
                self.tasks.update({t: PersistedTask(t, entry) for t in entry.task_ids})
            case Attempted() | Resubmitted():
                self._move(self.tasks.get(entry.task_id), entry)
            case Accepted():
                self._move(self.tasks.get(entry.outcome.task_id), entry)
            case Ended():
                for task_id in entry.task_ids:
                    self.tasks.pop(task_id, None)
                self.consumed += entry.num_consumed
            case VersionReached():
                self.version = max(self.version, entry.version)
            case _:
                assert_never(entry)

    @staticmethod
    def _move(task: PersistedTask | None, entry: Attempted | Accepted | Resubmitted) -> None:
        if task is None:
            return
        task.running = isinstance(entry, Attempted)
        task.outcome = entry.outcome if isinstance(entry, Accepted) else None
        if isinstance(entry, Attempted):
            task.attempt = entry
        elif isinstance(entry, Resubmitted) and task.attempt is not None:
            task.attempt = msgspec.structs.replace(
                task.attempt, rejections=entry.rejections, resubmits=entry.resubmits
            )

    def _drop_broken_groups(self) -> None:
        """A group of which some samples were given up was given up as a whole."""
        for task in list(self.tasks.values()):
            if any(other not in self.tasks for other in task.submission.task_ids):
                self.tasks.pop(task.task_id, None)

    def submissions(self) -> Iterator[Submitted]:
        """Of the tasks that have not ended, each once, in order."""
        for task in self.tasks.values():
            if task.task_id == task.submission.task_ids[0]:
                yield task.submission

    def entries(self) -> Iterator[Entry]:
        """The shortest journal that adds up to this."""
        yield Started(
            identity=self.identity,
            run=self.run,
            start_version=self.start_version,
            version=self.version,
            consumed=self.consumed,
        )
        yield from self.submissions()
        for task in self.tasks.values():
            if task.attempt is not None:
                yield task.attempt
                if not task.running and task.outcome is None:
                    yield Resubmitted(task.task_id, task.attempt.rejections, task.attempt.resubmits)
            if task.outcome is not None:
                yield Accepted(task.outcome)
