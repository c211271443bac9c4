"""Detect code, for example a workflow, that blocks an event loop, and log where it blocks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import ClassVar, final
from weakref import WeakSet

from windlass.rollout.workflows import WorkflowContext

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
"""Seconds between two checks whether the event loop runs callbacks."""
BLOCKED_AFTER_S = 5.0
"""Seconds without an iteration after which an event loop counts as blocked. A peer closes the connection after
twice this time without a message."""
SAY_EVERY_S = 15.0
"""Seconds between two log lines about a loop that stays blocked."""
MAX_FRAMES = 20
"""Largest number of newest stack frames in a log line."""
_ASYNCIO = str(Path(asyncio.__file__).parent)


@final
class BlockWatch:
    """Daemon thread that logs the workflow or other code that blocks an event loop, with its stack.

    The log helps because peers cannot distinguish a blocked process from a dead one. While one watch of an
    event loop is open, further watches of the same loop do nothing.

    Args:
        loop: event loop of the calling thread.
        where: name of the process in the log, for example "worker w0".
    """

    _watched: ClassVar[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()

    def __init__(self, loop: asyncio.AbstractEventLoop, where: str) -> None:
        self._loop, self._where = loop, where
        self._is_first = loop not in self._watched
        self._thread_id = threading.get_ident()
        self._ended, self._turned = threading.Event(), threading.Event()
        if self._is_first:
            self._watched.add(loop)
            threading.Thread(target=self._watch, name="block watch", daemon=True).start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_first:
            self._watched.discard(self._loop)
        self._ended.set()
        self._turned.set()

    def _watch(self) -> None:
        """Schedule a callback in the loop, and wait `LOOK_EVERY_S` between callbacks.

        If a callback has not run after `BLOCKED_AFTER_S`, log the stack of the loop's thread. Repeat this every
        `SAY_EVERY_S` until the callback runs.
        """
        while not self._ended.wait(LOOK_EVERY_S):
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:
                # The loop is closed.
                return
            began_s, next_s = time.monotonic(), BLOCKED_AFTER_S
            while not self._turned.wait(began_s + next_s - time.monotonic()):
                self._say(time.monotonic() - began_s)
                next_s += SAY_EVERY_S

    def _say(self, blocked_s: float) -> None:
        """Log that the loop has been blocked for `blocked_s`, with its thread's stack and the workflow in this stack."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        context, frames = _context_of(frame), traceback.extract_stack(frame)
        of_loop = [n for n, each in enumerate(frames) if each.filename.startswith(_ASYNCIO)]
        first = max(of_loop[-1] + 1 if of_loop else 0, len(frames) - MAX_FRAMES)
        who = "something"
        if context is not None:
            who = f"workflow {context.workflow} (rollout {context.task_id})"
        # Write the innermost frame first, and all frames on one line: the log escapes line breaks in a message.
        stack = " <- ".join(
            f"{each.filename}:{each.lineno} in {each.name}: {each.line}"
            for each in reversed(frames[first:])
        )
        logger.warning(
            "%s has blocked the event loop of %s for %.0f s; call blocking code with asyncio.to_thread; the blocking code is at %s",
            *(who, self._where, blocked_s, stack),
        )


def _context_of(frame: FrameType | None) -> WorkflowContext | None:
    """Return the context of the workflow that `frame` or one of its callers runs, or None without a workflow."""
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, WorkflowContext):
                return value
        frame = frame.f_back
    return None
