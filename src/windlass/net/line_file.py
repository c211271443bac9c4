"""An append-only file of JSON lines, of which a crash can tear off the end and nothing else.

Each line is an object whose last member is the XXH3 (64 bits) of the line without it, so that a damaged line
is never taken for another one. Shared by the journal of rounds, which is on disk before it is acted
on, and the journal of rollouts, which is written in batches.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar, final

import msgspec
import xxhash

from windlass.errors import DECODE_ERRORS, ConfigError

CHECKSUM = b',"xxh3":"%016x"}\n'
CHECKSUM_NBYTES = len(CHECKSUM % 0)

EntryT = TypeVar("EntryT")


@final
class LineFile(Generic[EntryT]):
    """One writer at a time: the file is locked for as long as it is open.

    A last line without its end was torn by a crash and is cut off when the file is opened.

    Args:
        path: made with its folders when it is missing.
        kind: type of an entry, or a union of tagged types.
        first_line: how the first line of every such file begins; empty for anyhow.

    Attributes:
        found: what it held when it was opened; whoever has used it may clear it.
        nbytes: its size.

    Raises:
        ConfigError: it cannot be opened, another process has it open, a complete line is
            damaged or not an entry, or the file is none of ours: what there is of its first line begins
            otherwise.
    """

    def __init__(self, path: Path, kind: type[EntryT], *, first_line: bytes = b"") -> None:
        self.path = path = Path(path)
        self._kind = kind
        self._encoder = msgspec.json.Encoder()
        self._descriptor = -1
        self._torn = False
        self._moved = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _lock(path)
            self.found, self.nbytes = read_lines(path, kind, first_line=first_line)
            os.ftruncate(self._descriptor, self.nbytes)  # the next line must not grow on a torn one
            _sync_directory(path.parent)
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
        return self.path.with_name(f"{self.path.name}.new")

    def encode(self, entry: EntryT) -> bytes:
        """Return an entry as `write` takes it."""
        return self._encoder.encode(entry)

    def check_path(self) -> None:
        """Check that the next process would find what is written.

        Raises:
            OSError: the file was removed or replaced.
        """
        _check_is(self.path, os.fstat(self._descriptor))

    def write(self, encoded: Iterable[bytes]) -> None:
        """Hand a line for each entry to the system, in one call.

        From here on they survive the end of this process, not a power cut.

        Raises:
            OSError: disk full, and the like. It is as if it had not been tried: what the end of the file
                may have of the lines is cut off by the next call.
        """
        data = b"".join(map(add_checksum, encoded))
        if self._torn:
            os.ftruncate(self._descriptor, self.nbytes)
        self._torn = True
        _write_all(self._descriptor, data)
        self._torn = False
        self.nbytes += len(data)

    def sync(self) -> None:
        """Return once what was written is on disk; may be called from another thread."""
        if self._moved:
            _sync_directory(self.path.parent)
            self._moved = False
        os.fdatasync(self._descriptor)

    def read(self, upto_nbytes: int) -> list[EntryT]:
        """The entries of the first `upto_nbytes`; may be called from another thread.

        Raises:
            OSError, ConfigError: it cannot be read, or a line is not an entry.
        """
        return read_lines(self.path, self._kind, upto_nbytes)[0]

    def write_replacement(self, entries: Iterable[EntryT]) -> None:
        """Have a file with these entries on disk, under another name; for `replace`.

        May be called from another thread.

        Raises:
            OSError, ConfigError: it cannot be written; this file is as it was.
        """
        self._replacement.unlink(missing_ok=True)  # of a process that was killed here
        file = LineFile(self._replacement, self._kind)
        try:
            file.write(map(file.encode, entries))
            file.sync()
        finally:
            file.close()

    def replace(self, upto_nbytes: int) -> None:
        """Go on with the replacement, which says the same as the first `upto_nbytes` of this file.

        What was written after those is copied behind it; then it takes this one's name. The name
        survives a power cut after the next `sync`; before, it may be the old file's again.

        Raises:
            OSError: the files are as they were.
        """
        path = self._replacement
        descriptor = _lock(path)
        try:
            with self.path.open("rb") as old:
                old.seek(upto_nbytes)
                _write_all(descriptor, old.read(self.nbytes - upto_nbytes))
            path.replace(self.path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self.nbytes = descriptor, os.fstat(descriptor).st_size
        self._torn, self._moved = False, True

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _check_is(path: Path, opened: os.stat_result) -> None:
    if not stat.S_ISREG(opened.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise OSError(errno.ENOENT, f"{path} was removed while it was open") from error
    if not os.path.samestat(found, opened):
        raise BlockingIOError(errno.EAGAIN, f"{path} was replaced while it was open")


def add_checksum(entry: bytes) -> bytes:
    """Return the line of an object with members: its checksum is the last one."""
    return entry[:-1] + CHECKSUM % xxhash.xxh3_64_intdigest(entry)


def _has_checksum(line: bytes) -> bool:
    return add_checksum(line[:-CHECKSUM_NBYTES] + b"}") == line


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _lock(path: Path) -> int:
    """Open for appending, locked until the descriptor is closed or the process ends.

    Raises:
        OSError: another process holds it, or has just put another file in its place.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_is(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_lines(
    path: Path, kind: type[EntryT], upto_nbytes: int | None = None, *, first_line: bytes = b""
) -> tuple[list[EntryT], int]:
    """The entries, and the bytes that they take; a line without its end was torn by a crash.

    Raises:
        ConfigError: a complete line is damaged or not an entry, or what there is of the first line does not
            begin as `first_line`.
    """
    entries: list[EntryT] = []
    decoder = msgspec.json.Decoder(kind)
    nbytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            is_torn, is_sound = not line.endswith(b"\n"), _has_checksum(line[:-1] + b"\n")
            if nbytes == upto_nbytes or (is_torn and not is_sound):
                # Else the file would be cut off, whatever it is.
                if number == 0 and line[: len(first_line)] != first_line[: len(line)]:
                    raise ConfigError(
                        f"journal {path}: must be a journal, begins with {line[:20]!r}"
                    )
                break
            try:
                if is_torn or not is_sound:
                    raise ValueError("it is damaged: its checksum is missing or wrong")  # noqa: TRY301
                entries.append(decoder.decode(line))
            except (*DECODE_ERRORS, ValueError) as error:
                raise ConfigError(f"journal {path}: line {number + 1}: {error}") from error
            nbytes += len(line)
    return entries, nbytes


def _sync_directory(path: Path) -> None:
    """A new file survives a power cut only once its directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
