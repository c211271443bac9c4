"""A rank of a third-party engine: captures its layout once, then joins one fleet after another.

In a round (one update), the controller of the fleet pauses the engine, and peers write a version into its weights.

The agent runs in a thread of the rank's process. It pauses and resumes the engine through the engine's own HTTP API.
Only the engine's main loop knows when its last step has ended; the loop reports the end through `QuiesceGate`.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol, final

import msgspec

from windlass.config import PauseMode
from windlass.control.engine_state import HoldCause
from windlass.engines.capture.description import Captured
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.held_server import HeldRecord, note_held
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.rank_sleep import RankSleep
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    ProtocolError,
    UnsupportedLayout,
    WindlassError,
)
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.place import memory_on
from windlass.transfer.registration import stretches
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

logger = logging.getLogger(__name__)
LEAVE_DEADLINE_S = 1.0
"""Seconds that a join waits for the controller of the previous fleet to disconnect. The main loop waits, so the engine
generates no tokens in this time."""
RELEASE_S = 5.0
"""Maximum seconds that a resume waits for the main loops to return from `QuiesceGate.block`."""


class EngineApi(Protocol):
    """Engine-specific calls that pause and resume an engine. Only rank 0 makes these calls; they may block."""

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Stop the engine from starting requests, and abort, retract or keep its running requests (see `PauseMode`).

        Returns:
            True if the engine's scheduler is paused until `resume`. False if the scheduler cannot be
            paused. The engine then stops only while its main loops are blocked.

        Raises:
            ConfigError: the engine cannot pause in this mode.
            PeerUnreachable, PeerTimeout: the engine did not pause within `deadline_s`.
        """
        ...

    def blocks(self, mode: PauseMode) -> bool:
        """Return whether to block the main loops during a pause of this mode.

        A blocked loop runs no steps and does not compete with the agent's thread for Python's GIL.
        """
        ...

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        """Make the main loop of every rank call `QuiesceGate.block` if `block` is True, else `QuiesceGate.quiesced`.

        Return when all these calls have returned. `QuiesceGate.block` returns at the end of the pause.

        Raises:
            ConfigError: the agent cannot call the main loops of this engine.
            PeerUnreachable, PeerTimeout: a main loop did not make its call, or did not do so in time.
        """
        ...

    def resume(self, deadline_s: float) -> None:
        """Resume generation after `pause`.

        The caller must call `QuiesceGate.end` before this call, so that main loops return from `QuiesceGate.block`.

        Raises:
            ConfigError: the agent cannot call the main loops of this engine.
            PeerUnreachable, PeerTimeout: the engine did not resume within `deadline_s`.
        """
        ...

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version that the engine reports for each token from now on.

        Raises:
            ConfigError: the agent cannot call the main loops of this engine.
            PeerUnreachable, PeerTimeout: the engine did not set the version within `deadline_s`.
        """
        ...


@final
class RankHooks:
    """`EngineHooks` of one rank, and its `Sleeper`.

    Args:
        captured: captured layout, which recomputes derived values after an update; None for an engine that
            derives no values from its weights.
        gate: gate between this rank's agent and the engine's main loop.
        api: calls that pause the engine. None if another rank makes them, or if the trainer pauses and resumes the
            engine and sets the version.
        looks: see `EngineRank`.
        sleep: state of the engine's sleep mode; None if the engine has none.
        kept: function that returns the names of the checkpoint tensors that updates do not write.

    Attributes:
        turn: lock that guards `in_round`; the main loop holds it while the rank falls asleep.
        in_round: whether a round may fill the weights, so that the rank must not sleep.
    """

    def __init__(
        self,
        captured: Captured | None,
        gate: QuiesceGate,
        api: EngineApi | None,
        *,
        looks: bool = True,
        sleep: RankSleep | None = None,
        kept: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._kept = kept
        self._captured, self._gate, self._api, self._looks = captured, gate, api, looks
        self._sleep = sleep or RankSleep()
        self._paused = False
        self._blocked: threading.Thread | None = None
        self.turn, self.in_round = threading.Lock(), False

    @property
    def has_api(self) -> bool:
        """True if this rank pauses and resumes the engine for all ranks."""
        return self._api is not None

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Pause the engine, wait until this rank is quiesced, and search for new derived values.

        Set `in_round`, so that the rank refuses to sleep until `round_ended`. If the pause fails, reset `in_round`, and end
        the pause at the gate, which releases a blocked main loop. If an earlier pause has not ended, the main loop stays
        blocked, because the weights may be of two versions.

        Raises:
            PeerTimeout: the rank was falling asleep, and did not finish within `deadline_s`.
            WindlassError: the engine did not pause, the main loop was not quiesced within `deadline_s`, or
                `Captured.look` found a value that an update cannot refill.
        """
        if not self.turn.acquire(timeout=deadline_s):
            raise PeerTimeout(f"pause: this rank was still falling asleep after {deadline_s} s")
        self.in_round = True
        self.turn.release()
        is_held = self._gate.is_asked
        blocked = self._gate.ask(pause_id)
        try:
            if not blocked and self._api is not None:
                self._stop(self._api, pause_id, mode, deadline_s)
            self._gate.wait(pause_id, deadline_s)
            if self._captured is not None and self._looks:
                self._look(self._captured)
        # The search reads the engine's own objects, which may raise any exception.
        except BaseException:
            if not is_held:
                self._gate.end()
            self.in_round = False
            raise

    def _look(self, captured: Captured) -> None:
        """Search for new derived values (`Captured.look`). If the weights are lost, check the result of an earlier search.

        The main loop made the earlier search just before it freed the weights, and recorded any problem in
        `RankSleep.missed`.

        Raises:
            UnsupportedLayout: an update cannot refill a derived value, or the engine has moved a tensor into which updates
                write.
        """
        if not self._sleep.is_lost:
            captured.look()
            return
        if self._sleep.missed:
            raise UnsupportedLayout(self._sleep.missed)
        captured.check_places()

    def stays_awake(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing.

        Callers use it only while the rank sends its weights, and a rank that can sleep never sends (`can_send` is False).
        """
        return nullcontext()

    def round_ended(self) -> None:
        """Record that no round runs, so that the rank may sleep again; see `Sleeper.round_ended`."""
        self.in_round = False

    def _stop(self, api: EngineApi, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Pause the engine, and make its main loops report to `QuiesceGate` when their last step has ended.

        If `api.blocks(mode)` is True, start a thread that blocks the loops, and do not wait for the loops.
        """
        # The thread that blocked the loops for the previous pause may not have ended yet.
        if self._blocked is not None:
            self._blocked.join(deadline_s)
        # Set `_paused` first: `api.pause` may raise after it has paused the engine. `resume` must then resume the engine.
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
        """Block the engine's main loops until the pause ends. If this fails, let `QuiesceGate.wait` raise the error.

        This runs in a separate thread, because `quiesce` returns at the end of the pause.
        """
        try:
            api.quiesce(pause_id, deadline_s, block=True)
        except WindlassError as error:
            logger.warning("pause %s: the engine did not block its loops", pause_id, exc_info=True)
            self._gate.fail(pause_id, error)

    def resume(self, deadline_s: float) -> None:
        """Release a blocked main loop, and resume the engine if `EngineApi.pause` paused its scheduler.

        The caller may repeat this after an error; see `EngineHooks.resume`.

        Raises:
            WindlassError: see `EngineApi.resume`.
        """
        self._gate.end()
        if self._api is None or not self._paused:
            return
        end = time.monotonic() + deadline_s
        # Leave time for `api.resume`. A main loop that is still in `QuiesceGate.block` after this wait returns later.
        if self._blocked is not None:
            self._blocked.join(min(RELEASE_S, deadline_s / 2))
            self._blocked = None
        self._api.resume(end - time.monotonic())
        self._paused = False

    def finalise(self) -> None:
        """Compute again all values of this rank that are derived from received weights; see `Captured.finalise`.

        Record that the weights are no longer lost.

        Raises:
            UnsupportedLayout, TransferFailed: see `Captured.finalise`.
        """
        if self._captured is not None:
            self._captured.finalise(self._kept())
        self._sleep.is_lost = False

    @property
    def is_empty(self) -> bool:
        """True if the weights sleep or are lost; see `Sleeper`."""
        return self._sleep.is_empty

    @property
    def caches_nbytes(self) -> int:
        """Bytes that the rank maps beside its weights; see `Sleeper`."""
        return self._sleep.caches_nbytes

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Make every rank of the engine sleep, if this rank can do so; see `Sleeper.sleep`."""
        if self._sleep.ask is not None:
            self._sleep.ask(mode, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version that the engine reports for later tokens; see `EngineHooks.set_version`.

        If the engine's scheduler is paused, release a blocked main loop first, so that the loop can carry out the call
        that sets the version. The loop runs no step, because the scheduler stays paused.

        Raises:
            WindlassError: see `EngineApi.set_version`.
        """
        if self._paused:
            self._gate.end()
        if self._api is not None:
            self._api.set_version(version, deadline_s)


@final
class EngineRank:
    """Captured layout and fleet of one engine rank; each process has one.

    `capture` reads the layout while the engine still has its initial weights, and `join` connects the rank to a
    controller. Between the two calls, the launcher (or plugin) checks the captured layouts of all ranks. A later
    `join`, for another controller or transport, reuses the layout: the engine need not be restarted.

    Args:
        looks: True if the agent calls `Captured.look` in each pause; False if the engine's main loop calls it.

    Attributes:
        gate: gate between the agent and the engine's main loop.
        sleep: state of the engine's sleep mode.
    """

    def __init__(self, *, looks: bool = True) -> None:
        self._looks = looks
        self.gate, self.sleep = QuiesceGate(self._update_record), RankSleep(self._update_record)
        # Controller of the fleet that this rank has joined; empty before the first join.
        self._controller = ""
        # Reason why the engine stays paused; None if it is not held. Only rank 0 sets this.
        self._held_for: HoldCause | None = None
        self._recorded: HeldRecord | None = None
        self._recording = threading.Lock()
        self._first: tuple[AgentSettings, Captured, RankHooks] | None = None
        self._client: EngineClient | None = None
        self._has_joined = False

    @property
    def captured(self) -> Captured:
        """Captured layout; raises UnsupportedLayout if `capture` has not been called."""
        return self.required()[1]

    @property
    def settings(self) -> AgentSettings:
        """Settings of the capture; raises UnsupportedLayout if `capture` has not been called."""
        return self.required()[0]

    @property
    def in_round(self) -> bool:
        """True while a round may fill the weights of this rank, so that the rank must not sleep."""
        return self._first is not None and self._first[2].in_round

    def required(self) -> tuple[AgentSettings, Captured, RankHooks]:
        """Return the settings, the layout and the hooks of this rank's first capture.

        Raises:
            UnsupportedLayout: no capture has succeeded yet.
        """
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
        """Capture this rank's layout, or reuse an earlier capture. Store the layout, and return a summary of it.

        After a new capture, also create the rank's hooks, and freeze the heap (`freeze_heap`). The engine's main loop calls
        this.

        Args:
            settings: settings of the join. `name`, `url`, `checkpoint` and `world_size` must not change after the
                first join.
            rank: rank of this process.
            capture: function that captures the layout; called unless an earlier capture can be reused. If the weights are
                lost, the earlier capture is reused with the name in `settings`.
            api: function that creates the `EngineApi`; called on rank 0 after each capture. None if the trainer
                pauses the engine; see `Hello.comes_to_rest`.

        Raises:
            UnsupportedLayout: the function `capture` raised this error.
            ConfigError: `name`, `url`, `checkpoint` or `world_size` has changed after the first join, or `rank`
                is not below `world_size`.
            ProtocolError: this rank cannot leave its previous fleet; see `leave`.
        """
        if rank >= settings.world_size:
            raise ConfigError(
                f"--tp x --pp x --dp must be the number of ranks of the server, got {settings.world_size}, but a rank "
                f"has the index {rank}"
            )
        seconds: dict[str, float] = {}
        if self._first is None or (
            not self._has_joined and _identity(self.settings) != _identity(settings)
        ):
            begun = time.perf_counter()
            captured = self._renamed(settings, rank) if self.sleep.is_empty else capture()
            own_api = api() if api and rank == 0 else None
            hooks = RankHooks(
                captured,
                self.gate,
                own_api,
                looks=self._looks,
                sleep=self.sleep,
                kept=lambda: self.kept,
            )
            self._first = settings, captured, hooks
            freeze_heap()
            seconds = {**captured.seconds, "all": time.perf_counter() - begun}
        self._require_same(settings)
        # All ranks capture before a rank joins. So a refusal here leaves every rank in its previous fleet.
        self._require_free(LEAVE_DEADLINE_S)
        found = msgspec.convert(self.captured, CapturedLayout, from_attributes=True)
        return msgspec.structs.replace(found, seconds=seconds)

    def _renamed(self, settings: AgentSettings, rank: int) -> Captured:
        """Return the captured layout under the name in `settings`. A new capture would need the weights, which are lost.

        Raises:
            ConfigError: `checkpoint` or `world_size` has changed.
        """
        was = self.settings
        if (was.checkpoint, was.world_size) != (settings.checkpoint, settings.world_size):
            raise ConfigError(
                f"join: (checkpoint, ranks) must be {(was.checkpoint, was.world_size)} as before the engine slept, got "
                f"{(settings.checkpoint, settings.world_size)}"
            )
        manifest = replace(self.captured.manifest, worker=f"{settings.name}/{rank}")
        return replace(self.captured, manifest=manifest)

    def join(self, settings: AgentSettings, rank: int, token: str) -> None:
        """Leave the previous fleet, register the captured memory, and join a new fleet.

        The engine's main loop calls this. The GPU of this rank, if any, must be the current device.

        Raises:
            UnsupportedLayout: `capture` has not been called.
            ConfigError: `name`, `url`, `checkpoint` or `world_size` differs from the captured settings.
            ProtocolError: this rank cannot leave its previous fleet (see `leave`), or the new controller uses
                another protocol version.
            AuthenticationError: the controller refused the token.
            PeerTimeout: the controller did not answer in time.
            TransportUnavailable, PeerUnreachable: the transport cannot start; see `create_transport`.
            TransportUnavailable, RegionError: the transport cannot register this memory.
            PlanError, ManifestError, PeerUnreachable: see `EngineClient`.
        """
        self._require_same(settings)
        _, captured, _ = self.required()
        self.leave(LEAVE_DEADLINE_S)
        transport = create_transport(
            parse_transport(settings.transport),
            towards=settings.controller,
            memory_at=captured.addresses[0] if captured.addresses else 0,
        )
        # If the engine was held after a failed round of its previous fleet, delete the record. The new fleet fills the
        # weights, and requests wait for its first version.
        before = self._held_for, self._controller
        self._hold(None)
        self._controller = settings.controller
        try:
            self._client = self._connected(settings, rank, token, transport)
        # This rank is in no fleet now, so no update will fill its weights. If the engine was held before, it stays held.
        except BaseException:
            cause, self._controller = before
            self._hold(cause)
            raise
        self._has_joined = True

    def _connected(
        self, settings: AgentSettings, rank: int, token: str, transport: OneSidedTransport
    ) -> EngineClient:
        """Register the captured memory with `transport`, and connect to the controller. For errors see `join`."""
        _, captured, hooks = self.required()
        begun = time.perf_counter()
        sizes = [parameter.nbytes for parameter in captured.manifest.parameters]
        spans = zip(captured.addresses, sizes, strict=True)
        # If the engine can sleep, the GPU driver cannot find the allocation that contains an address of its weights. The
        # engine then uses the transport `pull`, which does not need the allocation.
        allocation = None if self.sleep.is_enabled else allocation_of
        regions = transport.register_all(stretches(spans, allocation))
        # For a repacked parameter, `captured.addresses` has the address of the buffer that updates write.
        return EngineClient(
            EngineWeights(
                manifest=captured.manifest,
                addresses=captured.addresses,
                regions=regions,
                register_s=time.perf_counter() - begun,
                buffered=frozenset(captured.repacked),
                rounded=captured.rounded,
            ),
            transport=transport,
            hooks=hooks,
            controller=settings.controller,
            token=token,
            world_size=settings.world_size,
            url=settings.url if rank == 0 else "",
            # The engine's sleep mode may unmap the weights while another engine reads them.
            can_send=not self.sleep.is_enabled,
            serves_own_weights=settings.serves_own_weights,
            comes_to_rest=hooks.has_api,
            sleeper=hooks if self.sleep.is_enabled else None,
            on_held=self._hold if rank == 0 else None,
        )

    def _hold(self, cause: HoldCause | None) -> None:
        """Record for the engine's server why the engine stays paused. `cause` is None if the engine is not held.

        The agent of rank 0 calls this, and `join` does so to delete or restore the record. An engine that sleeps and has a
        copy of its weights gets no record, because the training framework can wake the engine without an update.
        """
        is_asleep = cause is HoldCause.EMPTY and not self.sleep.is_lost
        self._held_for = None if is_asleep else cause
        self._update_record(is_new=True)

    def _update_record(self, *, is_new: bool = False) -> None:
        """Write or delete the record of the held engine (see `held_server`), if its content has changed.

        `_hold` sets `is_new`. The main loop calls this without `is_new` after a change of `QuiesceGate.is_blocked` or
        `RankSleep.is_lost`. Such a change does not matter for an engine that is not held.
        """
        if self._held_for is None and not is_new:
            return
        with self._recording:
            cause, is_lost = self._held_for, self.sleep.is_lost
            held: HeldRecord | None = None
            if cause is not None:
                if cause is HoldCause.MIXED and is_lost:
                    # The mixed values are lost. The next update fills all weights.
                    cause = HoldCause.EMPTY
                is_free = is_lost or cause is HoldCause.NO_VERSION
                may_leave = is_free and not self.gate.is_blocked
                held = HeldRecord(self._controller, cause, may_leave)
            before, self._recorded = self._recorded, held
            if held != before:
                note_held(self.settings.port, held)
            if held is not None and (before is None or before.cause is not held.cause):
                logger.warning("%s", held.reason)

    @property
    def kept(self) -> frozenset[str]:
        """Names of the checkpoint tensors that this rank keeps, because no trainer of its fleet has them."""
        return frozenset() if self._client is None else self._client.agent.kept

    @property
    def served_version(self) -> int:
        """Version that this rank serves; -1 if it has not received a version of its current fleet."""
        return -1 if self._client is None else self._client.agent.served_version

    @property
    def served_weights(self) -> str:
        """Identity of the weights that this rank serves.

        Ranks that serve the same version in one fleet return the same value. Empty if the rank serves no version of the
        fleet.
        """
        if self._client is None or self.served_version < 0:
            return ""
        return f"{self._client.agent.lineage}/{self.served_version}"

    @property
    def may_serve(self) -> bool:
        """False while the weights sleep, are lost, or may be of two versions."""
        is_mixed = self._client is not None and self._client.agent.mixed_weights
        return not (self.sleep.is_empty or is_mixed)

    def leave(self, deadline_s: float) -> None:
        """Leave the current fleet, if any, and unregister the rank's memory. The fleet's controller must have ended.

        Raises:
            ProtocolError: after `deadline_s`, the controller is still connected, so a trainer may still write, or the
                engine has not resumed since the connection was lost. Or the weights may be mixed, so the rank must wait
                for an update by its current fleet.
        """
        self._require_free(deadline_s)
        if self._client is not None:
            self._client.close()
            self._client = None

    def _require_free(self, deadline_s: float) -> None:
        """Check that this rank can leave its fleet, if any. For the errors, see `leave`."""
        if self._client is None:
            return
        if not self._client.wait_disconnected(deadline_s):
            raise ProtocolError(
                f"engine {self.settings.name}: its controller {self._controller} must be stopped before the engine joins another "
                f"fleet, but after {deadline_s:g} s a rank is still connected to it, or has not resumed since the connection was "
                "lost; stop this controller, and try again"
            )
        # Mixed weights do no harm if they are lost: the next fleet fills all of them before the engine serves.
        if self._client.agent.mixed_weights and not self.sleep.is_lost:
            raise ProtocolError(
                f"engine {self.settings.name}: its weights must be of one version before it joins another fleet, but they may be "
                f"of two versions, because an update of the controller {self._controller} did not complete; start this controller again "
                "and publish a version, or restart the engine"
            )

    def _require_same(self, settings: AgentSettings) -> None:
        """Raise ConfigError if the name, URL, checkpoint or number of ranks differs from the capture's settings."""
        if _identity(self.settings) != _identity(settings):
            raise ConfigError(
                f"join: (name, url, checkpoint, ranks) must be {_identity(self.settings)} as in the "
                f"first join, got {_identity(settings)}"
            )


def freeze_heap() -> None:
    """Exclude all current objects from Python's garbage collection: most of them live as long as the engine.

    vLLM and SGLang import modules with 650,000 objects. A full collection would take 0.4 s
    (`benchmarks/bench_heap.py`, 2-core EPYC, idle, 2026-11-21), hold the GIL, and might happen during an update.
    """
    gc.collect()
    gc.freeze()


def _identity(settings: AgentSettings) -> tuple[str, str, str, int]:
    """Return the settings that must be the same in every join of a rank."""
    return settings.name, settings.url, settings.checkpoint, settings.world_size


def allocation_of(address: int) -> tuple[int, int] | None:
    """Return the first address and the number of bytes of the GPU allocation at `address`; None for host memory."""
    return memory_on(gpu_of(address)).allocation(address)
