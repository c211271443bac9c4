"""Synchronisation of an engine rank's main loop (which runs the model) with the agent in the same process.

The loop is quiesced for a pause when the last step before the pause has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from windlass.errors import PeerTimeout, WindlassError


@final
class QuiesceGate:
    """Synchronisation of the main loop and the agent of one rank.

    The agent calls `ask`, `wait` and, after the update, `end`. The main loop calls `quiesced`, which returns at
    once, or `block`, which returns after `end`. The main loop may call before or after the agent.

    Args:
        on_block: function that the gate calls after each change of `is_blocked`. The function may read the gate.
    """

    def __init__(self, on_block: Callable[[], None] = lambda: None) -> None:
        self._on_block = on_block
        self.changed = threading.Condition()
        """Condition that guards the state of the gate. Each change notifies it."""
        # Ids of three pauses, each empty for none: the pause for which the loop is quiesced, the pause that the agent asks
        # for now, and the pause that ended last.
        self._reached = self._asked = self._ended = ""
        self._blocked = False
        self._num_asked = 0
        self._failed: dict[str, WindlassError] = {}

    def quiesced(self, pause_id: str) -> None:
        """Record that the loop has ended its last step before the pause, and wake the agent in `wait`. Called by the main loop."""
        with self.changed:
            self._reached = pause_id
            self.changed.notify_all()

    def block(self, pause_id: str, deadline_s: float, longest_s: float | None = None) -> None:
        """Block the main loop after its last step until the agent ends the pause. Called by the main loop.

        If the agent asks for another pause while the loop is blocked, the loop is quiesced for that pause too.

        Args:
            pause_id: id of the pause.
            deadline_s: seconds to wait until the agent calls `ask`. If the agent does not call `ask` in this time, the
                loop continues and the pause fails. After `ask`, the loop waits without a limit (but see `longest_s`),
                because a step during an update could use weights of two versions.
            longest_s: maximum seconds of each of the two waits (for `ask`, for `end`); None for no maximum. Set this
                only if the engine's scheduler is paused, so that the loop runs no step after an early return.
        """
        with self.changed:
            self._blocked = True
            self._reached = self._asked or pause_id
            self.changed.notify_all()
            # A pause may begin or end before this thread waits, so store whether one has begun, and count the calls of `ask`.
            has_begun, before = bool(self._asked), self._num_asked
        self._on_block()
        until_asked_s = deadline_s if longest_s is None else min(deadline_s, longest_s)
        with self.changed:
            if not has_begun:
                self.changed.wait_for(
                    lambda: self._asked or self._num_asked > before or pause_id == self._ended,
                    until_asked_s,
                )
            self.changed.wait_for(lambda: not self._asked, longest_s)
            self._blocked = False
        self._on_block()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the main loop as blocked inside the `with` block.

        Call this if the engine runs its steps in the calling thread, because this thread runs no step inside the block.
        If a pause is open when the block ends, it stays open until the agent ends it.
        """
        with self.changed:
            self._blocked, self._reached = True, self._asked
            self.changed.notify_all()
        self._on_block()
        try:
            yield
        finally:
            with self.changed:
                self._blocked = False
            self._on_block()

    @property
    def is_asked(self) -> bool:
        """True from `ask` until `end`."""
        with self.changed:
            return bool(self._asked)

    @property
    def is_blocked(self) -> bool:
        """True while the main loop is in `block` or `held`."""
        with self.changed:
            return self._blocked

    def ask(self, pause_id: str) -> bool:
        """Ask for a pause; return whether the loop is already blocked. The agent calls this before `wait`."""
        with self.changed:
            self._asked = pause_id
            self._num_asked += 1
            if self._blocked:
                self._reached = pause_id
            self.changed.notify_all()
            return self._blocked

    def end(self) -> None:
        """End the pause that the agent asked for, after success or failure, and wake a blocked main loop. Idempotent."""
        with self.changed:
            if self._asked:
                self._ended, self._asked = self._asked, ""
            self.changed.notify_all()

    def wait_ended(self, pause_id: str) -> None:
        """Wait, without a deadline, until the agent no longer asks for this pause."""
        with self.changed:
            self.changed.wait_for(lambda: self._asked != pause_id)

    def fail(self, pause_id: str, error: WindlassError) -> None:
        """Record that the main loop will not be quiesced for this pause, and wake the agent in `wait`.

        `wait` then raises `error`. If `pause_id` is empty, this applies to the pause that the agent has asked for.
        """
        with self.changed:
            self._failed = {pause_id or self._asked: error}
            self.changed.notify_all()

    def wait(self, pause_id: str, deadline_s: float) -> None:
        """Wait until the main loop is quiesced for this pause. Called by the agent.

        Raises:
            PeerTimeout: the loop was not quiesced within `deadline_s`.
            WindlassError: the error that another thread passed to `fail`.
        """
        with self.changed:
            self.changed.wait_for(lambda: pause_id in (self._reached, *self._failed), deadline_s)
            if self._reached == pause_id:
                return
            raise self._failed.get(pause_id) or PeerTimeout(
                f"pause {pause_id}: the engine's loop is not quiesced after {deadline_s} s"
            )
