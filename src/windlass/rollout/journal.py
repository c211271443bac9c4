"""Journal of a rollout controller for a restart after a crash, one JSON line per state transition.

One write contains all transitions of an iteration of the event loop. The controller writes the journal before
it sends tasks to a worker, acknowledges outcomes, or delivers a group. So if the process is killed, its journal
contains all transitions that another process knows of. A thread syncs the file to disk every `journal_sync_s`
seconds; a power cut can lose lines that were written since the last sync.

Lines are in the order of the transitions. Any prefix of the file describes a valid older state, in which the
staleness bound holds. A controller can therefore continue from a file without its last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, assert_never, final

import msgspec

from windlass.control.changes import Changes
from windlass.errors import ConfigError, RolloutError
from windlass.net.journal_file import JournalFile
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import RolloutOutcome, Work
from windlass.rollout.table import GroupSize, Record
from windlass.rollout.values import encode_value

logger = logging.getLogger(__name__)
RECHECK_PATH_S = 0.05
"""Seconds between two checks that the path still names the open file. A check before each write would be slow:
a check takes longer than a write, and each rollout causes four writes."""
WRITE_AGAIN_S = 1.0
"""Seconds between a failed write and the next try. The journal tries periodically, because no event signals that
a full disk has room again."""


class Started(msgspec.Struct, kw_only=True, tag="started"):
    """First entry of a file: the counts when the file was begun. Later entries of the file change these counts.

    Attributes:
        identity: random id of the controller. A restarted controller keeps the id, so that workers recognise the
            controller.
        run: number of controller processes that used this journal earlier.
        start_version, version, consumed: see `StalenessPolicy`.
        num_groups: number of groups that were submitted earlier.
    """

    identity: str
    run: int = 0
    start_version: int = 0
    version: int = -1
    consumed: int = 0
    num_groups: int = 0


class Submitted(msgspec.Struct, frozen=True, tag="submitted", omit_defaults=True):
    """Submission of a group of rollouts with the same work, or of a single rollout with a `group_id` of -1.

    Attributes:
        task_ids: id of each rollout.
        num_wanted, min_samples: see `table.Group`; 0 for the number of `task_ids`.
    """

    task_ids: tuple[str, ...]
    group_id: int
    work: Work
    metadata: bytes
    num_wanted: int = 0
    min_samples: int = 0

    @property
    def size(self) -> GroupSize:
        """Numbers of samples of the group, with the defaults filled in; see `GroupSize`."""
        num_rollouts = len(self.task_ids)
        return GroupSize(
            num_rollouts, self.num_wanted or num_rollouts, self.min_samples or num_rollouts
        )


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """Assignment of an attempt to a worker, after which the rollout counts as running. For attributes see `table.Record`."""

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
    """Accepted outcome of an attempt."""

    outcome: RolloutOutcome


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """Delivery of a group that the caller has not acknowledged yet."""

    task_ids: tuple[str, ...]


class Resubmitted(msgspec.Struct, frozen=True, tag="resubmitted"):
    """Return of a rollout to the admission queue. An outcome of the rollout is discarded."""

    task_id: str
    rejections: int
    resubmits: int = 0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """End of rollouts.

    Attributes:
        num_consumed: number to add to `Started.consumed`; negative if the caller declined or returned rollouts
            that an earlier entry had counted as consumed.
    """

    task_ids: tuple[str, ...]
    num_consumed: int = 0


class VersionReached(msgspec.Struct, frozen=True, tag="version"):
    """New version of the trainer."""

    version: int


Entry = (
    Started | Submitted | Attempted | Accepted | Delivered | Resubmitted | Ended | VersionReached
)


@dataclass(slots=True, eq=False)
class PersistedTask:
    """One rollout that has not ended: the rollout waits, runs at a worker, or has an outcome.

    Attributes:
        delivery: place of the first delivery of the rollout's group among all deliveries, from 1. 0 if the outcome was
            not delivered.
    """

    task_id: str
    submission: Submitted
    attempt: Attempted | None = None
    running: bool = False
    outcome: RolloutOutcome | None = None
    delivery: int = 0


@dataclass(slots=True)
class PersistedState:
    """State at the end of a journal.

    Attributes:
        started: first entry of the file, with counts that include all later entries.
        tasks: task id -> rollout that has not ended.
        num_deliveries: number of `Delivered` entries.
    """

    started: Started
    tasks: dict[str, PersistedTask] = field(default_factory=dict)
    num_deliveries: int = 0

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> PersistedState | None:
        """Return the state after these entries; None if no entry is a `Started`. Ignore entries of unknown rollouts."""
        persisted: PersistedState | None = None
        for entry in entries:
            if isinstance(entry, Started):
                known = cls(entry) if persisted is None else persisted
                persisted = cls(entry, known.tasks, known.num_deliveries)
            elif persisted is not None:
                persisted._apply(entry)
        if persisted is not None:
            persisted._drop_broken_groups()
        return persisted

    def _apply(
        self,
        entry: Submitted | Attempted | Accepted | Delivered | Resubmitted | Ended | VersionReached,
    ) -> None:
        """Update this state with the change that an entry records."""
        match entry:
            case Submitted():
                self.tasks.update({t: PersistedTask(t, entry) for t in entry.task_ids})
                self.started.num_groups += entry.group_id >= 0
            case Attempted() | Resubmitted():
                self._move(self.tasks.get(entry.task_id), entry)
            case Accepted():
                self._move(self.tasks.get(entry.outcome.task_id), entry)
            case Delivered():
                self.num_deliveries += 1
                group = [self.tasks[each] for each in entry.task_ids if each in self.tasks]
                number = max([0, *(task.delivery for task in group)]) or self.num_deliveries
                for task in group:
                    task.delivery = number
            case Ended():
                for task_id in entry.task_ids:
                    self.tasks.pop(task_id, None)
                self.started.consumed += entry.num_consumed
            case VersionReached():
                self.started.version = max(self.started.version, entry.version)
            case _:
                assert_never(entry)

    def _move(self, task: PersistedTask | None, entry: Attempted | Accepted | Resubmitted) -> None:
        """Record that a rollout runs, has an outcome, or waits again. Do nothing for an unknown rollout (None)."""
        if task is None:
            return
        task.delivery = 0
        task.running = isinstance(entry, Attempted)
        task.outcome = entry.outcome if isinstance(entry, Accepted) else None
        if isinstance(entry, Attempted):
            task.attempt = entry
        elif isinstance(entry, Resubmitted) and task.attempt is not None:
            task.attempt = msgspec.structs.replace(
                task.attempt, rejections=entry.rejections, resubmits=entry.resubmits
            )

    def delivery_of(self, submitted: Submitted) -> int:
        """Return `PersistedTask.delivery` of a submission's group; 0 if the group was not delivered."""
        return max([self.tasks[task_id].delivery for task_id in self._left(submitted)])

    def _drop_broken_groups(self) -> None:
        """Drop the rollouts of each group that cannot be delivered: fewer than its `min_samples` rollouts are left."""
        for task in list(self.tasks.values()):
            submitted = task.submission
            if len(self._left(submitted)) < submitted.size.min_samples:
                for task_id in submitted.task_ids:
                    self.tasks.pop(task_id, None)

    def _left(self, submitted: Submitted) -> tuple[str, ...]:
        """Return the ids of a submission's rollouts that have not ended."""
        return tuple([task_id for task_id in submitted.task_ids if task_id in self.tasks])

    def submissions(self) -> Iterator[Submitted]:
        """Yield each submission with rollouts that have not ended, in the order of the submissions."""
        for task in self.tasks.values():
            if task.task_id == self._left(task.submission)[0]:
                yield task.submission

    def entries(self) -> Iterator[Entry]:
        """Yield the smallest number of entries that describe this state."""
        left = list(self.submissions())
        # When a process reads these entries, it adds one group per `Submitted`. So `num_groups` must not include these
        # groups.
        num_left = sum(submitted.group_id >= 0 for submitted in left)
        yield msgspec.structs.replace(self.started, num_groups=self.started.num_groups - num_left)
        for submitted in left:
            yield submitted
            # Name ended rollouts instead of leaving them out: the seed of a rollout depends on its place in the group.
            ended = tuple([each for each in submitted.task_ids if each not in self.tasks])
            if ended:
                yield Ended(ended)
        for task in self.tasks.values():
            if task.attempt is not None:
                yield task.attempt
                if not task.running and task.outcome is None:
                    yield Resubmitted(task.task_id, task.attempt.rejections, task.attempt.resubmits)
            if task.outcome is not None:
                yield Accepted(task.outcome)
        for submitted in sorted(left, key=self.delivery_of):
            if self.delivery_of(submitted):
                ids = self._left(submitted)
                yield Delivered(tuple([each for each in ids if self.tasks[each].delivery]))


@final
class RolloutJournal:
    """Append-only journal file. Without `config.journal`, all methods do nothing. Use it in one event loop.

    After a failed write or sync, the journal repeats the write or sync until it succeeds. Until then, the controller
    must not accept, deliver or acknowledge results: a restarted controller would not know of these results, and would
    count the same rollouts twice.

    Args:
        config: limits. The journal creates the folder of `config.journal`. It rewrites the file if the file has
            more than `journal_compact_nbytes` bytes and is twice as long as after the last rewrite.

    Attributes:
        on: whether there is a journal file.
        keep_delivered: whether delivered results stay in the file until the caller acknowledges them.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.on, self.keep_delivered = config.journal is not None, config.acknowledge
        self._path = None if config.journal is None else Path(config.journal)
        self._config = config
        self._file: JournalFile[Entry] | None = None
        self._added: list[bytes] = []
        self._flush_scheduled = False
        self._write_fault = self._sync_fault = ""
        self._changes = Changes()
        self._unacknowledged: dict[str, tuple[str, ...]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.upkeep: asyncio.Task[None] | None = None
        """Running sync or compaction of the file, or None."""
        self._has_unsynced = False

    def open(self, start_version: int) -> PersistedState:
        """Return the state that an earlier process left in the file, and rewrite the file with this state only.

        Args:
            start_version: `start_version` of the returned state if the journal is empty.

        Raises:
            ConfigError: the file cannot be used, or another process uses it.
        """
        started = Started(identity=uuid.uuid4().hex[:12], start_version=start_version)
        fresh = PersistedState(started)
        if self._path is None:
            return fresh
        # `JournalFile` accepts a union of types, but for the type checker a union is not a `type`.
        entry: Any = Entry
        compact_nbytes = self._config.journal_compact_nbytes
        file = self._file = JournalFile(self._path, entry, compact_nbytes=compact_nbytes)
        try:
            persisted = PersistedState.of(file.found)
            file.found = []
            if persisted is not None:
                persisted.started.run += 1
            # Write the new `run` before the first attempt. Otherwise the next process would use the same task ids.
            file.rewrite((persisted or fresh).entries())
        except OSError as error:
            file.close()
            raise ConfigError(f"journal {self._path}: cannot be used: {error}") from error
        return persisted or fresh

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop when a write or sync fails, and when it succeeds again."""
        self._changes.subscribe(listener)

    @property
    def broken(self) -> str:
        """Reason why the last write or sync failed; empty if it succeeded."""
        return self._write_fault or self._sync_fault

    def check(self) -> None:
        """Check that entries can be added.

        Raises:
            RolloutError: the last write or sync failed, or the journal is not open.
        """
        if self.broken:
            raise RolloutError(f"journal {self._path}: {self.broken}")
        if self.on and self._file is None:
            raise RolloutError(f"journal {self._path}: is not open; open the controller first")

    # --- transitions -------------------------------------------------------------------------

    def submitted(
        self,
        task_ids: Sequence[str],
        group_id: int,
        work: Work,
        metadata: object,
        size: GroupSize,
    ) -> None:
        """Record the submission of a group or of a single rollout. `group_id` is -1 for a single rollout.

        Raises:
            ConfigError: the metadata is not msgpack-plain.
            RolloutError: the last write or sync failed.
        """
        if self.on:
            self.check()
            encoded = encode_value("journal: metadata", metadata)
            wanted, least = size.num_wanted, size.min_samples
            if least == size.num_rollouts:
                # Use the defaults of `Submitted`, so that the line is shorter.
                wanted = least = 0
            self.add(Submitted(tuple(task_ids), group_id, work, encoded, wanted, least))

    def attempted(self, record: Record) -> None:
        """Record the last attempt of a rollout, and the rollout's number of failures."""
        if self.on:
            self.add(msgspec.convert(record, Attempted, from_attributes=True))

    def deliver(self, groups: Sequence[Sequence[str]]) -> None:
        """Write that the controller delivers these groups of task ids. Call this before the delivery.

        Raises:
            RolloutError: the file cannot be written. A later write does not add these deliveries.
        """
        self.flush()
        for task_ids in groups:
            self.delivered(task_ids)
        try:
            self.flush()
        except RolloutError:
            # Remove the entries, because the caller does not get the groups. Add an entry without effect: the journal counts
            # as usable again only after it has written an entry.
            self._added.clear()
            self.add(Ended(()))
            for task_id in chain.from_iterable(groups):
                self._unacknowledged.pop(task_id, None)
            raise

    def delivered(self, task_ids: Sequence[str]) -> None:
        """Record that the controller delivered these rollouts together: a whole group, or a single rollout.

        With `keep_delivered`, the rollouts stay in the file until `acknowledged` or `declined`.
        """
        if not self.on:
            return
        together = tuple(task_ids)
        if self.keep_delivered:
            self._unacknowledged.update(dict.fromkeys(together, together))
            self.add(Delivered(together))
        else:
            self.add(Ended(together, num_consumed=len(together)))

    def acknowledged(self, task_id: str) -> bool:
        """Record that the caller has stored the delivered group that contains this rollout. Idempotent.

        Return False if this process did not deliver the rollout, or expects no acknowledgement of the rollout.
        """
        together = self._unacknowledged.pop(task_id, ())
        if together:
            for other in together:
                self._unacknowledged.pop(other, None)
            self.add(Ended(together, num_consumed=len(together)))
        return bool(together)

    def returned(self, task_ids: Sequence[str]) -> None:
        """Record that the caller returned a delivered group. The group then does not count as consumed.

        With `keep_delivered`, write no entry: the file still contains the group, and does not count it as consumed.
        """
        if not self.on:
            return
        owed = [self._unacknowledged.pop(task_id, ()) for task_id in task_ids]
        if not any(owed):
            self.add(Ended((), num_consumed=-len(task_ids)))

    def declined(self, task_ids: Sequence[str]) -> None:
        """Record that the caller declined delivered rollouts. They then do not count as consumed."""
        if not self.on:
            return
        owed = [self._unacknowledged.pop(task_id, ()) for task_id in task_ids]
        if any(owed):
            self.add(Ended(tuple(task_ids)))
        else:
            self.add(Ended((), num_consumed=-len(task_ids)))

    # --- the file ----------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Add an entry. The next `flush` writes it, at the latest in the event loop's next iteration."""
        if self._file is None:
            return
        self._added.append(self._file.encode(entry))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_later)

    def _flush_later(self) -> None:
        """Write all added entries. If this fails, `flush` schedules the next attempt."""
        self._flush_scheduled = False
        # A caller that needs the journal gets the error from `check`.
        with contextlib.suppress(RolloutError):
            self.flush()

    def flush(self) -> None:
        """Write all added entries to the file, so that they are not lost if this process is killed.

        Raises:
            RolloutError: the file cannot be written.
        """
        if self._file is None or not self._added:
            return
        try:
            self._file.write(self._added, recheck_path_s=RECHECK_PATH_S)
        except OSError as error:
            was_broken, self._write_fault = self._write_fault, f"cannot be written: {error}"
            self._note_fault(was_broken, self._write_fault)
            if not self._flush_scheduled:
                self._flush_scheduled = True
                asyncio.get_running_loop().call_later(WRITE_AGAIN_S, self._flush_later)
            raise RolloutError(f"journal {self._path}: {self.broken}") from error
        self._added.clear()
        was_broken, self._write_fault = self._write_fault, ""
        self._note_fault(was_broken, "")
        self._has_unsynced = True
        self._schedule_upkeep()

    def _note_fault(self, before: str, now: str) -> None:
        """If a fault has begun or ended, log this and call the listeners.

        `before` and `now` are the texts of the earlier and of the current fault; empty for no fault.
        """
        if bool(before) == bool(now):
            return
        if now:
            logger.critical("journal %s: %s", self._path, now)
        else:
            logger.warning("journal %s: can be written again", self._path)
        self._changes.notify()

    def _schedule_upkeep(self) -> None:
        """Schedule a sync after `journal_sync_s`. Do nothing if all lines are synced, or a sync is running or scheduled."""
        if self._has_unsynced and self._timer is None and self.upkeep is None and self._file:
            self._timer = asyncio.get_running_loop().call_later(
                self._config.journal_sync_s, self._begin_upkeep
            )

    def _begin_upkeep(self) -> None:
        """Start `_keep_up` as the task `upkeep`."""
        self._timer = None
        self.upkeep = asyncio.create_task(self._keep_up(), name="rollout-journal")
        self.upkeep.add_done_callback(self._upkeep_ended)

    def _upkeep_ended(self, task: asyncio.Task[None]) -> None:
        """Log an unexpected error of `_keep_up`, and schedule the next sync if there are unsynced lines."""
        self.upkeep = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("journal %s: upkeep failed: %s", self._path, error)
        self._schedule_upkeep()

    async def _keep_up(self) -> None:
        """Sync the file to disk in a thread, and rewrite the file if it is too long or an earlier sync failed."""
        file = self._file
        if file is None:
            return
        # A line that is written during this sync sets the flag again, so that another sync follows.
        self._has_unsynced = False
        was_broken, fault = self._sync_fault, ""
        try:
            if not file.is_doubtful:
                await asyncio.to_thread(file.sync)
            if file.is_long or file.is_doubtful:
                upto = file.nbytes
                await asyncio.to_thread(file.write_replacement, _entries_of_state(file, upto))
                file.replace(upto)
                await asyncio.to_thread(file.sync)
        except OSError as error:
            if not file.is_doubtful:
                raise
            self._has_unsynced, fault = True, f"cannot be synced to disk: {error}"
        self._sync_fault = fault
        self._note_fault(was_broken, fault)

    async def close(self) -> None:
        """Write the entries that are not written yet, sync the file to disk and close it. Idempotent.

        Raises:
            OSError: the file cannot be written or synced.
        """
        if self.upkeep is not None:
            await asyncio.gather(self.upkeep, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        file, self._file = self._file, None
        if file is not None:
            try:
                if self._added:
                    file.write(self._added)
                if file.is_doubtful:
                    await asyncio.to_thread(file.rewrite, [*_entries_of_state(file, file.nbytes)])
                elif self._added or self._has_unsynced:
                    await asyncio.to_thread(file.sync)
            finally:
                file.close()


def _entries_of_state(file: JournalFile[Entry], upto_nbytes: int) -> Iterator[Entry]:
    """Yield the smallest number of entries that restore the state in the first `upto_nbytes` of the file."""
    persisted = PersistedState.of(file.read(upto_nbytes))
    if persisted is not None:
        yield from persisted.entries()
