"""Text for numbers, lists and paths in messages to users."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: `1 engine`, `2 engines`. The plural must end in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names, separated by commas, and the number of the remaining names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def install_command(extra: str = "", python: str = "") -> str:
    """Return the command that installs Windlass, with an optional extra, for an interpreter.

    The command installs from the source folder, because the name `windlass` on PyPI belongs to another project.
    """
    what = f"'.[{extra}]'" if extra else "."
    by = f"{python} -m pip" if python else "pip"
    return f"`{by} install {what}` in the folder of Windlass's sources"


def shortest_path(path: Path) -> str:
    """Return the relative path from the current folder, or the absolute path if it is shorter."""
    return min(os.path.relpath(path), str(path.absolute()), key=len)
