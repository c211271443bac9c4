"""The coordinator's side of hand-driven updates: rounds stand back, versions are accounted for."""

from __future__ import annotations

import asyncio
import logging

from windlass.errors import PeerUnreachable, RoundAborted
from windlass.updates.binding import Binding
from windlass.updates.changes import Changes
from windlass.updates.fleet import Fleet, Group
from windlass.updates.journal import Journal, JournalEntry, JournalKind
from windlass.updates.messages import MAX_COUNT
from windlass.updates.session import AgentSession

__all__ = ["HandDrivenGate"]

_log = logging.getLogger(__name__)


class HandDrivenGate:
    """`HandDrivenOwner` for a coordinator, which brings the attributes."""

    _lock: asyncio.Lock
    _fleet: Fleet
    _sessions: dict[str, AgentSession]
    _binding: Binding | None
    _changes: Changes
    _lineage: str
    _journal: Journal
    _epoch: int
    _round: int
    _published: int
    _spent: int

    @property
    def lineage(self) -> str:
        """Of the run whose versions this controller publishes; see `Welcome`."""
        return self._lineage

    async def begin_by_hand(
        self,
    ) -> tuple[tuple[int, int], dict[str, Group], dict[str, AgentSession]]:
        """See `HandDrivenOwner.begin_by_hand`."""
        await self._lock.acquire()
        groups = {group.name: group for group in self._fleet.writable_engines()}
        self._binding = None
        self._round += 1
        if not groups:
            self._lock.release()
            raise PeerUnreachable("pause_generation: no complete engine is connected")
        return (self._epoch, self._round), groups, dict(self._sessions)

    async def end_by_hand(
        self, version: int | None, served: tuple[str, ...], tainted: tuple[str, ...]
    ) -> None:
        """See `HandDrivenOwner.end_by_hand`."""
        if version is not None:
            self._published = self._spent = version
            self._fleet.lineage = self._lineage
        self._fleet.mark(version, served, tainted)
        if version is not None:
            self._journal_outcome(JournalKind.PUBLISHED, version, served)
        self._lock.release()
        self._changes.notify()

    def check_version(self, version: int) -> None:
        """See `HandDrivenOwner.check_version`."""
        newest = max(self._published, self._spent)
        if not newest < version <= MAX_COUNT:
            raise RoundAborted(f"version must be > {newest} and < 2^53, got {version}")
        try:
            self._journal_round(JournalKind.PUBLISHING, version, ())
        except OSError as error:
            raise RoundAborted(f"version {version} cannot be recorded: {error}") from error
        self._spent = version

    def new_place(self) -> tuple[int, int]:
        """See `ResumeOwner.new_place`."""
        self._epoch += 1
        self._round += 1
        return self._epoch, self._round

    def note_given_up(self, worker: str, reason: str) -> None:
        """See `ResumeOwner.note_given_up`."""
        self._journal_outcome(JournalKind.AT_REST, self._published, (worker,), reason)

    def _record_poison(self) -> None:
        """A controller that is started after this one must not have those written either."""
        for worker, incarnation in sorted(self._fleet.poisoned - self._journal.poisoned):
            self._journal_outcome(JournalKind.POISONED, self._spent, (worker,), incarnation)

    def _journal_outcome(
        self, kind: JournalKind, version: int, engines: tuple[str, ...], detail: str = ""
    ) -> None:
        """What is done cannot be undone for want of a disk; PUBLISHING is on it already."""
        try:
            self._journal_round(kind, version, engines, detail)
        except OSError as error:
            _log.error("journal: %s of version %s is not recorded: %s", kind, version, error)

    def _journal_round(
        self, kind: JournalKind, version: int, engines: tuple[str, ...], detail: str = ""
    ) -> None:
        self._journal.append(JournalEntry(kind, self._epoch, self._round, version, engines, detail))
