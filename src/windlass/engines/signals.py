"""What a process that waits for others does when it is told to end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import final

__all__ = ["EndSignals", "exit_at_signal"]


def exit_at_signal(number: int, _frame: FrameType | None) -> None:
    """A handler: leave the main thread by SystemExit, with a shell's status for the signal."""
    sys.exit(128 + number)


@final
class EndSignals:
    """SIGTERM and SIGINT, from now on. Made in the main thread.

    Handlers written in Python run in the main thread, which does not notice a signal that another
    thread was given, or that came between its last look and its wait for a lock: there it may wait
    for ever. The handler in C writes to a pipe, whatever the thread.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)

    def call(self, action: Callable[[], None]) -> None:
        """Have `action` called, in a thread of its own, at the first one, which may have come already."""

        def wait() -> None:
            os.read(self._reader, 1)
            action()

        threading.Thread(target=wait, name="signals", daemon=True).start()
