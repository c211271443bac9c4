"""vLLM's weight-transfer backend "windlass", as it runs in each worker.

`windlass.integrations.vllm.plugin` registers the backend. A server that is started with
`--weight-transfer-config '{"backend": "windlass"}'` creates a `WindlassTransferEngine` in every worker. The interface is
that of vLLM 0.24 and 0.32 (`vllm/distributed/weight_transfer/base.py`). The trainer calls two routes:

- `/init_weight_transfer_engine`: the API server orders every worker to capture its layout and to join the trainer's
  fleet (`windlass.engines.vllm.api_server`).
- `/update_weights`: the worker's main loop is blocked between two steps, while the agent's thread receives, verifies and
  applies a version. On a server with one rank, the agent itself blocks the loop (`_CoreApi`). This is faster, because
  HTTP requests wait for the API server's event loop, which also streams all tokens.

Methods that vLLM calls in all workers return the reason of a failure instead of raising. If a worker raises, vLLM does
not read the results of the other workers, and takes them for the results of the next call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast, final

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from windlass.config import PauseMode
from windlass.engines.capture.checkpoint import checkpoint_folder
from windlass.engines.engine_rank import EngineApi, EngineRank
from windlass.engines.quantised import require_followed
from windlass.engines.rank_reports import RefusedByOtherRank, reason_of
from windlass.engines.spec import AgentSettings, RankStep, refuse_expandable_segments
from windlass.engines.vllm.adapter import keep_adapter
from windlass.engines.vllm.api_server import RankAnswer, RankOrder
from windlass.engines.vllm.engine_core import CoreCalls, core_calls
from windlass.engines.vllm.extension import WindlassExtension, own_api
from windlass.engines.vllm.rank import Worker, capture_rank
from windlass.engines.vllm.sampling import PROCESSED
from windlass.errors import ConfigError, WindlassError

logger = logging.getLogger(__name__)
LEAVE_S = 1.0
"""Seconds that `shutdown` waits for the old controller to disconnect."""


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of `/update_weights`.

    Attributes:
        version: version that the trainer is about to publish.
        deadline_s: seconds within which the round of this version must reach this worker's agent.
        namespace: cache namespace that the EngineCore set for this update; see `engine_core.Namespace`.
    """

    version: int
    deadline_s: float
    namespace: str = ""


@final
class WindlassTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Weight-transfer engine of one worker. vLLM calls the methods in the worker's main loop, between two steps."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    worker: Worker
    """vLLM's worker; the first order sets this attribute, because vLLM 0.24 passes only the model to `__init__`."""

    def __init__(self, config: object, *made_with: object) -> None:
        super().__init__(config, *made_with)
        self.rank = EngineRank()

    def init_transfer_engine(self, init_info: object) -> None:
        """Raise ConfigError: `windlass.engines.vllm.api_server` should have handled this call in the API server."""
        del init_info
        raise ConfigError(
            "init_weight_transfer_engine must be called through vLLM's API server, got a call of a worker; "
            "is the plugin excluded by VLLM_PLUGINS?"
        )

    def start_weight_update(self) -> None:
        """Do nothing: the update does not use vLLM's loader."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Call `receive_weights`; the inherited method would also need a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, load_weights: object = None) -> None:
        """Block this worker's main loop between two steps until the round of this version has ended.

        The controller, not this method, reports the result of the round to the trainer. If no round reaches this worker's
        agent within `deadline_s`, the loop continues. If the round leaves mixed weights, the loop stays blocked until a
        later round has written all weights again.

        Raises:
            ConfigError: the EngineCore sent no cache namespace.
        """
        # vLLM 0.24 passes `load_weights`.
        del load_weights
        if not update_info.namespace:
            raise ConfigError(
                "vLLM: the EngineCore must separate its caches by version, but sent no cache namespace; "
                "check that VLLM_PLUGINS does not exclude Windlass's plugin"
            )
        if self.served_version >= update_info.version:
            # The round of this version has already ended.
            return
        _block(self.worker, f"version {update_info.version}", update_info.deadline_s)

    @property
    def served_version(self) -> int:
        """Version of the trainer's fleet that this worker serves; -1 if none."""
        return self.rank.served_version

    def finish_weight_update(self) -> None:
        """Do nothing: the agent has already finalised the weights."""

    def shutdown(self) -> None:
        """Leave the trainer's fleet. The server keeps its current weights."""
        try:
            self.rank.leave(LEAVE_S)
        except WindlassError as error:
            logger.warning("shutdown: the server has not left the fleet: %s", error)

    @staticmethod
    def trainer_send_weights(_iterator: object, _trainer_args: object) -> None:
        """Raise ConfigError: vLLM 0.24's function for trainers needs whole tensors, which Windlass does not gather."""
        raise ConfigError(
            "trainer_send_weights: not supported; use windlass.integrations.vllm.WeightSync"
        )


@final
class _CoreApi:
    """`EngineApi` of a server with one rank, whose EngineCore runs in the rank's process.

    The agent blocks the EngineCore's loop through `CoreCalls`, without HTTP. In a pause mode other than `in_place`, the
    trainer itself calls `/pause` and then `/update_weights`.
    """

    def __init__(self, core: CoreCalls, worker: Worker) -> None:
        self._core, self._worker = core, worker

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        del mode, deadline_s
        return False

    def blocks(self, mode: PauseMode) -> bool:
        return mode is PauseMode.IN_PLACE

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        def blocked() -> int:
            _block(self._worker, pause_id, deadline_s)
            return int(self._worker.windlass_engine_rank.served_version)

        if block:
            self._core.hold(blocked)

    def resume(self, deadline_s: float) -> None:
        """Do nothing, because `pause` does nothing."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """Do nothing: `CoreCalls.hold` sets the version."""


def _block(worker: Worker, pause_id: str, deadline_s: float) -> None:
    """Wait for the GPU, then block this worker's main loop; see `QuiesceGate.block`."""
    rank: EngineRank = worker.windlass_engine_rank
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if rank.settings.adapter:
        keep_adapter(worker)
    rank.gate.block(pause_id, deadline_s)


class PlainRank(WindlassExtension):
    """Methods added to vLLM's worker if the user started the server; workers of a launcher's server do not have them."""

    @property
    def windlass_engine_rank(self) -> EngineRank:
        worker: Worker = self
        return cast("WindlassTransferEngine", worker.weight_transfer_engine).rank

    def windlass_order(self, step: str, encoded: str) -> str:
        """Carry out an order of the API server. The main loop calls this between two steps.

        Args:
            step: `RankStep` of the order, which only the EngineCore uses (`engine_core.keep_caches_apart`).
            encoded: `RankOrder` in JSON.

        Returns:
            `RankAnswer` in JSON.
        """
        del step
        order = msgspec.json.decode(encoded, type=RankOrder)
        rank, worker = self.windlass_rank(), cast("Worker", self)
        worker.weight_transfer_engine.worker = worker
        try:
            answer = RankAnswer(said=_carry_out(worker, order, rank))
        except RefusedByOtherRank:
            answer = RankAnswer(failed=True)
        # If this rank raised, vLLM would not read the results of the other ranks.
        except Exception as error:
            logger.exception("rank %s cannot join the trainer's fleet", rank)
            answer = RankAnswer(failed=True, said=f"rank {rank}: {reason_of(error)}")
        return msgspec.json.encode(answer).decode()


def _carry_out(worker: Worker, order: RankOrder, rank: int) -> str:
    """Carry out an order in this worker's rank; return the text for `RankAnswer.said`."""
    settings, own = _on_this_host(worker, order.settings), worker.windlass_engine_rank
    if order.step is RankStep.JOIN:
        own.join(settings, rank, order.secrets.token)
        return ""
    # End an update that a trainer began before it died. vLLM raises RuntimeError if no update has begun.
    with contextlib.suppress(RuntimeError):
        worker.finish_weight_update()
    refuse_expandable_segments()
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
    captured = capture_rank(worker, own, settings, api, is_launched=False)
    return msgspec.json.encode(captured).decode()


def _api_for(
    worker: Worker, order: RankOrder, settings: AgentSettings
) -> Callable[[], EngineApi] | None:
    """Return a function that creates this rank's `EngineApi`; None if the trainer pauses the server by HTTP."""
    if order.pauses_itself:
        return partial(own_api, worker, settings, order.secrets)
    core = core_calls() if settings.world_size == 1 else None
    return None if core is None else partial(_CoreApi, core, worker)


def _on_this_host(worker: Worker, settings: AgentSettings) -> AgentSettings:
    """Return the settings with this rank's checkpoint folder, which may differ from other hosts' folders."""
    if settings.adapter:
        return settings
    return msgspec.structs.replace(
        settings,
        checkpoint=str(_folder_of(worker)),
        loaded=worker.vllm_config.load_config.load_format != "dummy",
    )


def _folder_of(worker: Worker) -> Path:
    model = worker.vllm_config.model_config
    return checkpoint_folder("--model", model.model, model.revision)


def _extend_worker() -> None:
    """Give vLLM's worker the methods of `PlainRank`."""
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    for kind in (WindlassExtension, PlainRank):
        for name, member in vars(kind).items():
            if not name.startswith("__"):
                setattr(VllmWorker, name, member)


# vLLM imports this module in every worker that uses this backend, while the worker loads the model.
_extend_worker()
