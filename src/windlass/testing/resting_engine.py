"""Engine that generates no tokens, for tests and benchmarks of updates."""

from __future__ import annotations

from typing import final

from windlass.config import PauseMode


@final
class RestingEngine:
    """`EngineHooks` of an engine rank that generates no tokens."""

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Do nothing, because no request runs."""

    def resume(self, deadline_s: float) -> None:
        """Do nothing, because no request was paused."""

    def finalise(self) -> None:
        """Do nothing, because this engine computes no values from weights."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """Do nothing, because this engine generates no tokens."""
