"""A rank of somebody else's engine: an agent in its process, captured once, in one fleet after another.

The engine's own HTTP API has it pause and resume; what only its main loop can say (that every step
before this one is over) comes through `QuiesceGate`.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, final

import msgspec

from windlass.config import PauseMode
from windlass.engines.capture.description import Captured
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.errors import ConfigError, ProtocolError, UnsupportedLayout, WindlassError
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.place import memory_on
from windlass.transfer.registration import stretches
from windlass.transports.registry import create_transport, parse_transport

logger = logging.getLogger(__name__)
LEAVE_DEADLINE_S = 30.0
RELEASE_S = 5.0
"""For a loop that was let go, of the time to resume."""


class EngineApi(Protocol):
    """The engine's own way to be paused; called on rank 0 only, may block."""

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Stop admission and treat running requests as `mode` says.

        Returns:
            Whether the engine is paused now, until `resume`; False where loops that are blocked are enough.
        """
        ...

    def blocks(self, mode: PauseMode) -> bool:
        """Whether loops are blocked for as long as a pause of this mode lasts.

        A loop that is blocked neither runs steps nor takes the interpreter from the agent's thread.
        """
        ...

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        """Make the main loop of every rank call its `QuiesceGate`: `quiesced`, or `block`.

        Returns when all have; with `block`, when all have left it.
        """
        ...

    def resume(self, deadline_s: float) -> None:
        """Go on generating after `pause`, and after loops have left `block`, unless a loop is stuck."""
        ...

    def set_version(self, version: int, deadline_s: float) -> None:
        """Stamp what is generated from now on."""
        ...


@final
class RankHooks:
    """`EngineHooks` of one rank.

    `captured` brings derived values up to date; None for an engine that derives none. `api` is None on all ranks but the
    first, and where the trainer has the engine pause and resume, and stamps it. `looks`: see `EngineRank`.
    """

    def __init__(
        self,
        captured: Captured | None,
        gate: QuiesceGate,
        api: EngineApi | None,
        *,
        looks: bool = True,
    ) -> None:
        self._captured, self._gate, self._api, self._looks = captured, gate, api, looks
        self._paused = False
        self._blocked: threading.Thread | None = None

    @property
    def has_api(self) -> bool:
        """Whether this rank brings its engine to rest."""
        return self._api is not None

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        blocked = self._gate.ask(pause_id)
        try:
            if not blocked and self._api is not None:
                self._stop(self._api, pause_id, mode, deadline_s)
            self._gate.wait(pause_id, deadline_s)
            if self._captured is not None and self._looks:
                self._captured.look()
        except WindlassError:
            self._gate.end()
            raise

    def _stop(self, api: EngineApi, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        if self._blocked is not None:  # it may still be on its way out
            self._blocked.join(deadline_s)
        before, self._paused = self._paused, True  # also if no answer comes: it may have stopped
        self._paused = api.pause(mode, deadline_s) or before
        if not api.blocks(mode):
            api.quiesce(pause_id, deadline_s, block=False)
            return
        self._blocked = threading.Thread(
            target=self._block, args=(api, pause_id, deadline_s), name="windlass-block"
        )
        self._blocked.start()

    def _block(self, api: EngineApi, pause_id: str, deadline_s: float) -> None:
        """Have loops blocked, in a thread of its own: the call lasts as long as the pause."""
        try:
            api.quiesce(pause_id, deadline_s, block=True)
        except WindlassError as error:
            logger.warning("pause %s: the engine did not block its loops", pause_id, exc_info=True)
            self._gate.fail(pause_id, error)

    def resume(self, deadline_s: float) -> None:
        """See `EngineHooks.resume`; an engine that was not paused is left alone."""
        self._gate.end()
        if self._api is None or not self._paused:
            return
        end = time.monotonic() + deadline_s
        if self._blocked is not None:  # a loop that is stuck hears `resume` later
            self._blocked.join(min(RELEASE_S, deadline_s / 2))
            self._blocked = None
        self._api.resume(end - time.monotonic())
        self._paused = False

    def finalise(self) -> None:
        if self._captured is not None:
            self._captured.finalise()

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineHooks.set_version`.

        An engine that is paused by its own routes runs no step, and may need its loop for this.
        """
        if self._paused:
            self._gate.end()
        if self._api is not None:
            self._api.set_version(version, deadline_s)


@final
class EngineRank:
    """What the process of a rank keeps; one model lives in it.

    `capture` comes first and lets nobody write. Between it and `join` whoever gives these orders
    compares what all ranks have captured; should it die there, the engine is in no fleet.

    The layout is captured once, while the engine still has the weights of its start. Later joins, after
    the controller of the fleet before has ended, use it again: with another controller, transport or
    mode of updates, the engine neither starts nor captures anew.

    `looks`: whether the agent calls `Captured.look` once the engine is quiesced; if not, the engine's loop does so.
    """

    def __init__(self, *, looks: bool = True) -> None:
        self._looks = looks
        self.gate = QuiesceGate()
        self._first: tuple[AgentSettings, Captured, RankHooks] | None = None
        self._client: EngineClient | None = None
        self._has_joined = False

    @property
    def captured(self) -> Captured:
        """Return what `capture` found; raise UnsupportedLayout if it has not been called."""
        return self._required()[1]

    @property
    def settings(self) -> AgentSettings:
        """Return those of the first `capture`; raises as `captured` does."""
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
        api: Callable[[], EngineApi] | None = None,
    ) -> CapturedLayout:
        """Return what this rank holds of the checkpoint. Called in the engine's main loop.

        Args:
            settings: `name`, `url`, `checkpoint` and `world_size` stay those of the first join.
            rank: of this process.
            capture: captures the layout; called once for these.
            api: makes what pauses the engine; called on rank 0, as often. None where the trainer holds the
                engine's loops by calls of its own, which come to `QuiesceGate.block`; see `Hello.comes_to_rest`.

        Raises:
            UnsupportedLayout: see `capture`; nothing was captured.
            ConfigError: settings that must not change did, or there are more ranks than announced.
        """
        if rank >= settings.world_size:
            raise ConfigError(
                f"--tp x --pp x --dp must be the server's ranks, of which this is number {rank}, "
                f"got {settings.world_size}"
            )
        seconds: dict[str, float] = {}
        if self._first is None or (
            not self._has_joined and _identity(self.settings) != _identity(settings)
        ):
            begun = time.perf_counter()
            captured = capture()
            own_api = api() if api and rank == 0 else None
            hooks = RankHooks(captured, self.gate, own_api, looks=self._looks)
            self._first = settings, captured, hooks
            _freeze_heap()
            seconds = {**captured.seconds, "all": time.perf_counter() - begun}
        self._require_same(settings)
        found = msgspec.convert(self.captured, CapturedLayout, from_attributes=True)
        return msgspec.structs.replace(found, seconds=seconds)

    def join(self, settings: AgentSettings, rank: int, token: str) -> None:
        """Join a fleet, after leaving the one before. Called in the engine's main loop.

        The captured memory is registered; the rank's GPU, if it has one, is the current device.

        Raises:
            UnsupportedLayout: nothing has been captured.
            ConfigError: settings that must not change did.
            ProtocolError: see `leave`; or the controller speaks another protocol.
            AuthenticationError, PeerTimeout: see `AgentChannel.connect`.
            TransportUnavailable, RegionError: the transport cannot serve this memory.
        """
        self._require_same(settings)
        _, captured, hooks = self._required()
        self.leave(LEAVE_DEADLINE_S)
        transport = create_transport(
            parse_transport(settings.transport),
            towards=settings.controller,
            memory_at=captured.addresses[0] if captured.addresses else 0,
        )
        begun = time.perf_counter()
        sizes = [parameter.nbytes for parameter in captured.manifest.parameters]
        spans = zip(captured.addresses, sizes, strict=True)
        regions = transport.register_all(stretches(spans, allocation_of))
        # Repacked parameters are read from their buffers, which hold what was last received.
        self._client = EngineClient(
            EngineWeights(
                manifest=captured.manifest,
                addresses=captured.addresses,
                regions=regions,
                register_s=time.perf_counter() - begun,
            ),
            transport=transport,
            hooks=hooks,
            controller=settings.controller,
            token=token,
            world_size=settings.world_size,
            url=settings.url if rank == 0 else "",
            serves_own_weights=settings.serves_own_weights,
            comes_to_rest=hooks.has_api,
        )
        self._has_joined = True

    @property
    def served_version(self) -> int:
        """That this rank holds of the fleet that it is in; -1 for none."""
        return -1 if self._client is None else self._client.agent.served_version

    def leave(self, deadline_s: float) -> None:
        """Withdraw the rank's memory from its fleet, whose controller has ended; if it is in one.

        Raises:
            ProtocolError: the controller is still connected after `deadline_s`, so that a trainer
                may be writing; or the weights may be mixed, which only this fleet can mend.
        """
        if self._client is None:
            return
        if not self._client.wait_disconnected(deadline_s):
            raise ProtocolError(
                "leave: the controller must be stopped before its engine joins another, "
                f"got one that is connected after {deadline_s} s"
            )
        if self._client.agent.mixed_weights:
            raise ProtocolError(
                "leave: the weights of this rank may be mixed: start the engine anew, or have its "
                "controller back"
            )
        self._client.close()
        self._client = None

    def _require_same(self, settings: AgentSettings) -> None:
        if _identity(self.settings) != _identity(settings):
            raise ConfigError(
                f"join: (name, url, checkpoint, ranks) must be {_identity(self.settings)} as at the "
                f"first time, got {_identity(settings)}"
            )


def _freeze_heap() -> None:
    """Keep the garbage collector from walking what lives as long as the engine.

    The modules that vLLM or SGLang import are 650 000 objects. A full collection, in the middle of an update as likely
    as not, takes 0.4 s (`benchmarks/bench_heap.py`, 2-core EPYC, idle, 2026-11-21) and holds the interpreter lock.
    """
    gc.collect()
    gc.freeze()


def _identity(settings: AgentSettings) -> tuple[str, str, str, int]:
    return settings.name, settings.url, settings.checkpoint, settings.world_size


def allocation_of(address: int) -> tuple[int, int] | None:
    """Return start and bytes of the GPU allocation around an address; None for host memory."""
    return memory_on(gpu_of(address)).allocation(address)
