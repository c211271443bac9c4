"""Journal of a rollout controller for a restart after a crash, one JSON line per transition.

Every transition is added when it happens. All transitions of one turn of the event loop are written in one
call: before a worker receives anything, before an outcome is acknowledged to a worker, and before a group is
delivered to the owner. So a killed process has told no peer anything that its journal does not contain. A
thread syncs the file to disk every `journal_sync_s` seconds; a power cut can lose newer lines.

Lines are in the order of their transitions, and the staleness bound holds in the state that results from any
prefix of the file: a file that lost its end to a power cut is a valid older state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never, final

import msgspec

from windlass.control.changes import Changes
from windlass.errors import ConfigError, RolloutError
from windlass.net.journal_file import JournalFile
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import RolloutOutcome, Work
from windlass.rollout.table import Record
from windlass.rollout.workflows import encode_value

logger = logging.getLogger(__name__)
RECHECK_PATH_S = 0.05
"""Seconds between checks of the file's path: a check takes longer than a write, and each completion writes four
times."""
WRITE_AGAIN_S = 1.0
"""Seconds from a failed write to the next try: no event signals that a disk has room again."""


class Started(msgspec.Struct, kw_only=True, tag="started"):
    """Start of a process: the state that the earlier processes left. The task records that follow add to it.

    Attributes:
        identity: identity of the controller, the same in every process; workers recognise it.
        run: number of earlier processes.
        start_version, version, consumed: counts of the staleness policy.
    """

    identity: str
    run: int = 0
    start_version: int = 0
    version: int = -1
    consumed: int = 0


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """Submission of tasks that differ only in their ids; `group_id` is -1 for a single one."""

    task_ids: tuple[str, ...]
    group_id: int
    work: Work
    metadata: bytes


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """Assignment of an attempt to a worker. It counts as running from here on. Attributes as in `table.Record`."""

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
    """Outcome of an attempt."""

    outcome: RolloutOutcome


class Resubmitted(msgspec.Struct, frozen=True, tag="resubmitted"):
    """Move of a task without an outcome back to the admission queue."""

    task_id: str
    rejections: int
    resubmits: int = 0


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """End of tasks. `num_consumed` is the number of these tasks that were consumed.

    A negative number -n means that the owner declined n tasks that had ended before.
    """

    task_ids: tuple[str, ...]
    num_consumed: int = 0


class VersionReached(msgspec.Struct, frozen=True, tag="version"):
    """The consumer's new version."""

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
    """State after reading a journal: its start record, brought up to date, and the tasks that have not ended."""

    started: Started
    tasks: dict[str, PersistedTask] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> PersistedState | None:
        """Return the state after these entries; None for no entries. Unknown ids are ignored."""
        persisted: PersistedState | None = None
        for entry in entries:
            if isinstance(entry, Started):
                persisted = cls(entry, {} if persisted is None else persisted.tasks)
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
                self.started.consumed += entry.num_consumed
            case VersionReached():
                self.started.version = max(self.started.version, entry.version)
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
        """Drop the rest of each group that has lost a task: a group is given up as a whole."""
        for task in list(self.tasks.values()):
            if any(other not in self.tasks for other in task.submission.task_ids):
                self.tasks.pop(task.task_id, None)

    def submissions(self) -> Iterator[Submitted]:
        """Yield the submissions of the tasks that have not ended, each once, in order."""
        for task in self.tasks.values():
            if task.task_id == task.submission.task_ids[0]:
                yield task.submission

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the shortest journal with this state."""
        yield self.started
        yield from self.submissions()
        for task in self.tasks.values():
            if task.attempt is not None:
                yield task.attempt
                if not task.running and task.outcome is None:
                    yield Resubmitted(task.task_id, task.attempt.rejections, task.attempt.resubmits)
            if task.outcome is not None:
                yield Accepted(task.outcome)


@final
class RolloutJournal:
    """Append-only journal; without a path every call does nothing. Used in one event loop.

    Entries that cannot be written, or synced to disk, are kept and tried again. Until then, the controller accepts,
    delivers and acknowledges nothing, because a successor could count it twice.

    Args:
        config: names the file, whose folder is created. A power cut loses at most the last `journal_sync_s`
            seconds, if the disk keeps up. A file above `journal_compact_nbytes` is rewritten once it has also
            doubled since the last rewrite.
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
        self._upkeep: asyncio.Task[None] | None = None
        self._has_unsynced = False

    def open(self, start_version: int) -> PersistedState:
        """Read the state that an earlier process left, and record the start of this one.

        Args:
            start_version: version of the staleness policy for an empty journal.

        Raises:
            ConfigError: the file cannot be used, or another process uses it.
        """
        started = Started(identity=uuid.uuid4().hex[:12], start_version=start_version)
        fresh = PersistedState(started)
        if self._path is None:
            return fresh
        # `JournalFile` also takes a union, which is no `type` for the type checker.
        entry: Any = Entry
        compact_nbytes = self._config.journal_compact_nbytes
        file = self._file = JournalFile(self._path, entry, compact_nbytes=compact_nbytes)
        try:
            persisted = PersistedState.of(file.found)
            file.found = []
            if persisted is not None:
                persisted.started.run += 1
            # On disk before the first attempt: a later process would otherwise use this one's ids again.
            file.rewrite((persisted or fresh).entries())
        except OSError as error:
            file.close()
            raise ConfigError(f"journal {self._path}: cannot be used: {error}") from error
        return persisted or fresh

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop when writing has failed, and when it succeeds again."""
        self._changes.subscribe(listener)

    @property
    def broken(self) -> str:
        """Reason why writing or syncing failed; nothing may start until this is empty again."""
        return self._write_fault or self._sync_fault

    def check(self) -> None:
        """Refuse work that cannot be recorded.

        Raises:
            RolloutError: writing fails, or the journal is not open.
        """
        if self.broken:
            raise RolloutError(f"journal {self._path}: {self.broken}")
        if self.on and self._file is None:
            raise RolloutError(f"journal {self._path}: must be open, the controller is not")

    # --- transitions -------------------------------------------------------------------------

    def submitted(
        self, task_ids: Sequence[str], group_id: int, work: Work, metadata: object
    ) -> None:
        """Record new tasks of the same work that wait for admission; `group_id` is -1 for a single one.

        Raises:
            ConfigError: the metadata is not msgpack-plain.
            RolloutError: writing fails.
        """
        if self.on:
            self.check()
            encoded = encode_value("journal: metadata", metadata)
            self.add(Submitted(tuple(task_ids), group_id, work, encoded))

    def attempted(self, record: Record) -> None:
        """Record an attempt that is about to be sent to a worker."""
        if self.on:
            self.add(msgspec.convert(record, Attempted, from_attributes=True))

    def delivered(self, task_ids: Sequence[str]) -> None:
        """Record tasks that were delivered to the owner together."""
        if not self.on:
            return
        if self.keep_delivered:
            together = tuple(task_ids)
            self._unacknowledged.update(dict.fromkeys(together, together))
        else:
            self.add(Ended(tuple(task_ids), num_consumed=len(task_ids)))

    def acknowledged(self, task_id: str) -> bool:
        """Record that the owner has stored a task; return whether an acknowledgement was due. Idempotent."""
        together = self._unacknowledged.pop(task_id, ())
        if together:
            for other in together:
                self._unacknowledged.pop(other, None)
            self.add(Ended(together, num_consumed=len(together)))
        return bool(together)

    def declined(self, task_ids: Sequence[str]) -> None:
        """Record delivered tasks that the owner declined: they were not consumed."""
        if not self.on:
            return
        owed = [self._unacknowledged.pop(task_id, ()) for task_id in task_ids]
        if any(owed):
            self.add(Ended(tuple(task_ids)))
        else:
            self.add(Ended((), num_consumed=-len(task_ids)))

    # --- the file ----------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Add an entry, to be written in this turn of the loop."""
        if self._file is None:
            return
        self._added.append(self._file.encode(entry))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._flush_scheduled = False
        # A caller that needs the journal gets the error from `check`.
        with contextlib.suppress(RolloutError):
            self.flush()

    def flush(self) -> None:
        """Write all added entries, so that they survive the end of this process.

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
        """Log the beginning or the end of a fault, and call the listeners."""
        if bool(before) == bool(now):
            return
        if now:
            logger.critical("journal %s: %s", self._path, now)
        else:
            logger.warning("journal %s: is written again", self._path)
        self._changes.notify()

    def _schedule_upkeep(self) -> None:
        if self._has_unsynced and self._timer is None and self._upkeep is None and self._file:
            self._timer = asyncio.get_running_loop().call_later(
                self._config.journal_sync_s, self._begin_upkeep
            )

    def _begin_upkeep(self) -> None:
        self._timer = None
        self._upkeep = asyncio.create_task(self._keep_up(), name="rollout-journal")
        self._upkeep.add_done_callback(self._upkeep_ended)

    def _upkeep_ended(self, task: asyncio.Task[None]) -> None:
        self._upkeep = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("journal %s: upkeep failed: %s", self._path, error)
        self._schedule_upkeep()

    async def _keep_up(self) -> None:
        """Sync the file to disk outside the loop, and rewrite it if it has grown."""
        file = self._file
        if file is None:
            return
        # Lines that the loop writes while the thread syncs are for the next time.
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
        except (OSError, ConfigError) as error:
            if not file.is_doubtful:
                raise
            self._has_unsynced, fault = True, f"cannot be synced to disk: {error}"
        self._sync_fault = fault
        self._note_fault(was_broken, fault)

    async def close(self) -> None:
        """Write added entries to disk; outstanding tasks stay for the next process. Idempotent."""
        if self._upkeep is not None:
            await asyncio.gather(self._upkeep, return_exceptions=True)
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
    """Yield entries of the same state as the first `upto_nbytes` of the file, without those of ended tasks."""
    persisted = PersistedState.of(file.read(upto_nbytes))
    if persisted is not None:
        yield from persisted.entries()
