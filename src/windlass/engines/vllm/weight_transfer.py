"""vLLM's weight-transfer backend "windlass": the worker's side of the trainer's calls.

`windlass.integrations.vllm.plugin` registers the backend. A server that was started with
`--weight-transfer-config '{"backend": "windlass"}'` creates one in every worker after it has loaded the
model. `/init_weight_transfer_engine` makes the API server order every worker to capture its layout and to join
the trainer's fleet (`windlass.engines.vllm.api_server`). `/update_weights` holds the worker's loop between two steps while the agent's thread receives, verifies and
applies the version. On a server of one rank the agent holds the loop itself (`_CoreApi`): a route would go
through the event loop of the API server, which also delivers every token to its stream. The interface is the
one of vLLM 0.24 and 0.32 (`vllm/distributed/weight_transfer/base.py`).

vLLM answers a call with the first failure among its workers, and mistakes the remaining workers' answers for
answers to its next call. Therefore a worker does not raise: it returns the reason of a failure.
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
from windlass.engines.capture.codes import checkpoint_folder
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
"""Seconds that `shutdown` waits for the old controller to disconnect."""


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of `/update_weights`.

    Attributes:
        version: the version that the trainer is about to publish.
        deadline_s: seconds within which the round of this version must reach this worker.
        namespace: cache namespace that the EngineCore began for this update; see `engine_core.Namespace`.
    """

    version: int
    deadline_s: float
    namespace: str = ""


@final
class WindlassTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Weight-transfer engine of one worker. vLLM calls its methods in the worker's main loop, between two steps."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    worker: Worker
    """The worker of this engine, set by its first order: vLLM 0.24 gives an engine only the model."""

    def __init__(self, config: object, *made_with: object) -> None:
        super().__init__(config, *made_with)
        self.rank = EngineRank()

    def init_transfer_engine(self, init_info: object) -> None:
        """Refuse a call that bypasses the API server, which orders all ranks; see `windlass.engines.vllm.api_server`.

        Raises:
            ConfigError: always.
        """
        del init_info
        raise ConfigError(
            "init_weight_transfer_engine must be called through vLLM's API server, got a call of a worker; "
            "is the plugin excluded by VLLM_PLUGINS?"
        )

    def start_weight_update(self) -> None:
        """Do nothing: the agent writes the weights, and vLLM's loader has nothing to prepare."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Call `receive_weights`; vLLM's own implementation would also need a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, load_weights: object = None) -> None:
        """Block this worker's main loop between two steps until the round of this version has ended.

        The round may leave the old weights in place; its report tells the trainer. If no round reaches this
        worker within `deadline_s`, the loop continues. If the weights may be of two versions, the loop stays
        blocked until a later round has repaired them.

        Raises:
            ConfigError: the EngineCore sent no cache namespace.
        """
        # vLLM 0.24 passes this argument.
        del load_weights
        if not update_info.namespace:
            raise ConfigError(
                "vLLM: the EngineCore must separate its caches by version, but sent no cache namespace; "
                "check that VLLM_PLUGINS does not exclude Windlass's plugin"
            )
        if self.served_version >= update_info.version:
            # The round is already over.
            return
        _block(self.worker, f"version {update_info.version}", update_info.deadline_s)

    @property
    def served_version(self) -> int:
        """Version of the trainer's fleet that this worker serves; -1 if none."""
        return self.rank.served_version

    def finish_weight_update(self) -> None:
        """Do nothing: the agent has already finalised the weights in its round."""

    def shutdown(self) -> None:
        """Leave the trainer's fleet. The server continues with its current weights."""
        try:
            self.rank.leave(LEAVE_S)
        except WindlassError as error:
            logger.warning("shutdown: the server has not left the fleet: %s", error)

    @staticmethod
    def trainer_send_weights(_iterator: object, _trainer_args: object) -> None:
        """Refuse the sending function of vLLM 0.24, which has no class for trainers.

        Raises:
            ConfigError: always. The function takes whole tensors, so the trainer would have to gather them.
        """
        raise ConfigError(
            "trainer_send_weights: not supported; use windlass.integrations.vllm.WeightSync"
        )


@final
class _CoreApi:
    """`EngineApi` of a server with one rank. Its EngineCore runs in this process, so the agent holds it without HTTP.

    In a pause mode other than `in_place`, the trainer itself calls `/pause` and then `/update_weights`.
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
        """Do nothing: `pause` did not pause anything."""

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
    """Methods of the worker of a server that its user started; a launched server's has `WindlassExtension` alone."""

    @property
    def windlass_engine_rank(self) -> EngineRank:
        worker: Worker = self
        return cast("WindlassTransferEngine", worker.weight_transfer_engine).rank

    def windlass_order(self, step: str, encoded: str) -> str:
        """Carry out an order of the API server. The main loop calls this, after every earlier step.

        Args:
            step: step of the order; vLLM's core reads it.
            encoded: a `RankOrder` in JSON.

        Returns:
            A `RankAnswer` in JSON.
        """
        del step
        order = msgspec.json.decode(encoded, type=RankOrder)
        rank, worker = self.windlass_rank(), cast("Worker", self)
        worker.weight_transfer_engine.worker = worker
        try:
            answer = RankAnswer(said=_carry_out(worker, order, rank))
        except RefusedByOtherRank:
            answer = RankAnswer(failed=True)
        # An exception would leave the answers of other ranks unread.
        except Exception as error:
            logger.exception("rank %s cannot join the trainer's fleet", rank)
            answer = RankAnswer(failed=True, said=f"rank {rank}: {reason_of(error)}")
        return msgspec.json.encode(answer).decode()


def _carry_out(worker: Worker, order: RankOrder, rank: int) -> str:
    """Carry out an order in the rank of this worker and return what the rank says; see `RankAnswer`."""
    settings, own = _on_this_host(worker, order.settings), worker.windlass_engine_rank
    if order.step is RankStep.JOIN:
        own.join(settings, rank, order.secrets.token)
        return ""
    # End an update that a dead trainer left open. vLLM raises RuntimeError if none is open.
    with contextlib.suppress(RuntimeError):
        worker.finish_weight_update()
    refuse_expandable_segments()
    model = worker.vllm_config.model_config
    require_followed(
        _folder_of(worker), ("--quantization", model.quantization) if model.quantization else ()
    )
    if model.logprobs_mode != PROCESSED and rank == 0:
        logger.warning(
            "--logprobs-mode is %s: log-probabilities of answers are not those of the distribution that "
            "was sampled, as %s are",
            *(model.logprobs_mode, PROCESSED),
        )
    api = _api_for(worker, order, settings)
    captured = capture_rank(worker, own, settings, api, is_launched=False)
    return msgspec.json.encode(captured).decode()


def _api_for(
    worker: Worker, order: RankOrder, settings: AgentSettings
) -> Callable[[], EngineApi] | None:
    """Return what makes the calls that pause this server; None if the trainer calls the server's routes."""
    if order.pauses_itself:
        return partial(own_api, worker, settings, order.secrets)
    core = core_calls() if settings.world_size == 1 else None
    return None if core is None else partial(_CoreApi, core, worker)


def _on_this_host(worker: Worker, settings: AgentSettings) -> AgentSettings:
    """Return the settings with the checkpoint that this rank has loaded: hosts may keep it in different folders."""
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


# vLLM imports this module in every worker with this backend while the worker loads the model.
_extend_worker()
