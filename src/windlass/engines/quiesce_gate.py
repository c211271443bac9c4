"""Where the main loop of somebody else's engine and the agent in its process meet."""

from __future__ import annotations

import threading
from typing import final

from windlass.errors import PeerTimeout, WindlassError


@final
class QuiesceGate:
    """One per rank.

    The loop comes past (`quiesced`) or stays (`block`) while the agent has asked for that pause. The two
    may come in either order.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached = self._asked = self._ended = ""
        self._blocked = False
        self._num_asked = 0
        self._failed: dict[str, WindlassError] = {}

    def quiesced(self, pause_id: str) -> None:
        """Called by the engine's main loop, which is paused already, after its last step."""
        with self._changed:
            self._reached = pause_id
            self._changed.notify_all()

    def block(self, pause_id: str, deadline_s: float, longest_s: float | None = None) -> None:
        """Called by the main loop after its last step; it stays here until the pause ends.

        A pause that is asked for meanwhile takes the loop over as it is. It leaves if this rank's
        agent has asked for none after `deadline_s`: then the pause has failed. Once asked it stays:
        to run on would be to serve weights that may be torn. The agent ends the pause when it loses
        its controller, unless they may be, or none were ever published.

        `deadline_s`: for the agent to ask. `longest_s`: where the engine itself is paused, so that its loop runs no
        step after this either: the loop leaves this long after it was asked, whatever happens.
        """
        with self._changed:
            self._blocked = True
            self._reached = self._asked or pause_id
            self._changed.notify_all()
            until_asked_s = deadline_s if longest_s is None else min(deadline_s, longest_s)
            before = self._num_asked  # a pause may have begun and ended when this thread wakes
            self._changed.wait_for(
                lambda: self._asked or self._num_asked > before or pause_id == self._ended,
                until_asked_s,
            )
            self._changed.wait_for(lambda: not self._asked, longest_s)
            self._blocked = False

    def ask(self, pause_id: str) -> bool:
        """Called by the agent before it waits; whether the loop is blocked already."""
        with self._changed:
            self._asked = pause_id
            self._num_asked += 1
            if self._blocked:
                self._reached = pause_id
            self._changed.notify_all()
            return self._blocked

    def end(self) -> None:
        """End the pause that was asked for: it is over, or has failed. Idempotent."""
        with self._changed:
            if self._asked:
                self._ended, self._asked = self._asked, ""
            self._changed.notify_all()

    def wait_ended(self, pause_id: str) -> None:
        """Return once this pause is asked for no more: `end` has no deadline, see `block`."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked != pause_id)

    def fail(self, pause_id: str, error: WindlassError) -> None:
        """Give up a pause: the main loop will not be quiesced for it; `wait` raises why."""
        with self._changed:
            self._failed = {pause_id: error}
            self._changed.notify_all()

    def wait(self, pause_id: str, deadline_s: float) -> None:
        """Return once the main loop is quiesced for this pause.

        Raises:
            PeerTimeout: it was not within `deadline_s`.
            WindlassError: that of `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: pause_id in (self._reached, *self._failed), deadline_s)
            if self._reached == pause_id:
                return
            raise self._failed.get(pause_id) or PeerTimeout(
                f"pause {pause_id}: the engine's loop is not quiesced after {deadline_s} s"
            )
