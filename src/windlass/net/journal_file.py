"""File of a journal: append-only JSON lines, each with a checksum. A crash can damage only the end of the file.

Each line is an object with the entry's type as first member. The first entry is of type "started". The last member is
the XXH3 (64 bits) of the line without that member, so that a damaged line is detected. ADR 0011 says why this is not
an SQLite database.

Both journals of a controller use this file. The journal of rounds syncs each entry to disk before the controller acts
on it. The journal of rollouts writes entries in batches and syncs them later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar, final

import msgspec
import xxhash

from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.files import sync_directory

CHECKSUM = b',"xxh3":"%016x"}\n'
CHECKSUM_NBYTES = len(CHECKSUM % 0)
FIRST_LINE = b'{"type":"started"'
"""First bytes of every journal. A torn first line is cut off only if it begins like this."""

EntryT = TypeVar("EntryT")


@final
class JournalFile(Generic[EntryT]):
    """Journal file with one writer at a time: the file is locked while it is open.

    Opening the file cuts off an incomplete last line, which a crash left.

    Args:
        path: path of the file, which is created with its folders if it does not exist.
        entry_type: type of an entry, or a union of tagged types.
        compact_nbytes: size below which `is_long` is false.

    Attributes:
        found: entries of the file when it was opened. A caller that has used them may clear the list.
        nbytes: size of the file.
        is_doubtful: whether a sync has failed. After a failed sync, the kernel may count lost lines as written, and
            a later sync then succeeds although these lines are not on disk. Only a rewritten file has all lines.

    Raises:
        ConfigError: the file cannot be opened, another process has it open, or it has a complete line that is damaged
            or not an entry, or an incomplete first line of another kind of file.
    """

    def __init__(self, path: Path, entry_type: type[EntryT], *, compact_nbytes: int = 0) -> None:
        self.path = path = Path(path)
        self._entry_type = entry_type
        self._compact_nbytes = self._compact_at = compact_nbytes
        self._path_checked_at = float("-inf")
        self._encoder = msgspec.json.Encoder()
        self._descriptor = -1
        self._torn = False
        self._moved = self.is_doubtful = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _lock(path)
            self.found, self.nbytes = read_entries(path, entry_type)
            # The next line must not continue an incomplete one.
            os.ftruncate(self._descriptor, self.nbytes)
            sync_directory(path.parent)
        except (OSError, ConfigError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            why = f"cannot be used: {error}"
            if isinstance(error, BlockingIOError):
                why = f"another process has it open: {error.strerror}"
            raise ConfigError(f"journal {path}: {why}") from error

    @property
    def _replacement(self) -> Path:
        """Path of the file that `write_replacement` writes."""
        return self.path.with_name(f"{self.path.name}.new")

    def encode(self, entry: EntryT) -> bytes:
        """Encode an entry as JSON for `write`, which adds the checksum."""
        return self._encoder.encode(entry)

    @property
    def is_long(self) -> bool:
        """True if the caller should compact the file with `rewrite`, or with `write_replacement` and `replace`.

        The file then has at least `compact_nbytes` bytes, and has doubled in size since the last compaction, successful
        or not.
        """
        return self.nbytes >= self._compact_at

    def write(self, encoded: Iterable[bytes], *, recheck_path_s: float = 0.0) -> None:
        """Append a line for each entry, in one system call.

        Written lines survive the end of this process, but not a power cut; see `sync`.

        Args:
            encoded: entries, as `encode` returns them.
            recheck_path_s: seconds for which an earlier check of the path is trusted.

        Raises:
            OSError: the lines could not be written, for example because the file was removed or replaced, or because the
                disk is full. None of the entries counts as written: the next call first cuts off what was written.
        """
        if (now := time.monotonic()) >= self._path_checked_at + recheck_path_s:
            _check_is(self.path, os.fstat(self._descriptor))
            self._path_checked_at = now
        data = b"".join(map(add_checksum, encoded))
        if self._torn:
            os.ftruncate(self._descriptor, self.nbytes)
        self._torn = True
        write_all(self._descriptor, data)
        self._torn = False
        self.nbytes += len(data)

    def sync(self) -> None:
        """Wait until all lines that `write` has written are on disk. May be called from another thread.

        Raises:
            OSError: the sync failed, so lines may be lost. `is_doubtful` is then True.
        """
        try:
            if self._moved:
                sync_directory(self.path.parent)
                self._moved = False
            os.fdatasync(self._descriptor)
        except OSError:
            self.is_doubtful = True
            raise

    def read(self, upto_nbytes: int) -> list[EntryT]:
        """Return the entries in the first `upto_nbytes` bytes of the file. May be called from another thread.

        Raises:
            OSError: the file cannot be read.
            ConfigError: a line is damaged or not an entry.
        """
        return read_entries(self.path, self._entry_type, upto_nbytes)[0]

    def rewrite(self, entries: Iterable[EntryT]) -> None:
        """Replace all entries of the file by `entries`. When this method returns, the new file is on disk.

        A crash at any moment leaves either the whole old file or the whole new file.

        Raises:
            OSError: writing failed. The file has either the old or the new entries.
        """
        self.write_replacement(entries)
        self.replace(self.nbytes)
        self.sync()

    def write_replacement(self, entries: Iterable[EntryT]) -> None:
        """Write a file with these entries to disk under another name, for `replace`.

        May be called from another thread.

        Raises:
            OSError: the new file cannot be opened or written. The journal file itself is unchanged.
        """
        # If this method fails, the file must double in size before the next try.
        self._compact_at = 2 * self.nbytes
        # A process that was killed in this method may have left its replacement.
        self._replacement.unlink(missing_ok=True)
        try:
            file = JournalFile(self._replacement, self._entry_type)
        except ConfigError as error:
            raise OSError(str(error)) from error
        try:
            file.write(map(file.encode, entries))
            file.sync()
        finally:
            file.close()

    def replace(self, upto_nbytes: int) -> None:
        """Replace this file by the file that `write_replacement` wrote.

        The entries of the new file stand for the first `upto_nbytes` bytes of this file. Before the replacement, this
        method appends the lines after these bytes to the new file. Until the next `sync`, a power cut may restore the
        old file.

        Raises:
            OSError: the file could not be replaced; this object still uses the old file, which is unchanged.
        """
        path = self._replacement
        descriptor = _lock(path)
        try:
            with self.path.open("rb") as old:
                old.seek(upto_nbytes)
                write_all(descriptor, old.read(self.nbytes - upto_nbytes))
            path.replace(self.path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self.nbytes = descriptor, os.fstat(descriptor).st_size
        self._torn = self.is_doubtful = False
        self._moved = True
        self._compact_at = max(self._compact_nbytes, 2 * self.nbytes)

    def close(self) -> None:
        """Close the file and free its lock. Does not sync. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _check_is(path: Path, opened: os.stat_result) -> None:
    """Raise OSError unless the opened file is a regular file and is still at `path`."""
    if not stat.S_ISREG(opened.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise OSError(errno.ENOENT, f"{path} was removed while it was open") from error
    if not os.path.samestat(found, opened):
        raise BlockingIOError(errno.EAGAIN, f"{path} was replaced while it was open")


def add_checksum(entry: bytes) -> bytes:
    """Add a checksum to an entry, a JSON object with at least one member, and return the line to write.

    The checksum becomes the last member of the object. The line ends with a newline.
    """
    return entry[:-1] + CHECKSUM % xxhash.xxh3_64_intdigest(entry)


def _has_checksum(line: bytes) -> bool:
    """Return whether a line, with its newline, ends with its right checksum."""
    return add_checksum(line[:-CHECKSUM_NBYTES] + b"}") == line


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, with several system calls if the kernel writes only a part at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _lock(path: Path) -> int:
    """Open a file for appending (create it if it is missing), lock it, and return the descriptor.

    The lock ends when the descriptor is closed or the process ends.

    Raises:
        OSError: another process has locked the file or has just replaced it, or the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_is(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_entries(
    path: Path, entry_type: type[EntryT], upto_nbytes: int | None = None
) -> tuple[list[EntryT], int]:
    """Return the entries of a journal file, and the size in bytes of their lines.

    Args:
        path: path of the file.
        entry_type: type of an entry, or a union of tagged types.
        upto_nbytes: size of the part to read, which must end with a whole line. None: read the whole file, except for
            an incomplete last line.

    Raises:
        OSError: the file cannot be read.
        ConfigError: a complete line is damaged or not an entry; or the first line is incomplete, and is not the beginning
            of a journal file.
    """
    entries: list[EntryT] = []
    decoder = msgspec.json.Decoder(entry_type)
    nbytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            # A line that a crash cut short has no valid checksum. If the checksum is valid but the last byte is not a
            # newline, the line was not cut short: its last byte is damaged.
            is_torn, is_sound = not line.endswith(b"\n"), _has_checksum(line[:-1] + b"\n")
            if nbytes == upto_nbytes or (is_torn and not is_sound):
                # The caller cuts off the rest of the file. Raise for a file of another kind, which must not be cut.
                if number == 0 and line[: len(FIRST_LINE)] != FIRST_LINE[: len(line)]:
                    raise ConfigError(
                        f"journal {path}: must be a journal file, got a file that begins with {line[:20]!r}"
                    )
                break
            try:
                if is_torn or not is_sound:
                    raise ValueError("the checksum is missing or wrong")  # noqa: TRY301
                entries.append(decoder.decode(line))
            except (*DECODE_ERRORS, ValueError) as error:
                raise ConfigError(f"journal {path}: line {number + 1}: {error}") from error
            nbytes += len(line)
    return entries, nbytes
