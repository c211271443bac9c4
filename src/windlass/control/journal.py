"""The coordinator's journal: one JSON line per fact, on disk before it is acted on.

A controller that starts on an existing journal continues with a higher epoch and knows which
version is published. A last line that was cut off by a crash is ignored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, final

import msgspec

from windlass.errors import ConfigError

__all__ = ["Journal", "JournalEntry", "JournalKind"]

from enum import StrEnum


class JournalKind(StrEnum):
    """What a line says."""

    STARTED = "started"
    ROUND_BEGAN = "round_began"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    ROUND_ENDED = "round_ended"


class JournalEntry(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        kind: what happened. epoch, round: when.
        version: the round's version; for STARTED, the version known to be published.
        engines: that took part, or that serve the version.
        detail: one line for a person.
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
        ConfigError: the file cannot be opened, or a line before the last is not an entry.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.entries: list[JournalEntry] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            if path.exists():
                self.entries = _read(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            if self._file.tell() and not path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(f"journal_path {path}: cannot be used: {error}") from error

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
        """The highest version that some engine was told to serve; -1 for none.

        PUBLISHING counts: a controller that died after writing it may have published, and a
        version number must never be given to other weights.
        """
        kinds = {JournalKind.PUBLISHING, JournalKind.PUBLISHED}
        return max((e.version for e in self.entries if e.kind in kinds), default=-1)

    def append(self, entry: JournalEntry) -> None:
        """Record an entry; returns once it is on disk."""
        self.entries.append(entry)
        if self._file is None:
            return
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(path: Path) -> list[JournalEntry]:
    entries: list[JournalEntry] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            entries.append(msgspec.json.decode(line, type=JournalEntry))
        except msgspec.MsgspecError as error:
            if number == len(lines) - 1:
                break  # cut off by a crash while it was written
            raise ConfigError(f"journal {path}: line {number + 1}: {error}") from error
    return entries
