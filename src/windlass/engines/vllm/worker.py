"""Windlass's code in the worker of a vLLM rank: methods that the plugin adds to vLLM's worker, and calls that pause its server.

`collective_rpc` calls the methods in the worker's main loop, between two steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, final

import msgspec
import torch

from windlass.config import PauseMode
from windlass.engines.capture.checkpoint import checkpoint_folder
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.engine_rank import EngineApi, EngineRank
from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import saved_key
from windlass.engines.quantised import require_followed
from windlass.engines.rank_reports import RefusedByOtherRank, reason_of
from windlass.engines.rank_sleep import RankSleep
from windlass.engines.spec import AgentSettings, RankStep, refuse_expandable_segments
from windlass.engines.vllm import sleep as sleep_mode
from windlass.engines.vllm.adapter import Slot, keep_adapter
from windlass.engines.vllm.api_server import RankAnswer, RankOrder
from windlass.engines.vllm.core_sleep import GO_ON, RESTS
from windlass.engines.vllm.engine_core import (
    ABORTS,
    QUIESCES,
    CoreCalls,
    core_calls,
    stamps_tokens,
)
from windlass.engines.vllm.rank import (
    Worker,
    cache_storages,
    capture_rank,
    number_of,
    served_by,
)
from windlass.engines.vllm.sampling import PROCESSED
from windlass.envs import control_token
from windlass.errors import ConfigError, TransferFailed

logger = logging.getLogger(__name__)
_MODES: Mapping[PauseMode, str] = {PauseMode.ABORT: "abort", PauseMode.IN_PLACE: "keep"}
"""Modes of vLLM's `/pause`."""
_SLEEPS: Mapping[PauseMode, str] = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep"}
"""Modes of `/sleep`. With `keep`, vLLM computes the prompts and answers of running requests again after it has woken."""


@final
class VllmApi:
    """`EngineApi` of a vLLM server: blocks the main loops, or calls `/pause` if they cannot be blocked.

    Args:
        server: the server, with the routes of `VLLM_SERVER_DEV_MODE=1`. None if the trainer calls these routes to pause
            the server and to set its version; the agent then only blocks the loops, in the mode `in_place`.
        can_block: whether the agent may block the main loops, see `may_block`.
        stamps: whether Windlass records the weight version of each token, see `stamps_tokens`.
        sleep: state of vLLM's sleep mode in this rank; None if the server was started without it.
        core: calls into the EngineCore of this process if the server has one rank; None if `/collective_rpc` must call
            the methods of several workers.
    """

    def __init__(
        self,
        server: EngineHttp | None,
        *,
        can_block: bool,
        stamps: bool,
        sleep: RankSleep | None = None,
        core: CoreCalls | None = None,
    ) -> None:
        self._server, self._can_block, self._stamps = server, can_block, stamps
        self._sleep, self._core = sleep or RankSleep(), core
        self._is_blocking = self._aborts = self._rests = False

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Pause the engine: `abort` ends running requests; `in_place` keeps requests and their KV cache.

        Tell vLLM not to clear its prefix cache (`clear_cache=false`), because Windlass separates the cache entries of
        different versions. With a cleared cache, vLLM 0.32 would compute the KV cache of all kept requests again.

        If vLLM sleeps, its scheduler is paused already, so send nothing. The scheduler stays paused until `resume`.

        Returns:
            True if the scheduler is paused until `resume`. False if the scheduler is not paused, so that the engine stops
            only while its main loops are blocked.

        Raises:
            ConfigError: vLLM does not support `mode`.
        """
        # If the trainer pauses the server, the trainer's `/update_weights` also wakes a sleeping server. So this agent
        # treats a sleeping server as at rest only if the agent itself pauses the server in this mode.
        self._rests = self._sleep.is_at_rest and self._pauses_itself(mode)
        if self._rests:
            return True
        if self._server is None:
            return False
        if mode not in _MODES:
            raise ConfigError(f"vLLM: pause_mode must be one of {list(_MODES)}, got {mode}")
        self._aborts = mode is PauseMode.ABORT
        if self.blocks(mode):
            return False
        self._server.post(f"/pause?mode={_MODES[mode]}&clear_cache=false", {}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:
        """Return whether to block the main loops instead of calling `/pause`; see `windlass.engines.vllm.engine_core`."""
        return self._pauses_itself(mode) and self._can_block and not self._rests

    def _pauses_itself(self, mode: PauseMode) -> bool:
        """Return whether this rank, and not the trainer, pauses the server in this mode."""
        return mode in (_MODES if self._server is not None else {PauseMode.IN_PLACE})

    def fall_asleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Make all ranks sleep at level 2; see `Sleeper.sleep`.

        Raises:
            ConfigError: vLLM cannot sleep in this mode, or this agent cannot call the server's routes.
        """
        if mode not in _SLEEPS:
            raise ConfigError(f"vLLM: sleep: mode must be one of {list(_SLEEPS)}, got {mode}")
        if self._server is None:
            raise ConfigError(
                "vLLM: sleep: the trainer must call POST /sleep of this server, because this agent cannot call the "
                "server's routes"
            )
        self._server.post(f"/sleep?level=2&mode={_SLEEPS[mode]}", {}, deadline_s)

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        """Call `windlass_quiesce` in every worker, and return when all workers have returned; see `EngineApi.quiesce`.

        Raises:
            ConfigError, PeerTimeout, PeerUnreachable: see `EngineApi.quiesce`.
        """
        if not block and self._server is None and not self._rests:
            # The trainer's call of `/update_weights` blocks the loops.
            return
        self._is_blocking = block
        try:
            blocked_s = str(deadline_s) if block else ""
            first = [ABORTS] if block and self._aborts else [RESTS] if self._rests else []
            self._call(QUIESCES, [pause_id, blocked_s, *first], None if block else deadline_s)
        finally:
            self._is_blocking = False

    def resume(self, deadline_s: float) -> None:
        """Resume the scheduler; see `EngineApi.resume`. First wake all memory if the server slept.

        Raises:
            ConfigError, PeerTimeout, PeerUnreachable: see `EngineApi.resume`.
        """
        if self._rests:
            self._call(GO_ON, [], deadline_s)
            self._rests = False
        elif self._server is not None:
            self._server.post("/resume", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version of later tokens; see `EngineApi.set_version`.

        Do nothing if the main loop is blocked, because `windlass_quiesce` then returns the version to the EngineCore.
        If this agent cannot call the server's routes, set the version only if the server slept before the pause.

        Raises:
            ConfigError, PeerTimeout, PeerUnreachable: see `EngineApi.set_version`.
        """
        if self._is_blocking or (self._server is None and not self._rests):
            return
        if self._stamps or self._server is None:
            self._call("windlass_set_version", [version], deadline_s)
        else:
            self._server.post("/update_weight_version", {"new_version": str(version)}, deadline_s)

    def _call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        """Run a method in the main loop of every worker, and wait until it returns. `deadline_s` is None for no limit.

        Raises:
            PeerTimeout, PeerUnreachable: the method did not end in time, or a worker failed.
            ConfigError: there are several workers, and this agent cannot call the server's routes.
        """
        if self._core is not None:
            self._core.call(method, args, deadline_s)
            return
        if self._server is None:
            raise ConfigError(
                f"vLLM: {method}: the agent of a server with several ranks must have the URL of the server, got none"
            )
        timeout = {} if deadline_s is None else {"timeout": deadline_s}
        body = {"method": method, "args": args, **timeout}
        self._server.post("/collective_rpc", body, deadline_s)


def block_loop(worker: Worker, pause_id: str, deadline_s: float) -> None:
    """Wait for the GPU, then block this worker's main loop until the pause ends; see `QuiesceGate.block`.

    If updates change an adapter, first pin the adapter to its slot (`keep_adapter`).

    Raises:
        UnsupportedLayout: see `keep_adapter`.
    """
    rank: EngineRank = worker.windlass_engine_rank
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if rank.settings.adapter:
        keep_adapter(worker)
    rank.gate.block(pause_id, deadline_s)


def may_block(parallel: Any) -> bool:
    """Return whether the agent may block the main loop of a rank between two steps.

    Return False with pipeline stages or with replicas of a MoE model, because another rank may be in a step that waits
    for this rank. For a dense model, `data_parallel_size` is always 1 here.
    """
    return bool(parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1)


class WorkerMethods:
    """Methods of the worker of a server that has our weight-transfer backend; `self` is the worker."""

    @property
    def windlass_engine_rank(self) -> EngineRank:
        """Captured layout and fleet of this rank."""
        worker: Worker = self
        return cast("EngineRank", worker.weight_transfer_engine.rank)

    def windlass_order(self, step: str, encoded: str) -> str:
        """Carry out an order of the API server. The main loop calls this between two steps.

        Args:
            step: `RankStep` of the order. Only the EngineCore uses it (`engine_core.keep_caches_apart`).
            encoded: `RankOrder` in JSON.

        Returns:
            `RankAnswer` in JSON.
        """
        del step
        order = msgspec.json.decode(encoded, type=RankOrder)
        rank, worker = self.windlass_rank(), cast("Worker", self)
        worker.weight_transfer_engine.worker = worker
        sleep_mode.install(worker, self.windlass_engine_rank)
        try:
            answer = RankAnswer(said=_carry_out(worker, order, rank))
        except RefusedByOtherRank:
            answer = RankAnswer(failed=True)
        # If this rank raised, vLLM would not read the results of the other ranks.
        except Exception as error:
            logger.exception("rank %s cannot join the fleet", rank)
            answer = RankAnswer(failed=True, said=f"rank {rank}: {reason_of(error)}")
        return msgspec.json.encode(answer).decode()

    def windlass_rank(self) -> int:
        """Return the rank of this process among all ranks of the server; see `number_of`."""
        return number_of(self)

    def windlass_quiesce(
        self, pause_id: str, blocked_s: str = "", namespace: str = ""
    ) -> int | None:
        """Report to the agent that the main loop is quiesced; with `blocked_s`, block the loop until the pause ends.

        Args:
            pause_id: id of the pause.
            blocked_s: `deadline_s` of `QuiesceGate.block`. Empty if the loop must not block, because the scheduler is
                paused.
            namespace: new cache namespace, which the EngineCore adds to the call.

        Returns:
            The version that the rank serves after the block. None if the loop was not blocked, or if the rank serves no
            version.

        Raises:
            ConfigError: the EngineCore sent no cache namespace.
            UnsupportedLayout: see `keep_adapter`.
        """
        if not namespace:
            raise ConfigError(
                "vLLM: the EngineCore must separate its caches by version, but sent no cache namespace"
            )
        rank = self.windlass_engine_rank
        if blocked_s:
            block_loop(self, pause_id, float(blocked_s))
            return rank.served_version if rank.served_version >= 0 else None
        if rank.settings.adapter:
            keep_adapter(self)
        rank.gate.quiesced(pause_id)
        return None

    def windlass_is_empty(self) -> bool:
        """Return whether the weights of this rank sleep or are lost."""
        return self.windlass_engine_rank.sleep.is_empty

    def windlass_in_round(self) -> bool:
        """Return whether an update of this rank runs."""
        return self.windlass_engine_rank.in_round

    def windlass_shortage(self, tags: list[str]) -> str:
        """Return the reason why this rank has too little memory to wake `tags`; an empty string if it has enough."""
        worker: Worker = self
        if not self.windlass_engine_rank.sleep.is_enabled:
            return ""
        return str(worker.windlass_sleep.shortage(tags))

    def windlass_expect_update(self) -> None:
        """Prepare to wake the weights for a round that fills them; see `WorkerSleep.expect_update`."""
        worker: Worker = self
        if self.windlass_engine_rank.sleep.is_enabled:
            worker.windlass_sleep.expect_update()

    def windlass_wake_failure(self) -> str:
        """Return the reason why this rank could not wake its memory; an empty string if it could."""
        return self.windlass_engine_rank.sleep.failure

    def windlass_refuse(self, pause_id: str, reason: str) -> None:
        """Make this rank's pause fail: the agent that waits for it raises TransferFailed with `reason`.

        An empty `pause_id` means the agent's latest pause.
        """
        self.windlass_engine_rank.gate.fail(pause_id, TransferFailed(reason))

    def windlass_set_version(self, version: int) -> int:
        """Return `version`, which the EngineCore records for later tokens."""
        return version

    def windlass_weights(self) -> str:
        """Return the identity of the weights that this rank serves; see `EngineRank.served_weights`."""
        return self.windlass_engine_rank.served_weights

    def windlass_digests(self) -> dict[str, str]:
        """Return a fingerprint of every tensor of the model, the draft model and the adapter, by name."""
        worker: Worker = self
        held = held_by(served_by(worker), cache_storages(worker))
        return fingerprints(held) | fingerprints(held_by(Slot(worker.model_runner.get_model())))


def _carry_out(worker: Worker, order: RankOrder, rank: int) -> str:
    """Make this worker's rank capture its layout or join a fleet, as the order says; return the text for `RankAnswer.said`.

    Before a capture, end an update that a trainer has left open, and check settings that would make updates wrong.
    """
    settings, own = _on_this_host(worker, order.settings), worker.windlass_engine_rank
    if order.step is RankStep.JOIN:
        own.join(settings, rank, order.token or control_token())
        return ""
    # End an update that a trainer began before it died. vLLM raises RuntimeError if no update has begun.
    with contextlib.suppress(RuntimeError):
        worker.finish_weight_update()
    refuse_expandable_segments(settings.transport)
    model = worker.vllm_config.model_config
    require_followed(
        _folder_of(worker), ("--quantization", model.quantization) if model.quantization else ()
    )
    if model.logprobs_mode != PROCESSED and rank == 0:
        logger.warning(
            "--logprobs-mode is %s: log-probabilities in responses do not belong to the distribution from which "
            "tokens are sampled; use %s for rollouts",
            *(model.logprobs_mode, PROCESSED),
        )
    api = _api_for(worker, order, settings)
    return msgspec.json.encode(capture_rank(worker, own, settings, api)).decode()


def _api_for(
    worker: Worker, order: RankOrder, settings: AgentSettings
) -> Callable[[], EngineApi] | None:
    """Return a function that creates this rank's `EngineApi`. Return None if only the trainer can pause the server, over HTTP.

    The returned function also sets this rank's `RankSleep.ask`. The agent calls `ask` to make the server sleep.
    """
    core = core_calls() if settings.world_size == 1 else None
    if core is None and not order.pauses_itself:
        return None

    def api() -> VllmApi:
        # Only rank 0 calls this function. The file with the server's key is on rank 0's host.
        # `settings.url` may name a proxy with another port.
        key = saved_key(f"http://localhost:{settings.port}")
        own = EngineHttp(settings.url, key) if order.pauses_itself else None
        can_block, sleep = may_block(worker.parallel_config), worker.windlass_engine_rank.sleep
        made = VllmApi(own, can_block=can_block, stamps=stamps_tokens(), sleep=sleep, core=core)
        sleep.ask = made.fall_asleep
        return made

    return api


def _on_this_host(worker: Worker, settings: AgentSettings) -> AgentSettings:
    """Return the settings with this rank's `checkpoint` and `loaded`, which may differ between hosts.

    If the server has an adapter, return `settings` unchanged.
    """
    if settings.adapter:
        return settings
    return msgspec.structs.replace(
        settings,
        checkpoint=str(_folder_of(worker)),
        loaded=worker.vllm_config.load_config.load_format != "dummy",
    )


def _folder_of(worker: Worker) -> Path:
    """Return the folder from which this worker loaded its model; raises as `checkpoint_folder` does."""
    model = worker.vllm_config.model_config
    return checkpoint_folder("--model", model.model, model.revision)
