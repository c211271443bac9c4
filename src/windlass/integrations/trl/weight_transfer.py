"""TRL: `AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(["http://host:8000", ...]))`.

`WeightTransfer` implements TRL's `WeightTransferProtocol`. `attach` replaces `AsyncGRPOTrainer._sync_weight_merged` and
the loop of `AsyncRolloutWorker` (huggingface/trl 1.16, trl/experimental/async_grpo/async_grpo_trainer.py and
async_rollout_worker.py). The servers are plain vLLM servers, started with
`--weight-transfer-config '{"backend": "windlass"}'`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
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
from windlass.integrations.trl.merging import merged, merged_names
from windlass.integrations.vllm import SentWeights, WeightSync
from windlass.integrations.vllm.servers import server_urls
from windlass.layout.naming.stacked import StackedRule

__all__ = ["WeightTransfer"]

FAILED_FOR_S = 30.0
"""Seconds for which a server gets no requests after a failed request, unless all servers have failed."""
_SERVER: ContextVar[str] = ContextVar("windlass_server", default="")
"""URL of the server that the running asyncio task sends its request to."""


@final
class WeightTransfer:
    """Weight transfer from an `AsyncGRPOTrainer` to vLLM servers; one transaction updates all servers.

    A trainer of one rank needs only the `weight_transfer=` argument. Windlass reads the trainer's parameters in place.
    With several ranks, every rank must also call `attach`. No rank gathers a parameter after `attach`.

    `send_weights` pauses the servers once the weights are ready. TRL's `pause` and `resume` do nothing here.
    Updates leave out a server that dies, and the other servers continue. The server joins again once it runs.

    Args:
        servers: URLs of the servers, in the same order on every rank.
        config: see `WeightSync`.
        transport: name of the transport, or its configuration in JSON.
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        pause: one of `PAUSE_MODES`, or None; see `WeightSync`.
        api_key: API key of the servers; empty if they require none.
        deadline_s: deadline in seconds for all servers to join, and then for each version.

    Raises:
        ConfigError: `servers` is empty, contains an invalid URL, or contains a URL twice.
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
        """Make every rank of `trainer` send its own shards, and spread rollouts over all servers.

        Every rank calls this once, after the trainer's constructor and before `train`. Rollouts are spread only if the
        rollout worker is TRL's own class.

        Raises:
            ConfigError: `trainer.weight_transfer` is not this object.
        """
        if trainer.accelerator.is_main_process and trainer.weight_transfer is not self:
            raise ConfigError(
                f"attach: the trainer's weight_transfer must be this object, got {trainer.weight_transfer!r}"
            )
        self._trainer = trainer
        trainer._sync_weight_merged = functools.partial(self._send_shards, trainer)
        trainer.add_callback(_LeaveAtEnd(self))
        worker = trainer.rollout_worker
        if type(worker) is AsyncRolloutWorker and len(self._servers) > 1:
            worker._loop_cls = _FleetLoop
            worker._loop_kwargs["vllm_server_url"] = " ".join(self._servers)

    def init_weight_transfer(self) -> None:
        """Connect to the servers if `attach` was called. Otherwise the first `send_weights` connects.

        Collective over the trainer ranks if `attach` was called.

        Raises:
            ConfigError: the trainer has several ranks, and `attach` was not called.
            WindlassError: any error of `WeightSync`.
        """
        if self._trainer is not None:
            self._connect_model(self._trainer)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"weight_transfer: a trainer of {dist.get_world_size()} ranks must be attached: call "
                "attach(trainer) on every rank before train()"
            )

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses the servers."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the tensors of `iterator` to every server. Blocks.

        Memory: the caller must not change the tensors before this method returns.

        Raises:
            WindlassError: any error of `WeightSync` and of `WeightSync.send_weights`.
        """
        for name, tensor in iterator:
            self._whole.place(name, tensor)
        if self._sync is None:
            self._sync = self._connect(self._whole)
        self._send(self._sync)

    def resume(self) -> None:
        """Do nothing: the servers have resumed when `send_weights` returns."""

    def destroy(self) -> None:
        """Disconnect from the servers, which keep their weights and continue to serve. Idempotent."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()

    def _connect_model(self, trainer: AsyncGRPOTrainer) -> WeightSync:
        """Connect the model of `trainer`, unless it is connected, and return the connection. Collective."""
        if self._sync is None:
            model = trainer.accelerator.unwrap_model(trainer.model)
            names = merged_names(model.prefix) if is_peft_model(model) else None
            self._sync = self._connect(model, name_map=names)
            # Only rank 0 knows the version at which TRL resumes a run.
            self._version = broadcast_object_list([trainer.model_version], from_process=0)[0]
        return self._sync

    def _send_shards(self, trainer: AsyncGRPOTrainer, t0: float) -> tuple[float, float, float]:
        """Publish the weights; replaces TRL's `_sync_weight_merged`. Collective.

        Returns:
            Three timestamps of `time.time`: `t0`, the time when all ranks were ready, and the end of the transfer.
        """
        sync = self._connect_model(trainer)
        trainer.accelerator.wait_for_everyone()
        ready = time.time()
        model = trainer.accelerator.unwrap_model(trainer.model)
        with merged(model):
            sent = self._send(sync)
        trainer._metrics["train"]["perf/weight_sync_paused_s"].append(sent.report.pause_s)
        trainer.model_version = sent.version
        if trainer.rollout_worker is not None:
            trainer.rollout_worker.update_model_version(sent.version)
        return t0, ready, time.time()

    def _send(self, sync: WeightSync) -> SentWeights:
        """Publish the weights of the connected module as the next version."""
        self._version += 1
        return sync.send_weights(self._version)


@final
class _LeaveAtEnd(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Callback that disconnects every rank when training ends, because TRL calls `destroy` on rank 0 only."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer = transfer

    def _leave(self, *_: Any, **__: Any) -> None:
        self._transfer.destroy()

    # transformers passes many arguments to this method, which needs none of them.
    on_train_end = _leave


@final
class _FleetLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # TRL is not typed here
    """TRL's rollout loop for several servers. Each request goes to the server with the fewest open requests."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        servers = settings["vllm_server_url"].split()
        self._num_requests = dict.fromkeys(servers, 0)
        self._failed_until = dict.fromkeys(servers, 0.0)

    @property
    def vllm_server_url(self) -> str:
        """URL of the server that the running task sends its request to."""
        return _SERVER.get()

    @vllm_server_url.setter
    def vllm_server_url(self, _: str) -> None:
        """Ignore the value, which TRL's constructor assigns."""

    async def _post(self, *request: Any, **settings: Any) -> Any:
        """Choose the server with the fewest open requests, and send it a request with TRL's own `_post`.

        Prefer servers that have not failed in the last `FAILED_FOR_S` seconds.
        """

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
