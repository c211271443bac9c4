"""Text for numbers, lists and paths in messages to users."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: `1 engine`, `2 engines`. The noun's plural must be noun + s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the first `most` names, separated by commas, and `and N more` if there are further names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def install_command(extra: str = "", python: str = "") -> str:
    """Return a text with the `pip` command that installs Windlass, with the dependencies of `extra`.

    The command installs from the source folder, because `windlass` on PyPI is another project.

    Args:
        extra: name of an extra in pyproject.toml; empty for none.
        python: path of the Python interpreter; empty for plain `pip`.
    """
    what = f"'.[{extra}]'" if extra else "."
    by = f"{python} -m pip" if python else "pip"
    return f"`{by} install {what}` in the folder of Windlass's sources"


def shortest_path(path: Path) -> str:
    """Return `path` relative to the current folder or absolute, whichever is shorter."""
    return min(os.path.relpath(path), str(path.absolute()), key=len)
