"""What a rollout controller needs to know after a crash, one JSON line per fact.

Every transition is added when it happens and written in one call per turn of the event loop:
before a worker is sent anything, before an outcome is acknowledged to a worker, and before a
group is handed to the owner. So a process that is killed has told nobody anything that its
journal does not say. A thread brings the file to disk every `journal_sync_s` seconds; a power
cut can lose what is younger.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from windlass.errors import ConfigError, RolloutError
from windlass.net.line_file import LineFile
from windlass.rollout.messages import RolloutOutcome, Work
from windlass.rollout.persisted import (
    Accepted,
    Attempted,
    Ended,
    Entry,
    PersistedState,
    Resubmitted,
    Submitted,
    VersionReached,
)
from windlass.rollout.table import Record
from windlass.rollout.workflows import encode_value

__all__ = ["RolloutJournal"]

logger = logging.getLogger(__name__)


@final
class RolloutJournal:
    """Append-only; without a path every call does nothing. Used in one event loop.

    Args:
        path: of the file; its folder is made.
        keep_delivered: what was handed out stays until `acknowledged`.
        sync_s: a power cut loses at most what is younger, if the disk keeps up.
        compact_nbytes: a larger file is written anew without what has ended, once it has
            also doubled since the last time.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        keep_delivered: bool = False,
        sync_s: float = 1.0,
        compact_nbytes: int = 64 << 20,
    ) -> None:
        self.on = path is not None
        self.keep_delivered = self.on and keep_delivered
        self._path = None if path is None else Path(path)
        self._sync_s, self._compact_nbytes = sync_s, compact_nbytes
        self._file: LineFile[Entry] | None = None
        self._flush_scheduled = False
        self._broken = ""
        self._when_broken: list[Callable[[], None]] = []
        self._unacknowledged: dict[str, tuple[str, ...]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._compact_at = compact_nbytes

    def open(self, start_version: int) -> PersistedState:
        """Read what an earlier process left, and note that another one goes on.

        Args:
            start_version: of the staleness policy, when nothing was left.

        Raises:
            ConfigError: the file cannot be used, or another process uses it.
        """
        if self._path is None:
            return PersistedState(uuid.uuid4().hex[:12], start_version=start_version)
        entry: Any = Entry  # a union is a kind
        self._file = LineFile(self._path, entry, first_line=b'{"type":"started"')
        try:
            persisted = PersistedState.of(self._file.found)
            self._file.found = []
            if persisted is None:
                persisted = PersistedState(uuid.uuid4().hex[:12], start_version=start_version)
            else:
                persisted.run += 1
            self._file.write_replacement(persisted.entries())
            self._file.replace(self._file.nbytes)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"journal {self._path}: cannot be used: {error}") from error
        self._compact_at = max(self._compact_nbytes, 2 * self._file.nbytes)
        return persisted

    @property
    def broken(self) -> bool:
        """Whether writing has failed; nothing may be started any more."""
        return bool(self._broken)

    def when_broken(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the loop once writing has failed."""
        self._when_broken.append(listener)

    def check(self) -> None:
        """Refuse work that cannot be made to last.

        Raises:
            RolloutError: writing has failed before, or it is not open.
        """
        self._check_whole()
        if self.on and self._file is None:
            raise RolloutError(f"journal {self._path}: must be open, the controller is not")

    def _check_whole(self) -> None:
        if self._broken:
            raise RolloutError(f"journal {self._path}: {self._broken}")

    # --- transitions -------------------------------------------------------------------------

    def submitted(
        self, task_ids: Sequence[str], group_id: int, work: Work, metadata: object
    ) -> None:
        """New tasks of the same work wait for admission; `group_id` is -1 for one alone.

        Raises:
            ConfigError: metadata that is not msgpack-plain.
            RolloutError: writing has failed before.
        """
        if self.on:
            self.check()
            encoded = encode_value("journal: metadata", metadata)
            self._add(Submitted(tuple(task_ids), group_id, work, encoded))

    def attempted(self, record: Record) -> None:
        """A worker is about to be sent this attempt."""
        if self.on:
            self._add(
                Attempted(
                    task_id=record.task_id,
                    attempt=record.attempt,
                    num_dispatches=record.num_dispatches,
                    engine=record.engine,
                    worker=record.worker,
                    failures=record.failures,
                    rejections=record.rejections,
                    resubmits=record.resubmits,
                    oldest_version=record.oldest_version,
                )
            )

    def accepted(self, outcome: RolloutOutcome) -> None:
        """The outcome is kept until its group is complete, or until it is acknowledged."""
        self._add(Accepted(outcome))

    def resubmitted(self, record: Record) -> None:
        """Its outcome was thrown away; it waits for admission again."""
        self._add(Resubmitted(record.task_id, record.rejections, record.resubmits))

    def delivered(self, task_ids: Sequence[str]) -> None:
        """Handed to the owner, together."""
        if not self.on:
            return
        if self.keep_delivered:
            together = tuple(task_ids)
            self._unacknowledged.update(dict.fromkeys(together, together))
        else:
            self._add(Ended(tuple(task_ids), num_consumed=len(task_ids)))

    def acknowledged(self, task_id: str) -> bool:
        """The owner has used it; returns whether it was waiting for that. Idempotent."""
        together = self._unacknowledged.pop(task_id, ())
        if together:
            for other in together:
                self._unacknowledged.pop(other, None)
            self._add(Ended(together, num_consumed=len(together)))
        return bool(together)

    def declined(self, task_ids: Sequence[str]) -> None:
        """Handed to the owner, who has no use for them: nothing was consumed."""
        if not self.on:
            return
        owed = [self._unacknowledged.pop(task_id, ()) for task_id in task_ids]
        if any(owed):
            self._add(Ended(tuple(task_ids)))
        else:
            self._add(Ended((), num_consumed=-len(task_ids)))

    def ended(self, task_id: str, *, num_consumed: int = 0) -> None:
        """Cancelled, failed or dropped; or known to the owner already, as `num_consumed` samples."""
        self._add(Ended((task_id,), num_consumed=num_consumed))

    def version(self, version: int) -> None:
        """The consumer holds `version`."""
        self._add(VersionReached(version))

    # --- the file ----------------------------------------------------------------------------

    def _add(self, entry: Entry) -> None:
        if self._file is None or self._broken:
            return
        self._file.add(entry)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_late)

    def _flush_late(self) -> None:
        self._flush_scheduled = False
        if not self._broken:
            self.flush()

    def flush(self) -> None:
        """Have everything survive the end of this process.

        Raises:
            RolloutError: the file cannot be written; from now on nothing is taken on, handed
                out or acknowledged, because it could be counted twice later.
        """
        self._check_whole()
        if self._file is None or not self._file.pending:
            return
        try:
            self._file.write()
        except OSError as error:
            self._broken = f"cannot be written: {error}"
            logger.critical("journal %s: %s", self._path, self._broken)
            for listener in self._when_broken:
                listener()
            self._check_whole()
        if self._timer is None and self._upkeep is None:
            self._timer = asyncio.get_running_loop().call_later(self._sync_s, self._begin_upkeep)

    def _begin_upkeep(self) -> None:
        self._timer = None
        self._upkeep = asyncio.create_task(self._keep_up(), name="rollout-journal")
        self._upkeep.add_done_callback(self._upkeep_ended)

    def _upkeep_ended(self, task: asyncio.Task[None]) -> None:
        self._upkeep = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("journal %s: upkeep failed: %s", self._path, error)

    async def _keep_up(self) -> None:
        """Off the loop: bring it to disk, and write it anew when it has grown."""
        file = self._file
        if file is None:
            return
        await asyncio.to_thread(file.sync)
        upto = file.nbytes
        if upto < self._compact_at:
            return
        await asyncio.to_thread(_write_anew, file, upto)
        file.replace(upto)
        self._compact_at = max(self._compact_nbytes, 2 * file.nbytes)

    async def close(self) -> None:
        """Write what was added; what is outstanding stays for the next process. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._upkeep is not None:
            await asyncio.gather(self._upkeep, return_exceptions=True)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write_anew(file: LineFile[Entry], upto_nbytes: int) -> None:
    """A replacement that says the same, without what has ended."""
    persisted = PersistedState.of(file.read(upto_nbytes))
    if persisted is not None:
        file.write_replacement(persisted.entries())
