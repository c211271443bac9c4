"""Numbers and paths as messages to people say them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return `1 engine`, `2 engines`; for nouns whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, with commas, and the number of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def install_command(extra: str = "", python: str = "") -> str:
    """Return how a person installs Windlass, with an extra, for an interpreter.

    By its sources, never by the name `windlass`: on PyPI that is another project.
    """
    what = f"'.[{extra}]'" if extra else "."
    by = f"{python} -m pip" if python else "pip"
    return f"`{by} install {what}` in the folder of Windlass's sources"


def shortest_path(path: Path) -> str:
    """Return the path from the current folder, or the absolute one where that is shorter."""
    return min(os.path.relpath(path), str(path.absolute()), key=len)
