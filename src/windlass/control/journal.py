"""The coordinator's journal: one JSON line per fact, on disk before it is acted on.

A controller that starts on an existing journal continues with a higher epoch and knows which
version is published. A last line that was cut off by a crash is ignored. Its length is bounded.
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
from windlass.net.line_file import LineFile
from windlass.net.messages import MAX_NAME_NBYTES

_log = logging.getLogger(__name__)
COMPACT_AFTER = 4096
"""Entries after which the file is written anew; a round takes three."""
KEPT_ENTRIES = 256
"""Newest entries that a compaction leaves as they were, for a person."""
FIRST_LINE = b'{"kind":"started"'
MAX_QUARANTINED = 4096
"""Quarantined processes that are remembered: the newest."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Version = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]


class JournalKind(StrEnum):
    """What a line says."""

    STARTED = "started"
    ROUND_BEGAN = "round_began"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    ROUND_ENDED = "round_ended"
    QUARANTINED = "quarantined"
    NOT_RESUMED = "not_resumed"


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. What could not have been said on the wire is no entry: numbers out of bounds, long names.

    Attributes:
        kind: what happened. epoch, round: when.
        version: the round's version; for STARTED, the version known to be published.
        engines: that took part, or that serve the version.
        detail: one line for a person; for QUARANTINED, the incarnation of the rank in `engines`; for
            NOT_RESUMED, why that rank does not go on, though it was told as often as is tried.
        lineage: for STARTED, of the run whose rounds these are.
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
    """What a controller that starts needs of all entries.

    Attributes:
        epoch, round: the highest; 0 for none.
        published: the highest version that is known to be served; -1 for none.
        reserved: the highest version that some engine was told to serve; -1 for none. PUBLISHING
            counts: a controller that died after writing it may have published, and a version number
            must never be given to other weights.
        lineage: of the run whose rounds these are; empty before the first `Journal.start`.
        quarantined: (worker, incarnation) of ranks that bytes of an unknown write may still reach:
            the newest `MAX_QUARANTINED`.
    """

    epoch: int = 0
    round: int = 0
    published: int = -1
    reserved: int = -1
    lineage: str = ""
    quarantined: dict[tuple[str, str], None] = field(default_factory=dict)

    def add(self, entry: JournalEntry) -> None:
        """Take in one more entry."""
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
        """Return as few entries as say the same."""
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
    """Append-only between compactions. With no path it lives in memory only.

    After `COMPACT_AFTER` entries the file is written anew: a summary of all, then the newest
    `KEPT_ENTRIES` as they were. The new file is on disk before it takes the old one's name, so a
    crash at any moment leaves one of the two.

    Attributes:
        summary: of all entries. recent: the newest entries, oldest first.

    Raises:
        ConfigError: the file cannot be opened, or a complete line is not an entry.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else LineFile(path, JournalEntry, first_line=FIRST_LINE)
        self.summary = JournalSummary()
        self.recent: deque[JournalEntry] = deque(maxlen=KEPT_ENTRIES)
        self._num_lines = 0
        self._compact_at = COMPACT_AFTER
        if self._file is not None:
            for entry in self._file.found:
                self._note(entry)
            self._file.found = []

    @property
    def is_kept(self) -> bool:
        """Whether what is recorded outlives this process."""
        return self._file is not None

    def start(self) -> int:
        """Record that a controller has started; returns its epoch, which is a new one.

        The first one gives the run its lineage, at random.

        Raises:
            ConfigError: it cannot be written, or there is no higher epoch; the journal is closed, so
                that another may try.
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
            raise ConfigError(f"journal: STARTED cannot be written: {error}") from error
        return epoch

    def append(self, entry: JournalEntry) -> None:
        """Record an entry; returns once it is on disk.

        Raises:
            OSError: it cannot be written. It is as if it had not been tried.
        """
        if self._file is not None:
            self._file.check_path()
            self._file.write([self._file.encode(entry)])
            self._file.sync()
        self._note(entry)
        if self._file is not None and self._num_lines >= self._compact_at:
            self._compact(self._file)

    def _note(self, entry: JournalEntry) -> None:
        self.summary.add(entry)
        self.recent.append(entry)
        self._num_lines += 1

    def _compact(self, file: LineFile[JournalEntry]) -> None:
        """Without it the journal is long and right: a failure is tried again later."""
        entries = [*self.summary.entries(), *self.recent]
        try:
            file.write_replacement(entries)
            file.replace(file.nbytes)
            self._num_lines = len(entries)
            file.sync()
        except (OSError, ConfigError) as error:
            _log.warning("journal %s is not compacted: %s", file.path, error)
        self._compact_at = self._num_lines + COMPACT_AFTER

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
