"""vLLM's weight-transfer backend "windlass": the worker's side of the trainer's calls.

`windlass.integrations.vllm.plugin` registers the backend. A server that was started with
`--weight-transfer-config '{"backend": "windlass"}'` creates one in every worker after it has loaded the
model. `/init_weight_transfer_engine` makes the worker capture its layout and join the trainer's fleet.
`/update_weights` holds the worker's loop between two steps while the agent's thread receives, verifies and
applies the version. On a server of one rank the agent holds the loop itself (`_CoreApi`): a route would go
through the event loop of the API server, which also delivers every token to its stream. The interface is the
one of vLLM 0.24 and 0.32 (`vllm/distributed/weight_transfer/base.py`).

vLLM answers a call with the first failure among its workers, and mistakes the remaining workers' answers for
answers to its next call. Therefore only the last worker raises; every other worker that fails reports its
reason to the trainer first (see `report_cannot_join`).
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import msgspec
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from windlass.config import PauseMode
from windlass.control.engine_channel import report_cannot_join
from windlass.engines.capture.codes import checkpoint_folder
from windlass.engines.engine_rank import EngineRank
from windlass.engines.quantised import require_followed
from windlass.engines.rank_reports import RefusedByOtherRank, check_layouts, reason_of
from windlass.engines.spec import AgentSettings, CapturedLayout, refuse_expandable_segments
from windlass.engines.vllm.engine_core import CoreCalls, core_calls
from windlass.engines.vllm.rank import Worker, capture_rank, number_of
from windlass.engines.vllm.sampling import PROCESSED
from windlass.errors import ConfigError, WindlassError

logger = logging.getLogger(__name__)
LEAVE_S = 1.0


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Body of `/init_weight_transfer_engine`.

    Attributes:
        controller: address that the trainer's rank 0 gives.
        token: token of the engine role.
        url: address of this server, as the trainer calls it.
    """

    name: str
    controller: str
    token: str = field(repr=False)
    transport: str
    url: str
    world_size: int


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of `/update_weights`.

    Attributes:
        version: the version that the trainer is about to publish.
        deadline_s: seconds within which its round must reach this worker.
        namespace: cache namespace that the EngineCore has begun; see `windlass.engines.vllm.engine_core`.
    """

    version: int
    deadline_s: float
    namespace: str = ""


@final
class WindlassTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Weight-transfer engine of one worker. vLLM calls it in the worker's loop, after every earlier step."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    worker: Worker
    """The worker, set by `_give_worker` before `init_transfer_engine`: vLLM 0.24 gives an engine only the model."""

    def __init__(self, config: object, *made_with: object) -> None:
        super().__init__(config, *made_with)
        self._engine_rank = EngineRank()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the previous fleet, capture the layout and join the trainer's fleet. Every rank calls this.

        A server that is refused continues to serve its current weights. The trainer receives the reason.

        Raises:
            WindlassError: the last rank failed.
        """
        rank = number_of(self.worker)
        try:
            self._join(init_info, rank)
        except RefusedByOtherRank:
            # The rank that has a reason reports it.
            return
        except Exception as error:
            logger.exception("rank %s", rank)
            reason = f"rank {rank}: {reason_of(error)}"
            try:
                report_cannot_join(init_info.controller, init_info.token, init_info.name, reason)
            except WindlassError as unheard:
                logger.warning("rank %s: the trainer was not told: %s", rank, unheard)
            if rank == init_info.world_size - 1:
                raise

    def _join(self, info: InitInfo, rank: int) -> None:
        # An update is open only if a trainer died during it.
        with contextlib.suppress(RuntimeError):
            self.worker.finish_weight_update()
        parallel = self.worker.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.world_size != info.world_size:
            raise ConfigError(
                "vLLM: a plain server must have tensor-parallel ranks alone, got "
                f"{info.world_size} ranks with {parallel.pipeline_parallel_size} stages and replicas of "
                f"{parallel.world_size}: python -m windlass.engines.vllm serves stages and replicas"
            )
        model, load = self.worker.vllm_config.model_config, self.worker.vllm_config.load_config
        folder = checkpoint_folder("--model", model.model, model.revision)
        refuse_expandable_segments()
        require_followed(
            folder, ("--quantization", model.quantization) if model.quantization else ()
        )
        settings = AgentSettings(
            name=info.name,
            controller=info.controller,
            transport=info.transport,
            url=info.url,
            checkpoint=str(folder),
            world_size=info.world_size,
            loaded=load.load_format != "dummy",
            serves_own_weights=True,
        )
        core = core_calls() if info.world_size == 1 else None
        api = None if core is None else partial(_CoreApi, core, self._engine_rank)
        captured = capture_rank(self.worker, self._engine_rank, settings, api, is_launched=False)
        if model.logprobs_mode != PROCESSED and rank == 0:
            logger.warning(
                "--logprobs-mode is %s: log-probabilities of answers are not those of the distribution that "
                "was sampled, as %s are",
                *(model.logprobs_mode, PROCESSED),
            )
        check_layouts(info.name, _of_all_ranks(captured, info.world_size))
        self._engine_rank.join(settings, rank, info.token)

    def start_weight_update(self) -> None:
        """Do nothing: bytes are written to the memory that serves them."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Call `receive_weights`; vLLM's own implementation would also need a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, load_weights: object = None) -> None:
        """Hold this worker between two steps until the round of this version is over.

        The round may end with the old weights: the report of the round tells the trainer so. If no round
        reaches this worker, it is held for `deadline_s`. If its weights may belong to two versions, it is
        held until the fleet has repaired them.

        Raises:
            ConfigError: the EngineCore has not begun a namespace.
        """
        # vLLM 0.24 passes this argument.
        del load_weights
        if not update_info.namespace:
            raise ConfigError(
                "vLLM: its core must keep caches apart by version, and began no namespace: "
                "is the plugin excluded by VLLM_PLUGINS?"
            )
        if self.served_version >= update_info.version:
            # The round is already over.
            return
        _block(self._engine_rank, f"version {update_info.version}", update_info.deadline_s)

    @property
    def served_version(self) -> int:
        """Version of the trainer's fleet that this worker serves; -1 if none."""
        return self._engine_rank.served_version

    def finish_weight_update(self) -> None:
        """Do nothing: the agent has finalised the version already."""

    def shutdown(self) -> None:
        """Leave the trainer's fleet. The server continues with its current weights."""
        try:
            self._engine_rank.leave(LEAVE_S)
        except WindlassError as error:
            logger.warning("shutdown: %s", error)

    @staticmethod
    def trainer_send_weights(_iterator: object, _trainer_args: object) -> None:
        """Refuse vLLM 0.24's way of sending, in which trainers have no class of their own.

        Raises:
            ConfigError: always; this way gathers every tensor on one rank.
        """
        raise ConfigError("trainer_send_weights: use windlass.integrations.vllm.WeightSync")


@final
class _CoreApi:
    """`EngineApi` of a server of one rank, whose core runs in this process: the agent holds the core without a route.

    In a pause mode that does not keep requests in place, the trainer pauses the server itself and then holds
    it.
    """

    def __init__(self, core: CoreCalls, rank: EngineRank) -> None:
        self._core, self._rank = core, rank

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        del mode, deadline_s
        return False

    def blocks(self, mode: PauseMode) -> bool:
        return mode is PauseMode.IN_PLACE

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        def blocked() -> int:
            _block(self._rank, pause_id, deadline_s)
            return self._rank.served_version

        if block:
            self._core.hold(blocked)

    def resume(self, deadline_s: float) -> None:
        """Do nothing: `pause` did not pause anything."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """Do nothing: `CoreCalls.hold` sets the version."""


def _block(rank: EngineRank, pause_id: str, deadline_s: float) -> None:
    """Hold the loop of this worker; see `QuiesceGate.block`."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    rank.gate.block(pause_id, deadline_s)


def _of_all_ranks(captured: CapturedLayout, world_size: int) -> list[CapturedLayout]:
    """Return the captured layout of every rank; every rank calls this.

    The ranks exchange JSON, because peer bytes are never unpickled.
    """
    if world_size == 1:
        return [captured]
    from vllm.distributed.parallel_state import get_world_group

    group, mine = get_world_group().cpu_group, bytearray(msgspec.json.encode(captured))
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group)
    longest = int(max(lengths))
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(found, torch.frombuffer(mine.ljust(longest), dtype=torch.uint8), group)
    return [msgspec.json.decode(body.numpy().data, type=CapturedLayout) for body in found]


def _give_worker() -> None:
    """Patch vLLM's worker to give itself to its transfer engine at the trainer's first call."""
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    initialise = VllmWorker.init_weight_transfer_engine

    def with_worker(worker: Any, init_info: dict[str, object]) -> None:
        if isinstance(worker.weight_transfer_engine, WindlassTransferEngine):
            worker.weight_transfer_engine.worker = worker
        initialise(worker, init_info)

    VllmWorker.init_weight_transfer_engine = with_worker


# vLLM imports this module in each worker of this backend while it loads the model.
_give_worker()
