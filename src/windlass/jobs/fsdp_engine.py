"""An FSDP2 `TrainEngine`: model, optimiser and loss are the user's callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windlass.config import ReplicaPlace, take_name
from windlass.errors import ConfigError
from windlass.jobs.train_worker import TrainContext, TrainEngine
from windlass.rollout.messages import TrainingSample
from windlass.trainers.client import TrainerClient, connect_trainer
from windlass.transports.base import TransportConfig

Samples = Sequence[Sequence[TrainingSample]]
"""What a training step of one rank gets: its groups, each with its samples."""


@final
class FsdpEngine(TrainEngine):
    """The `TrainEngine` of an FSDP2 rank; every rank is its own data-parallel rank.

    Args:
        model: builds the module; called after the process group exists, seeded alike on all ranks.
        optimizer: from the sharded module. loss: from the module and this rank's groups; a
            scalar that depends on the module, since every rank must enter its collectives.
        units: submodules to shard on their own, usually decoder layers.
        backend: of torch.distributed, "cpu:gloo,cuda:nccl" on GPUs. seed: before `model` is called.
        device: where the model is moved before it is sharded; "cuda" is the first GPU that this rank sees.
        max_grad_norm: gradients are clipped to it; 0 for never.
        publish_to_fleet: whether to connect to the controller's fleet.
        transport: see `connect_trainer`.
        replica: see `connect_trainer`, and `TrainController.publish` for what a replica does.
    """

    def __init__(
        self,
        *,
        model: Callable[[], torch.nn.Module],
        optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        loss: Callable[[torch.nn.Module, Samples], torch.Tensor],
        units: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] | None = None,
        backend: str = "gloo",
        device: str = "cpu",
        seed: int = 0,
        max_grad_norm: float = 1.0,
        publish_to_fleet: bool = True,
        transport: str | TransportConfig = "auto",
        replica: ReplicaPlace = ReplicaPlace.OFF,
    ) -> None:
        self._build, self._build_optimizer, self._loss = model, optimizer, loss
        self._units, self._device = units, torch.device(device)
        self._backend, self._seed, self._max_grad_norm = backend, seed, max_grad_norm
        self._publish_to_fleet, self._transport = publish_to_fleet, transport
        self._replica = take_name("replica", replica, ReplicaPlace)
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._client: TrainerClient | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The sharded module.

        Raises:
            ConfigError: before `setup`.
        """
        if self._model is None:
            raise ConfigError("FsdpEngine: setup must come first, got no model")
        return self._model

    def setup(self, context: TrainContext) -> tuple[int, int]:
        timeout = timedelta(seconds=context.deadline_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            context.store_host, context.store_port, is_master=False, timeout=timeout
        )
        dist.init_process_group(
            self._backend,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device.index or 0)
        torch.manual_seed(self._seed)
        model = self._build().to(self._device)
        mesh = init_device_mesh(self._device.type, (context.world_size,))
        for unit in self._units(model) if self._units is not None else ():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model, self._optimizer = model, self._build_optimizer(model)
        if self._publish_to_fleet:
            self._client = connect_trainer(
                model,
                controller=context.controller,
                token=context.token,
                transport=self._transport,
                replica=self._replica,
                connect_deadline_s=context.deadline_s,
            )
        return context.rank, context.world_size

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:  # noqa: ARG002
        model, optimizer = self.model, self._stepped()
        optimizer.zero_grad()
        loss = self._loss(model, groups)
        torch.autograd.backward(loss)
        metrics = {"loss": float(loss.detach())}
        if self._max_grad_norm:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_grad_norm)
            full = norm.full_tensor() if isinstance(norm, dist.tensor.DTensor) else norm
            metrics["grad_norm"] = float(full)
        optimizer.step()
        return metrics

    def prepare_publish(self, version: int) -> bool:
        if self._client is None:
            raise ConfigError("FsdpEngine: publish needs publish_to_fleet=True, got False")
        self._client.prepare_publish(version)
        return self._replica is not ReplicaPlace.OFF

    def save(self, path: str) -> None:
        """Model and optimiser, as a distributed checkpoint: it may be loaded by another number of ranks."""
        from torch.distributed.checkpoint.state_dict_saver import save

        Path(path).mkdir(parents=True, exist_ok=True)
        save(self._state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self._stepped(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self._stepped())
        return {"model": model, "optimizer": optimizer}

    def _stepped(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise ConfigError("FsdpEngine: setup must come first, got no optimizer")
        return self._optimizer

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if dist.is_initialized():
            dist.destroy_process_group()
