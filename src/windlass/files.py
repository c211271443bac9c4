"""Atomic writes of files, and Python files of users that Windlass runs.

A written file is complete or absent, and a write never follows a link.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from windlass.errors import ConfigError, text_of


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, is_durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file, and move it to `path` at the end of the `with` block.

    If the block raises, `path` is unchanged. A symbolic link at `path` is replaced, not followed, because another user
    may have created it in a shared folder. The temporary name of the new file is random for the same reason.

    Args:
        path: path of the finished file, in an existing folder.
        mode: permissions of the file, before the umask is applied.
        is_durable: whether the file and its name are on disk after the block, so that a power cut loses neither.

    Raises:
        OSError: the folder is missing, not writable, or full.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    opened = os.open(temporary, flags, mode)
    try:
        with os.fdopen(opened, "wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if is_durable:
            sync_directory(path.parent)
    except BaseException:
        # `BaseException`: also delete the incomplete file after Ctrl-C.
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Sync a directory to disk. Without this call, a new or renamed file in it may be lost in a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file atomically; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def run_file(setting: str, file: Path, module_name: str, source: bytes | None = None) -> ModuleType:
    """Run a Python file of the user, and return its module. The file may import modules in the same folder.

    Args:
        setting: name of the setting that contains the file's path, for error messages.
        file: the user's file.
        module_name: name of the module in `sys.modules`.
        source: content to run, if the file may have changed since it was read; None for the present content.

    Raises:
        ConfigError: there is no such file, or the file raises an error.
    """
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None or (source is None and not file.is_file()):
        raise ConfigError(f"{setting} must be a Python file, got {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    # A dataclass in the file looks up its module by name.
    sys.modules[module_name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        # Python does the same for the folder of a script that it runs.
        sys.path.insert(0, folder)
    try:
        if source is None:
            spec.loader.exec_module(module)
        else:
            # Without `dont_inherit`, the `__future__` imports of this module would apply to the user's file.
            code = compile(source, file, "exec", dont_inherit=True)
            exec(code, vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting} must be a file that Python can run, got {str(file)!r}: {raised_at(error, file)}"
        ) from error
    return module


def raised_at(error: BaseException, file: Path) -> str:
    """Describe an exception for an error text: the innermost line of `file` in its traceback, its type and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {text_of(error)}"
