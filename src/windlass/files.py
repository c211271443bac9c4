"""Files that are complete or absent, and that never overwrite what a link points to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of `path` at the end of the block.

    If the block raises, `path` is unchanged. A link at `path` is replaced, not followed: in a folder that other
    users may write, one of them could have made it. Nobody can predict the name of the new file.

    Args:
        path: of the finished file, in an existing folder.
        mode: permissions of the file, less the umask.

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
    except BaseException:  # an interrupt must not leave an incomplete file behind either
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file as `replacing` does."""
    with replacing(path) as file:
        file.write(content)
