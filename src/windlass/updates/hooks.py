"""What an engine must offer so that an agent inside it can update its weights."""

from __future__ import annotations

from typing import Protocol

from windlass.config import PauseMode

__all__ = ["EngineHooks"]


class EngineHooks(Protocol):
    """One rank of a live engine, seen by the agent thread that lives in the same process.

    Every method is called from the agent's thread while the engine's own loop runs in another.
    """

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Stop this rank; return once no kernel of it reads weights or writes caches.

        Every rank of an engine gets the same `pause_id`, so that a rank cannot take an older pause
        for this one.

        Rank 0 also stops admission and applies `mode` to running requests. Idempotent.

        Raises:
            PeerTimeout: the rank did not come to rest within `deadline_s`.
        """
        ...

    def resume(self, deadline_s: float) -> None:
        """Go on generating. Idempotent.

        Raises:
            WindlassError: it does not now, or has not said that it does within `deadline_s`. It gets
                no traffic then, and is asked again.
        """
        ...

    def finalise(self) -> None:
        """Recompute state that is derived from weights and drop caches of old weights."""
        ...

    def set_version(self, version: int, deadline_s: float) -> None:
        """Stamp the version that tokens generated from now on carry. Idempotent; before `resume`.

        Raises:
            WindlassError: as `resume`.
        """
        ...
