"""When something that failed in the fleet is tried again: the waits, and the timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

__all__ = ["MAX_ATTEMPTS", "Timers", "backoff_s"]

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_ATTEMPTS = 8
"""For one process and one cause: each attempt holds up rounds, which wait for it."""


def backoff_s(num_failed: int) -> float:
    """Seconds to wait after so many failures: 1, 2, 4, ... `MAX_BACKOFF_S`."""
    return min(FIRST_BACKOFF_S * 2.0 ** (num_failed - 1), MAX_BACKOFF_S)


@final
class Timers:
    """Named timers of the running loop."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._timers)

    def call_later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call once, `delay_s` from now, in place of an earlier call of that name.

        Never after `close`: connections end after it, and what their loss begins must not last.
        """
        self.cancel(name)
        if self._closed:
            return

        def due() -> None:
            self._timers.pop(name, None)
            call()

        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, due)

    def cancel(self, name: str) -> None:
        """Nothing of that name will be called. Idempotent."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Nothing is called any more. Idempotent."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
