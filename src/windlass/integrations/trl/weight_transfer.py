"""TRL: `AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(["http://host:8000", ...]))`.

The interface is TRL's `WeightTransferProtocol`; what `attach` replaces is its `AsyncGRPOTrainer._sync_weight_merged`
and the loop of its `AsyncRolloutWorker` (huggingface/trl, trl/experimental/async_grpo/async_grpo_trainer.py and
async_rollout_worker.py, 1.16). The servers are plain ones of vLLM with
`--weight-transfer-config '{"backend": "windlass"}'`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, is_peft_model
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from windlass.config import ControlConfig
from windlass.errors import ConfigError
from windlass.integrations.tensor_module import TensorModule
from windlass.integrations.vllm import SentWeights, WeightSync
from windlass.integrations.vllm.servers import server_urls
from windlass.layout.naming.stacked import StackedRule

__all__ = ["WeightTransfer"]

FAILED_FOR_S = 30.0
"""How long a server that failed a request gets none, while another one has not failed."""
_SERVER: ContextVar[str] = ContextVar("windlass_server", default="")


@final
class WeightTransfer:
    """Weights of an `AsyncGRPOTrainer` into vLLM servers, all of them in one transaction.

    As TRL's `weight_transfer=` alone it is for a trainer of one rank, whose parameters are read where they
    lie. `attach` is for any number of ranks, and gathers nothing.

    The fleet is paused inside `send_weights`, once the weights are ready; TRL's `pause` and `resume` do
    nothing here. A server that dies is left out, and joins again when it is back; the others go on.

    Args:
        servers: URLs of the servers, in one order on every rank.
        config: see `WeightSync`, as for all that follow.
        transport: name of the transport, or its configuration in JSON.
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        pause: one of `PAUSE_MODES`, or None.
        api_key: what the servers were started to ask for; empty for nothing.
        deadline_s: for all servers to join, and then for every version.

    Raises:
        ConfigError: no server, one that is no URL, or one twice.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        config: ControlConfig | None = None,
        transport: str = "auto",
        stacked: Sequence[StackedRule] | None = None,
        allow_unused: Sequence[str] = (),
        keep: Sequence[str] = (),
        pause: str | None = "keep",
        api_key: str = "",
        deadline_s: float = 600.0,
    ) -> None:
        self._servers = server_urls(servers)
        self._connect = functools.partial(
            WeightSync,
            servers=self._servers,
            config=config,
            transport=transport,
            stacked=stacked,
            allow_unused=allow_unused,
            keep=keep,
            pause=pause,
            api_key=api_key,
            deadline_s=deadline_s,
        )
        self._trainer: AsyncGRPOTrainer | None = None
        self._sync: WeightSync | None = None
        self._whole = TensorModule()
        self._version = 0

    def attach(self, trainer: AsyncGRPOTrainer) -> None:
        """Have every rank of `trainer` send its own shards, and rollouts go to all servers.

        Called by every rank, once, between the trainer's constructor and `train`. TRL's gather of each parameter
        is not called any more. Rollouts are spread where the rollout worker is TRL's own.

        Raises:
            ConfigError: `trainer` was given another `weight_transfer`.
        """
        if trainer.accelerator.is_main_process and trainer.weight_transfer is not self:
            raise ConfigError(
                f"attach: the trainer's weight_transfer must be this one, got {trainer.weight_transfer!r}"
            )
        self._trainer = trainer
        trainer._sync_weight_merged = functools.partial(self._send_shards, trainer)
        trainer.add_callback(_LeaveAtEnd(self))
        worker = trainer.rollout_worker
        if type(worker) is AsyncRolloutWorker and len(self._servers) > 1:
            worker._loop_cls = _FleetLoop
            worker._loop_kwargs["vllm_server_url"] = " ".join(self._servers)

    def init_weight_transfer(self) -> None:
        """Connect, where `attach` has named the model; otherwise the first `send_weights` does.

        Raises:
            ConfigError: a trainer of several ranks was not attached. Besides, see `WeightSync`.
        """
        if self._trainer is not None:
            self._connect_model(self._trainer)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"weight_transfer: a trainer of {dist.get_world_size()} ranks must be attached: call "
                "attach(trainer) on every rank before train()"
            )

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Have every server serve the tensors that TRL hands over. They must not change before this returns.

        Raises:
            WindlassError: any error of `WeightSync` and of `WeightSync.send_weights`.
        """
        for name, tensor in iterator:
            self._whole.place(name, tensor)
        if self._sync is None:
            self._sync = self._connect(self._whole)
        self._send(self._sync)

    def resume(self) -> None:
        """Do nothing: the servers go on when `send_weights` returns."""

    def destroy(self) -> None:
        """Leave the servers, which go on with what they have. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()

    def _connect_model(self, trainer: AsyncGRPOTrainer) -> WeightSync:
        """Collective."""
        if self._sync is None:
            model = trainer.accelerator.unwrap_model(trainer.model)
            names = _merged_names(model.prefix) if is_peft_model(model) else None
            self._sync = self._connect(model, name_map=names)
            # Only rank 0 is told by TRL with which version a run that is resumed begins.
            self._version = broadcast_object_list([trainer.model_version], from_process=0)[0]
        return self._sync

    def _send_shards(self, trainer: AsyncGRPOTrainer, t0: float) -> tuple[float, float, float]:
        """In the place of `_sync_weight_merged`: the times at which pause, barrier and transfer were over."""
        sync = self._connect_model(trainer)
        trainer.accelerator.wait_for_everyone()
        ready = time.time()
        model = trainer.accelerator.unwrap_model(trainer.model)
        if is_peft_model(model):
            model.merge_adapter()
        try:
            sent = self._send(sync)
        finally:
            if is_peft_model(model):
                model.unmerge_adapter()
        trainer._metrics["train"]["perf/weight_sync_paused_s"].append(sent.report.pause_s)
        trainer.model_version = sent.version
        if trainer.rollout_worker is not None:
            trainer.rollout_worker.update_model_version(sent.version)
        return t0, ready, time.time()

    def _send(self, sync: WeightSync) -> SentWeights:
        self._version += 1
        return sync.send_weights(self._version)


@final
class _LeaveAtEnd(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """TRL calls `destroy` on rank 0 only."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer = transfer

    def _leave(self, *_: Any, **__: Any) -> None:
        self._transfer.destroy()

    on_train_end = _leave  # which is handed everything that a callback may want


@final
class _FleetLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # nor is TRL
    """TRL's rollout loop over several servers: a request goes to the one that has the fewest."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        servers = settings["vllm_server_url"].split()
        self._num_requests = dict.fromkeys(servers, 0)
        self._failed_until = dict.fromkeys(servers, 0.0)

    @property
    def vllm_server_url(self) -> str:
        """Of the request that the running task makes."""
        return _SERVER.get()

    @vllm_server_url.setter
    def vllm_server_url(self, _: str) -> None:
        """Set by TRL's constructor."""

    async def _post(self, *request: Any, **settings: Any) -> Any:
        def load(url: str) -> tuple[bool, int]:
            return time.monotonic() < self._failed_until[url], self._num_requests[url]

        server = min(self._num_requests, key=load)
        _SERVER.set(server)
        self._num_requests[server] += 1
        try:
            return await super()._post(*request, **settings)
        except Exception:
            self._failed_until[server] = time.monotonic() + FAILED_FOR_S
            raise
        finally:
            self._num_requests[server] -= 1


def _merged_names(prefix: str) -> Callable[[str], str | None]:
    """The base model's names once an adapter is merged; `prefix` is that of the adapter's own parameters."""

    def name_map(name: str) -> str | None:
        name = name.removeprefix("base_model.model.")
        if prefix in name or "original_module" in name:
            return None
        return name.replace(".base_layer", "").replace("modules_to_save.default.", "")

    return name_map
