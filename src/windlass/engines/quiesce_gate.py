"""Synchronisation of an engine's main loop with the agent in its process."""

from __future__ import annotations

import threading
from typing import final

from windlass.errors import PeerTimeout, WindlassError


@final
class QuiesceGate:
    """Meeting point of one rank's main loop and its agent.

    The loop passes (`quiesced`) or stays (`block`) while the agent asks for that pause. Loop and agent may
    arrive in either order.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached = self._asked = self._ended = ""
        self._blocked = False
        self._num_asked = 0
        self._failed: dict[str, WindlassError] = {}

    def quiesced(self, pause_id: str) -> None:
        """Record that the main loop, which is already paused, has ended its last step. Called by the main loop."""
        with self._changed:
            self._reached = pause_id
            self._changed.notify_all()

    def block(self, pause_id: str, deadline_s: float, longest_s: float | None = None) -> None:
        """Block the main loop after its last step until the pause ends. Called by the main loop.

        If the agent asks for another pause during the block, the blocked loop counts as quiesced for that
        one. If the agent has asked for no pause after `deadline_s`, the loop continues, and the pause has
        failed. Once the agent has asked, the loop stays blocked: to run would be to serve weights that may be
        torn. When the agent loses its controller it ends the pause, unless the weights may be torn or no
        version was ever published.

        `deadline_s` is the time for the agent to ask. `longest_s` is for an engine that is itself paused, so
        that its loop runs no step afterwards: the loop leaves after `longest_s` in each of the two waits,
        whatever happens.
        """
        with self._changed:
            self._blocked = True
            self._reached = self._asked or pause_id
            self._changed.notify_all()
            until_asked_s = deadline_s if longest_s is None else min(deadline_s, longest_s)
            # A pause may have begun and ended before this thread wakes.
            before = self._num_asked
            self._changed.wait_for(
                lambda: self._asked or self._num_asked > before or pause_id == self._ended,
                until_asked_s,
            )
            self._changed.wait_for(lambda: not self._asked, longest_s)
            self._blocked = False

    def ask(self, pause_id: str) -> bool:
        """Ask for a pause, before `wait`; return whether the loop is blocked already. Called by the agent."""
        with self._changed:
            self._asked = pause_id
            self._num_asked += 1
            if self._blocked:
                self._reached = pause_id
            self._changed.notify_all()
            return self._blocked

    def end(self) -> None:
        """End the pause that the agent asked for, after success or failure. Idempotent."""
        with self._changed:
            if self._asked:
                self._ended, self._asked = self._asked, ""
            self._changed.notify_all()

    def wait_ended(self, pause_id: str) -> None:
        """Return once the agent no longer asks for this pause; like `block`, this has no deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked != pause_id)

    def fail(self, pause_id: str, error: WindlassError) -> None:
        """Give up a pause because the main loop will not be quiesced for it; `wait` raises `error`."""
        with self._changed:
            self._failed = {pause_id: error}
            self._changed.notify_all()

    def wait(self, pause_id: str, deadline_s: float) -> None:
        """Return once the main loop is quiesced for this pause.

        Raises:
            PeerTimeout: the loop was not quiesced within `deadline_s`.
            WindlassError: the error that `fail` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: pause_id in (self._reached, *self._failed), deadline_s)
            if self._reached == pause_id:
                return
            raise self._failed.get(pause_id) or PeerTimeout(
                f"pause {pause_id}: the engine's loop is not quiesced after {deadline_s} s"
            )
