"""A clock that moves only when told to, for everything that takes a clock as an argument."""

from __future__ import annotations

from typing import final

from windlass.errors import ConfigError

__all__ = ["VirtualClock"]


@final
class VirtualClock:
    """Call it for the time in seconds, as `time.perf_counter`; `advance` moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ConfigError: `seconds` is negative.
        """
        if seconds < 0:
            raise ConfigError(f"VirtualClock.advance: seconds must be >= 0, got {seconds}")
        self._now_s += seconds
