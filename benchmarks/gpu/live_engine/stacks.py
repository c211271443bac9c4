"""Stacks of running processes, which tell where a run hangs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def write_stacks(root: int | None) -> None:
    """Let a process and all processes below it write the stacks of their threads; only those that expect SIGUSR2 do."""
    if root is None:
        return
    below: dict[int, list[int]] = {}
    expecting: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines()
            )
            below.setdefault(int(status["PPid"]), []).append(int(folder.name))
            if int(status["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1:
                expecting.add(int(folder.name))
    left = [root]
    while left:
        process = left.pop()
        left += below.get(process, ())
        if process in expecting:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGUSR2)
