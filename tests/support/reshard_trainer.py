"""One trainer rank of `test_reshard.py`: shards a model, publishes, and saves the true weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import windlass

COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def shard(model: torch.nn.Module, layout: str) -> None:
    """Cut the model as a user of FSDP2 does."""
    if layout == "fsdp":
        fully_shard(model)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            **{f"layers.*.*.{name}": ColwiseParallel() for name in COLWISE},
            **{f"layers.*.*.{name}": RowwiseParallel() for name in ROWWISE},
        }
        parallelize_module(model.get_submodule("model"), mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])


@dataclass
class TrainerSettings:
    """Settings that a rank gets at its start."""

    rank: int
    world_size: int
    folder: Path
    layout: str
    url: str
    token: str
    transport: str


def run(pipe: Connection, settings: TrainerSettings) -> None:
    """Publish versions 0 and 1, and stay until the pipe closes."""
    torch.set_num_threads(1)
    folder = settings.folder
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=settings.rank,
        world_size=settings.world_size,
    )
    config = transformers.AutoConfig.for_model(**json.loads((folder / "config.json").read_text()))
    torch.manual_seed(99)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shard(model, settings.layout)
    has_replica = settings.layout == "hsdp"
    with windlass.connect_trainer(
        model,
        controller=settings.url,
        token=settings.token,
        transport=settings.transport,
        replica=windlass.ReplicaPlace.AUTO if has_replica else windlass.ReplicaPlace.OFF,
    ) as trainer:
        for version in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25 + version)
            truth = {
                name: p.full_tensor() if isinstance(p, DTensor) else p
                for name, p in model.named_parameters()
            }
            if settings.rank == 0:
                torch.save(
                    {n: t.detach().clone() for n, t in truth.items()}, folder / f"{version}.pt"
                )
            if not has_replica:
                trainer.publish(version)
                continue
            pending = trainer.publish(version, wait=False, copy=True)
            # The optimizer's next step does not wait for the engines.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-3.0)
            pending.result()
        # The test reads the engines' weights while the trainers live.
        pipe.poll(None)
    dist.destroy_process_group()
