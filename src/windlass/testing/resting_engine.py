"""Engine that generates nothing, for tests and benchmarks that only measure updates."""

from __future__ import annotations

from typing import final

from windlass.config import PauseMode


@final
class RestingEngine:
    """`EngineHooks` of a rank that generates nothing."""

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Do nothing, because no request runs."""

    def resume(self, deadline_s: float) -> None:
        """Do nothing, because no request was paused."""

    def finalise(self) -> None:
        """Do nothing, because this engine derives no data from weights."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """Do nothing, because this engine generates no tokens that would carry the version."""
