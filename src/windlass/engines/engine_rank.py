"""A rank of somebody else's engine: captured once, in one fleet after another."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import final

from windlass.engines.attach import Attachment, EngineApi, RankHooks, attach
from windlass.engines.capture.capture import Captured
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.envs import control_token
from windlass.errors import ConfigError, UnsupportedLayout

__all__ = ["EngineRank"]

LEAVE_DEADLINE_S = 30.0


@final
class EngineRank:
    """What the process of a rank keeps; one model lives in it.

    `capture` comes first and lets nobody write. Between it and `join` whoever gives these orders
    compares what all ranks have captured; should it die there, the engine is in no fleet.

    The layout is captured once, while the engine still has the weights of its start. Later joins, after
    the controller of the fleet before has ended, use it again: with another controller, transport or
    mode of updates, the engine neither starts nor captures anew.

    Attributes:
        gate: where the engine's main loop and the agent meet.
    """

    def __init__(self) -> None:
        self.gate = QuiesceGate()
        self._first: tuple[AgentSettings, Captured, RankHooks] | None = None
        self._attachment: Attachment | None = None
        self._has_joined = False

    @property
    def captured(self) -> Captured:
        """What `capture` found.

        Raises:
            UnsupportedLayout: it has not been called.
        """
        return self._required()[1]

    @property
    def settings(self) -> AgentSettings:
        """Of the first `capture`; raises as `captured` does."""
        return self._required()[0]

    def _required(self) -> tuple[AgentSettings, Captured, RankHooks]:
        if self._first is None:
            raise UnsupportedLayout("this rank has not captured its layout")
        return self._first

    def capture(
        self,
        settings: AgentSettings,
        rank: int,
        capture: Callable[[], Captured],
        api: Callable[[], EngineApi],
    ) -> CapturedLayout:
        """Return what this rank holds of the checkpoint. Called in the engine's main loop.

        Args:
            settings: `name`, `url`, `checkpoint` and `world_size` are those of the first time that
                this rank has joined a fleet with.
            rank: of this process.
            capture: captures the layout; called once for these.
            api: makes what pauses the engine; called on rank 0, as often.

        Raises:
            UnsupportedLayout: see `capture`; nothing was captured.
            ConfigError: settings that must not change did, or there are more ranks than announced.
        """
        if rank >= settings.world_size:
            raise ConfigError(
                f"--tp x --pp x --dp must be the server's ranks, of which this is number {rank}, "
                f"got {settings.world_size}"
            )
        if self._first is None or (
            not self._has_joined and _identity(self.settings) != _identity(settings)
        ):
            captured = capture()
            hooks = RankHooks(captured, self.gate, api() if rank == 0 else None)
            self._first = settings, captured, hooks
            _freeze_heap()
        self._require_same(settings)
        captured = self.captured
        return CapturedLayout(
            unplaced=captured.unplaced,
            constants=captured.constants,
            repacked=captured.repacked,
            recomputed=captured.recomputed,
            buffer_nbytes=captured.buffer_nbytes,
        )

    def join(self, settings: AgentSettings, rank: int) -> None:
        """Join a fleet, after leaving the one before. Called in the engine's main loop.

        Args:
            settings: as `capture` was given them.
            rank: of this process.

        Raises:
            UnsupportedLayout: nothing has been captured.
            ConfigError: settings that must not change did.
            ProtocolError: see `Attachment.leave`.
            AuthenticationError, PeerTimeout, TransportUnavailable, RegionError: see `attach`.
        """
        self._require_same(settings)
        _, captured, hooks = self._required()
        if self._attachment is not None:
            self._attachment.leave(LEAVE_DEADLINE_S)
            self._attachment = None
        self._attachment = attach(settings, rank, control_token(), captured, hooks)
        self._has_joined = True

    def _require_same(self, settings: AgentSettings) -> None:
        if _identity(self.settings) != _identity(settings):
            raise ConfigError(
                f"join: (name, url, checkpoint, ranks) must be {_identity(self.settings)} as at the "
                f"first time, got {_identity(settings)}"
            )


def _freeze_heap() -> None:
    """Keep the garbage collector from walking what lives as long as the engine.

    The modules that vLLM or SGLang import are 650 000 objects; a full collection takes 0.4 s
    (`benchmarks/bench_heap.py`, 2-core EPYC, idle, 2026-11-21), holds the interpreter lock, and
    would fall due soon after a capture: in the middle of an update as likely as not. vLLM's own
    core does so at its start (`vllm/utils/gc_utils.py`, `freeze_gc_heap`), its workers do not.
    """
    gc.collect()
    gc.freeze()


def _identity(settings: AgentSettings) -> tuple[str, str, str, int]:
    return settings.name, settings.url, settings.checkpoint, settings.world_size
