"""The coordinator's journal: one JSON line per fact, on disk before it is acted on.

A controller that starts on an existing journal continues with a higher epoch and knows which
version is published. A last line that was cut off by a crash is ignored.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import final

import msgspec

from windlass.control.lines import LineFile

__all__ = ["Journal", "JournalEntry", "JournalKind"]


class JournalKind(StrEnum):
    """What a line says."""

    STARTED = "started"
    ROUND_BEGAN = "round_began"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    ROUND_ENDED = "round_ended"
    POISONED = "poisoned"


class JournalEntry(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        kind: what happened. epoch, round: when.
        version: the round's version; for STARTED, the version known to be published.
        engines: that took part, or that serve the version.
        detail: one line for a person; for POISONED, the incarnation of the rank in `engines`.
    """

    kind: JournalKind
    epoch: int
    round: int
    version: int
    engines: tuple[str, ...] = ()
    detail: str = ""


@final
class Journal:
    """Append-only. With no path it lives in memory only.

    Raises:
        ConfigError: the file cannot be opened, or a complete line is not an entry.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else LineFile(path, JournalEntry)
        self.entries: list[JournalEntry] = [] if self._file is None else self._file.found

    @property
    def last_epoch(self) -> int:
        """The highest epoch recorded; 0 for none."""
        return max((entry.epoch for entry in self.entries), default=0)

    @property
    def last_round(self) -> int:
        """The highest round recorded; 0 for none."""
        return max((entry.round for entry in self.entries), default=0)

    @property
    def published_version(self) -> int:
        """The highest version that is known to be served; -1 for none."""
        return self._highest({JournalKind.PUBLISHED})

    @property
    def spent_version(self) -> int:
        """The highest version that some engine was told to serve; -1 for none.

        PUBLISHING counts: a controller that died after writing it may have published, and a
        version number must never be given to other weights.
        """
        return self._highest({JournalKind.PUBLISHING, JournalKind.PUBLISHED})

    @property
    def poisoned(self) -> frozenset[tuple[str, str]]:
        """(worker, incarnation) of ranks that bytes of an unknown write may still reach."""
        found = (e for e in self.entries if e.kind is JournalKind.POISONED)
        return frozenset((entry.engines[0], entry.detail) for entry in found if entry.engines)

    def _highest(self, kinds: set[JournalKind]) -> int:
        return max((e.version for e in self.entries if e.kind in kinds), default=-1)

    def append(self, entry: JournalEntry) -> None:
        """Record an entry; returns once it is on disk.

        Raises:
            OSError: it cannot be written. It is as if it had not been tried.
        """
        if self._file is not None:
            self._file.add(entry)
            self._file.write()
            self._file.sync()
        self.entries.append(entry)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
