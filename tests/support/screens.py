"""A command in a real pseudo-terminal, and the text on its screen."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

__all__ = ["Terminal", "on_screen", "unwrapped"]

HISTORY = 5000
DEADLINE_S = 240.0


class Terminal:
    """Terminal emulator: the current screen and the lines that have scrolled out of it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=HISTORY, ratio=1)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    def lines(self) -> list[str]:
        """Return every line, scrolled lines first, without empty lines at the end."""
        columns = range(self._screen.columns)
        scrolled = ["".join(row[n].data for n in columns) for row in self._screen.history.top]
        found = [line.rstrip() for line in [*scrolled, *self._screen.display]]
        while found and not found[-1]:
            found.pop()
        return found

    def shown(self) -> list[str]:
        """Return the lines of the screen only."""
        return [line.rstrip() for line in self._screen.display]


def on_screen(
    command: Sequence[str],
    columns: int,
    rows: int,
    *,
    cwd: Path,
    environment: dict[str, str] | None = None,
    look: Callable[[Terminal, subprocess.Popen[bytes]], object] = lambda _terminal, _process: None,
) -> tuple[int, Terminal]:
    """Run a command in a terminal of this size until it ends; return its status and the terminal.

    Args:
        look: called whenever the terminal has changed and is quiet.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    told = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI")
    inherited = {name: value for name, value in os.environ.items() if name not in told}
    process = subprocess.Popen(
        list(command),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**inherited, "TERM": "xterm-256color", **(environment or {})},
        start_new_session=True,
    )
    os.close(theirs)
    terminal, is_new, deadline_s = Terminal(columns, rows), False, time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline_s:
            # The command writes whole frames, so a pause of this length means that a frame is
            # complete.
            ready, _, _ = select.select([ours], [], [], 0.05 if is_new else DEADLINE_S)
            if not ready:
                is_new = False
                look(terminal, process)
                continue
            data = os.read(ours, 1 << 16)
            if not data:
                break
            terminal.feed(data)
            is_new = True
    except OSError as error:
        # The other end was closed.
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(ours)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
    return process.returncode, terminal


def unwrapped(lines: Sequence[str]) -> str:
    """Return the lines as one text with single spaces, so that a search ignores line wraps."""
    return " ".join(" ".join(lines).split())
