"""Journal of the coordinator: a file with one JSON line per event.

The coordinator acts on an event once its line is on disk. A controller that starts with an existing journal continues
with a higher epoch and knows the published version. If a crash has left an incomplete last line, the controller cuts it
off. Compaction bounds the size of the file.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, final

import msgspec

from windlass.control.messages import MAX_COUNT
from windlass.errors import ConfigError
from windlass.net.journal_file import JournalFile
from windlass.net.messages import MAX_NAME_NBYTES

_log = logging.getLogger(__name__)
COMPACT_NBYTES = 1 << 20
"""File size in bytes above which the journal is compacted. A round of 8 engines takes about 600 bytes."""
KEPT_ENTRIES = 256
"""Number of newest entries that a compaction keeps unchanged, for people who read the journal."""
MAX_QUARANTINED = 4096
"""Maximum number of quarantined processes in the summary of the journal; the oldest are dropped."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Version = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]


class JournalKind(StrEnum):
    """Kind of a journal entry.

    Attributes:
        STARTED: a controller has started.
        ROUND_BEGAN: a round begins.
        PUBLISHING: from now on, engines may be told to serve the version.
        PUBLISHED: a round has published its version.
        ROUND_ENDED: a round has ended without a publication.
        QUARANTINED: bytes of a write with an unknown outcome may still arrive in the memory of a rank.
        NOT_RESUMED: a rank did not resume after repeated commands.
    """

    STARTED = "started"
    ROUND_BEGAN = "round_began"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    ROUND_ENDED = "round_ended"
    QUARANTINED = "quarantined"
    NOT_RESUMED = "not_resumed"


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True, rename={"kind": "type"}):
    """One line of the journal. Numbers and names have the same bounds as in messages.

    Attributes:
        kind: kind of the event.
        epoch: epoch of the event.
        round: round of the event.
        version: version of the round; for STARTED and NOT_RESUMED, the published version; for QUARANTINED, the reserved
            version (`JournalSummary.reserved`).
        engines: for ROUND_BEGAN, engines of the round; for PUBLISHED, engines that serve the version; for QUARANTINED
            and NOT_RESUMED, the worker name of one rank.
        detail: for ROUND_ENDED, the reason in one line; for QUARANTINED, the incarnation of the rank; for NOT_RESUMED,
            the reason why the rank did not resume; "compacted" for other entries that a compaction has made.
        lineage: for STARTED, lineage of the run.
    """

    kind: JournalKind
    epoch: _Count
    round: _Count
    version: _Version
    engines: tuple[_Name, ...] = ()
    detail: str = ""
    lineage: Annotated[str, msgspec.Meta(max_length=MAX_NAME_NBYTES)] = ""


@dataclass(slots=True)
class JournalSummary:
    """Summary of all entries. A controller starts with this state.

    Attributes:
        epoch: highest epoch; 0 for none.
        round: highest round; 0 for none.
        published: highest published version; -1 for none.
        reserved: highest version of a PUBLISHING or PUBLISHED entry; -1 for none. No other weights may get this
            version, because a controller that died after a PUBLISHING entry may have told engines to serve it.
        lineage: lineage of the run; empty before the first `Journal.start`.
        quarantined: (worker, incarnation) of rank processes that a write with an unknown outcome may still reach; only
            the newest `MAX_QUARANTINED`, the oldest first. The values are None.
    """

    epoch: int = 0
    round: int = 0
    published: int = -1
    reserved: int = -1
    lineage: str = ""
    quarantined: dict[tuple[str, str], None] = field(default_factory=dict)

    def add(self, entry: JournalEntry) -> None:
        """Update the summary with one entry."""
        self.epoch, self.round = max(self.epoch, entry.epoch), max(self.round, entry.round)
        self.lineage = self.lineage or entry.lineage
        match entry.kind:
            case JournalKind.PUBLISHED:
                self.published = max(self.published, entry.version)
                self.reserved = max(self.reserved, entry.version)
            case JournalKind.PUBLISHING:
                self.reserved = max(self.reserved, entry.version)
            case JournalKind.QUARANTINED if entry.engines:
                self.quarantined[(entry.engines[0], entry.detail)] = None
                if len(self.quarantined) > MAX_QUARANTINED:
                    del self.quarantined[next(iter(self.quarantined))]
            case _:
                pass

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the entries of a compacted journal. Adding these entries to an empty summary gives this summary again."""
        at, said = (self.epoch, self.round), ((), "compacted")
        yield JournalEntry(JournalKind.STARTED, *at, self.published, *said, self.lineage)
        if self.published >= 0:
            yield JournalEntry(JournalKind.PUBLISHED, *at, self.published, *said)
        if self.reserved >= 0:
            yield JournalEntry(JournalKind.PUBLISHING, *at, self.reserved, *said)
        for worker, incarnation in self.quarantined:
            yield JournalEntry(JournalKind.QUARANTINED, *at, self.reserved, (worker,), incarnation)


@final
class Journal:
    """Journal of rounds in a file, or in memory without a path.

    Entries are appended. A file above `COMPACT_NBYTES` is compacted: the journal writes a new file with the summary and
    the newest `KEPT_ENTRIES` entries. The new file is on disk before it replaces the old file, so a crash leaves
    either the old file or the new file.

    Args:
        path: path of the file, which is created if it does not exist; None for a journal in memory.

    Attributes:
        summary: summary of all entries.
        recent: the newest `KEPT_ENTRIES` entries, the oldest first.

    Raises:
        ConfigError: the file cannot be opened, another process has it open, or a complete line is not an entry.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: JournalFile[JournalEntry] | None = None
        self.summary = JournalSummary()
        self.recent: deque[JournalEntry] = deque(maxlen=KEPT_ENTRIES)
        if path is not None:
            self._file = JournalFile(path, JournalEntry, compact_nbytes=COMPACT_NBYTES)
            for entry in self._file.found:
                self._note(entry)
            self._file.found = []

    @property
    def is_kept(self) -> bool:
        """Whether the journal is in a file, so that its entries survive the end of this process."""
        return self._file is not None

    def start(self) -> int:
        """Record the start of a controller. If the journal is new, give the run a random lineage.

        Returns:
            The controller's epoch, which is greater than all epochs in the journal.

        Raises:
            ConfigError: the entry cannot be written, or the epoch would exceed `MAX_COUNT`. The journal is closed then,
                so that another controller can open the file.
        """
        epoch = self.summary.epoch + 1
        if epoch > MAX_COUNT:
            self.close()
            raise ConfigError(f"journal: epoch must be < 2^53, got {epoch}")
        summary, lineage = self.summary, self.summary.lineage or secrets.token_hex(8)
        kind, last = JournalKind.STARTED, (summary.round, summary.published)
        try:
            self.append(JournalEntry(kind, epoch, *last, lineage=lineage))
        except OSError as error:
            self.close()
            raise ConfigError(f"journal: the entry STARTED cannot be written: {error}") from error
        return epoch

    def append(self, entry: JournalEntry) -> None:
        """Write an entry to the file, if there is one, and add the entry to the summary.

        If an earlier sync has failed, earlier entries may not be on disk. In that case, replace the file before writing
        the entry; the new file has the summary and the newest entries. Afterwards, compact the file if it is too long.

        Raises:
            OSError: the entry or the new file cannot be written. The summary does not contain the entry then, but a
                later controller may find the entry in the file.
        """
        if self._file is not None:
            if self._file.is_doubtful:
                self._file.rewrite(self._entries())
            self._file.write([self._file.encode(entry)])
            self._file.sync()
        self._note(entry)
        if self._file is not None and self._file.is_long:
            self._compact(self._file)

    def _entries(self) -> list[JournalEntry]:
        return [*self.summary.entries(), *self.recent]

    def _note(self, entry: JournalEntry) -> None:
        self.summary.add(entry)
        self.recent.append(entry)

    def _compact(self, file: JournalFile[JournalEntry]) -> None:
        """Replace the file's content by the summary and the newest entries.

        If this fails, only log the error, because the long file is still correct and a later `append` tries again.
        """
        try:
            file.rewrite(self._entries())
        except OSError as error:
            _log.warning("journal %s could not be shortened: %s", file.path, error)

    def close(self) -> None:
        """Close the file, if there is one. Later calls of `append` record entries only in memory. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
