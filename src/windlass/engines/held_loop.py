"""An engine whose loops are held between two steps by whoever updates it, through calls of its own."""

from __future__ import annotations

from typing import final

from windlass.config import PauseMode


@final
class HeldLoop:
    """`EngineApi` of an engine that its trainer has stopped, or is about to.

    The trainer calls the engine when the round begins, or what writes into memory apart is verified; the
    call comes to `QuiesceGate.block` in every rank's loop, and stays until the agent lets go. So the agent
    pauses and resumes nothing, and stamps nothing: the trainer does, by the engine's own routes.
    """

    def pause(self, _mode: PauseMode, _deadline_s: float) -> bool:
        """See `EngineApi.pause`: what becomes of running requests is the trainer's to say."""
        return False

    def blocks(self, _mode: PauseMode) -> bool:
        return True

    def block(self, _pause_id: str, _deadline_s: float) -> None:
        """See `EngineApi.block`: the call is on its way, and `QuiesceGate.wait` has the deadline."""

    def quiesce(self, _pause_id: str, _deadline_s: float) -> None:
        """See `EngineApi.quiesce`: never called, see `blocks`."""

    def resume(self, _deadline_s: float) -> None:
        """See `EngineApi.resume`."""

    def set_version(self, _version: int, _deadline_s: float) -> None:
        """See `EngineApi.set_version`."""
