"""Sleep of one rank of a third-party engine: the engine's own sleep mode frees and maps the memory of the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from windlass.config import PauseMode


@final
class RankSleep:
    """State of the engine's sleep mode in one rank.

    The engine's main loop makes the rank sleep and wake, and writes `asleep`, `is_lost` and `missed`. The agent's thread
    reads them.

    Args:
        on_change: function to call after each change of `is_lost`.

    Attributes:
        is_enabled: whether the engine was started with its sleep mode.
        asleep: kinds of memory that have no pages now, by the engine's names.
        missed: reason why an update cannot fill all values that the engine computed from its weights before it slept; empty
            if an update can.
        caches_nbytes: bytes that the rank must map before it serves, not counting its weights; 0 if they are not known.
        failure: reason why the last attempt to wake memory failed; empty if it did not fail.
        ask: function that makes every rank of the engine sleep. Its arguments are a pause mode and a deadline. None if
            another rank or only the trainer can do so.
    """

    WEIGHTS = "weights"
    """Name of the memory of the weights in `asleep`; both engines use it."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.is_enabled = self._is_lost = False
        self.asleep: frozenset[str] = frozenset()
        self.failure = self.missed = ""
        self.caches_nbytes = 0
        self.ask: Callable[[PauseMode, float], None] | None = None

    @property
    def is_lost(self) -> bool:
        """True if the values of the weights are lost, and no round has filled the weights since."""
        return self._is_lost

    @is_lost.setter
    def is_lost(self, is_lost: bool) -> None:
        is_changed, self._is_lost = is_lost is not self._is_lost, is_lost
        if is_changed:
            self._on_change()

    @property
    def is_at_rest(self) -> bool:
        """True if the engine's scheduler is paused, because memory sleeps or the weights are lost."""
        return bool(self.asleep) or self.is_lost

    @property
    def is_empty(self) -> bool:
        """True if the weights have no values: they sleep or are lost."""
        return self.WEIGHTS in self.asleep or self.is_lost
