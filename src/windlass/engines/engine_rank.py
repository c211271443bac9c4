"""A rank of a third-party engine: runs an agent in the rank's process, which captures once and joins fleets in turn.

The agent pauses and resumes the engine by the engine's own HTTP API. Only the engine's main loop knows that all
earlier steps have ended; it reports that through `QuiesceGate`.
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
"""Most seconds of the resume deadline that the agent waits for released loops to leave their block."""


class EngineApi(Protocol):
    """Engine-specific calls that pause and resume an engine. Called on rank 0 only; may block."""

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Stop admission and treat running requests as `mode` says.

        Returns:
            True if the engine stays paused until `resume`; False if blocked loops are enough.
        """
        ...

    def blocks(self, mode: PauseMode) -> bool:
        """Return whether the main loops stay blocked during a pause of this mode.

        A blocked loop runs no steps and does not compete with the agent's thread for the interpreter lock.
        """
        ...

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        """Make the main loop of every rank call `QuiesceGate.quiesced`, or `QuiesceGate.block` with `block`.

        Return when all calls have returned. A call of `QuiesceGate.block` returns at the end of the pause.
        """
        ...

    def resume(self, deadline_s: float) -> None:
        """Resume generation after `pause`. All loops have left `block` by then, unless one is stuck."""
        ...

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version of all tokens that the engine generates from now on."""
        ...


@final
class RankHooks:
    """`EngineHooks` of one rank.

    Args:
        captured: layout that updates derived values; None for an engine without derived values.
        gate: gate between this agent and the engine's main loop.
        api: calls that pause the engine. None on all ranks except the first, and if the trainer pauses and
            resumes the engine and sets its version.
        looks: see `EngineRank`.
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
        """True if this rank pauses and resumes its engine."""
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
        # The thread of the previous pause may still wait for its call to return.
        if self._blocked is not None:
            self._blocked.join(deadline_s)
        # Set this before the call: if no answer arrives, the engine may still have paused.
        before, self._paused = self._paused, True
        self._paused = api.pause(mode, deadline_s) or before
        if not api.blocks(mode):
            api.quiesce(pause_id, deadline_s, block=False)
            return
        self._blocked = threading.Thread(
            target=self._block, args=(api, pause_id, deadline_s), name="windlass-block"
        )
        self._blocked.start()

    def _block(self, api: EngineApi, pause_id: str, deadline_s: float) -> None:
        """Block the loops. Runs in a separate thread because the call lasts as long as the pause."""
        try:
            api.quiesce(pause_id, deadline_s, block=True)
        except WindlassError as error:
            logger.warning("pause %s: the engine did not block its loops", pause_id, exc_info=True)
            self._gate.fail(pause_id, error)

    def resume(self, deadline_s: float) -> None:
        """Resume the engine if it was paused; see `EngineHooks.resume`."""
        self._gate.end()
        if self._api is None or not self._paused:
            return
        end = time.monotonic() + deadline_s
        # A stuck loop must not use up the deadline: it resumes later, when it leaves its block.
        if self._blocked is not None:
            self._blocked.join(min(RELEASE_S, deadline_s / 2))
            self._blocked = None
        self._api.resume(end - time.monotonic())
        self._paused = False

    def finalise(self) -> None:
        if self._captured is not None:
            self._captured.finalise()

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the engine's version; see `EngineHooks.set_version`.

        An engine that its own routes have paused runs no step. Release its loop first: it may need the loop for this.
        """
        if self._paused:
            self._gate.end()
        if self._api is not None:
            self._api.set_version(version, deadline_s)


@final
class EngineRank:
    """State of one rank's process, which has one model.

    `capture` runs first and gives no peer access to memory. Before `join`, the launcher (or plugin) compares the
    captured layouts of all ranks. If it dies in between, the engine is in no fleet.

    The rank captures its layout once, while the engine still has the weights of its start. Later joins reuse
    the layout after the previous fleet's controller has ended. The engine therefore needs no new start and no
    new capture for another controller, transport or update mode.

    `looks` is True if the agent calls `Captured.look` once the engine is quiesced, False if the engine's loop does.
    """

    def __init__(self, *, looks: bool = True) -> None:
        self._looks = looks
        self.gate = QuiesceGate()
        self._first: tuple[AgentSettings, Captured, RankHooks] | None = None
        self._client: EngineClient | None = None
        self._has_joined = False

    @property
    def captured(self) -> Captured:
        """Captured layout. Raises UnsupportedLayout before `capture` has been called."""
        return self._required()[1]

    @property
    def settings(self) -> AgentSettings:
        """Settings of the first `capture`. Raises UnsupportedLayout before `capture` has been called."""
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
        """Capture this rank's layout, or reuse an earlier capture, and return its summary.

        The engine's main loop calls this.

        Args:
            settings: settings of the join. `name`, `url`, `checkpoint` and `world_size` must not change after the
                first join.
            rank: rank of this process.
            capture: function that captures the layout; called only if these settings have no capture yet.
            api: factory of the calls that pause the engine; called on rank 0 after each capture. None if the trainer
                blocks the engine's loops by its own calls to `QuiesceGate.block`; see `Hello.comes_to_rest`.

        Raises:
            UnsupportedLayout: see `capture`; this rank keeps no new layout.
            ConfigError: a fixed setting has changed, or the engine has more ranks than `world_size`.
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
        """Leave the previous fleet and join a new one. The engine's main loop calls this.

        This registers the captured memory. If the rank has a GPU, the caller has made it the current device.

        Raises:
            UnsupportedLayout: `capture` has not been called.
            ConfigError: a fixed setting has changed.
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
        # Peers read repacked parameters from their buffers, which have the last received version.
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
        """Version of the current fleet that this rank serves; -1 before the first."""
        return -1 if self._client is None else self._client.agent.served_version

    def leave(self, deadline_s: float) -> None:
        """Leave the current fleet, if any, and withdraw the rank's memory. The fleet's controller must have ended.

        Raises:
            ProtocolError: the controller is still connected after `deadline_s`, so a trainer may be
                writing; or the weights may be mixed, and only an update by this fleet can repair them.
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
    """Exclude all current objects from garbage collection, because they live as long as the engine.

    vLLM or SGLang import modules with 650,000 objects. A full collection takes 0.4 s (`benchmarks/bench_heap.py`,
    2-core EPYC, idle, 2026-11-21), holds the interpreter lock, and may happen during an update.
    """
    gc.collect()
    gc.freeze()


def _identity(settings: AgentSettings) -> tuple[str, str, str, int]:
    return settings.name, settings.url, settings.checkpoint, settings.world_size


def allocation_of(address: int) -> tuple[int, int] | None:
    """Return start and bytes of the GPU allocation around an address; None for host memory."""
    return memory_on(gpu_of(address)).allocation(address)
