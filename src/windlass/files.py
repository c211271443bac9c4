"""Atomic writes of files: a file is complete or absent, and a write never follows a link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file, and move it to `path` at the end of the `with` block.

    If the block raises, `path` is unchanged. A symbolic link at `path` is replaced, not followed, because another user
    may have created it in a shared folder. The temporary name of the new file is random for the same reason.

    Args:
        path: path of the finished file, in an existing folder.
        mode: permissions of the file, before the umask is applied.

    Raises:
        OSError: the folder is missing, not writable, or full.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    opened = os.open(temporary, flags, mode)
    try:
        with os.fdopen(opened, "wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        # `BaseException`: also delete the incomplete file after Ctrl-C.
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file atomically; see `replacing`."""
    with replacing(path) as file:
        file.write(content)
