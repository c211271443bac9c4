"""The coordinator's journal: one JSON line per fact, on disk before it is acted on.

A controller that starts on an existing journal continues with a higher epoch and knows which
version is published. A last line that was cut off by a crash is ignored.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import IO, final

import msgspec

from windlass.errors import ConfigError

__all__ = ["Journal", "JournalEntry", "JournalKind"]


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
        ConfigError: the file cannot be opened, or a complete line is not an entry.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.entries: list[JournalEntry] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole_nbytes = 0
            if path.exists():
                self.entries, whole_nbytes = _read(path)
            self._file = path.open("ab")
            self._file.truncate(whole_nbytes)  # the next line must not grow on a torn one
            _sync_directory(path.parent)
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
        """The highest version that is known to be served; -1 for none."""
        return self._highest({JournalKind.PUBLISHED})

    @property
    def spent_version(self) -> int:
        """The highest version that some engine was told to serve; -1 for none.

        PUBLISHING counts: a controller that died after writing it may have published, and a
        version number must never be given to other weights.
        """
        return self._highest({JournalKind.PUBLISHING, JournalKind.PUBLISHED})

    def _highest(self, kinds: set[JournalKind]) -> int:
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


def _read(path: Path) -> tuple[list[JournalEntry], int]:
    """The entries, and the bytes that they take; a line without its end was torn by a crash."""
    entries: list[JournalEntry] = []
    data = path.read_bytes()
    whole, _, _ = data.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else ()):
        try:
            entries.append(msgspec.json.decode(line, type=JournalEntry))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"journal {path}: line {number + 1}: {error}") from error
    return entries, len(whole) + 1 if whole else 0


def _sync_directory(path: Path) -> None:
    """A new file survives a power cut only once its directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
