"""An agent that kills a process in a given phase of an update, and then carries out its command.

The agent has just received the command of that phase. The round cannot continue without its
answer, so the victim dies inside that phase.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import final

from windlass.control.client import CommandHandler
from windlass.control.messages import Command, Result
from windlass.errors import PeerTimeout

__all__ = ["KillAt", "kill_and_wait"]

DEATH_S = 20.0


def kill_and_wait(pid: int) -> None:
    """Send SIGKILL and wait until the process has ended. It need not be a child.

    Raises:
        PeerTimeout: the process still exists after 20 s.
    """
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        if not select.select([descriptor], [], [], DEATH_S)[0]:
            raise PeerTimeout(f"process {pid}: still there {DEATH_S} s after SIGKILL")
    finally:
        os.close(descriptor)


@final
class KillAt:
    """`CommandHandler` that kills a process before it passes a command on.

    Args:
        handler: carries out every command.
    """

    def __init__(self, handler: CommandHandler) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._command, self._pid = "", 0

    def arm(self, command: str, pid: int) -> None:
        """Kill `pid` once, when the next command of this type arrives. Callable in any thread."""
        with self._lock:
            self._command, self._pid = command, pid

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """See `CommandHandler.handle`."""
        with self._lock:
            due = self._command == type(command).__name__
            if due:
                self._command = ""
        if due:
            kill_and_wait(self._pid)
        return self._handler.handle(command, epoch=epoch, round_number=round_number)
