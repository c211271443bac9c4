"""One trainer rank of `test_reshard.py`: shards a model, publishes, and keeps what is true."""

from __future__ import annotations

import json
import os
import sys
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


def main() -> None:
    rank, world_size, store, layout, url, folder = (
        *(int(sys.argv[1]), int(sys.argv[2])),
        *sys.argv[3:7],
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    config = transformers.AutoConfig.for_model(
        **json.loads(Path(folder, "config.json").read_text())
    )
    torch.manual_seed(99)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shard(model, layout)
    with windlass.connect_trainer(
        model, controller=url, token=os.environ["WINDLASS_TOKEN"], transport=sys.argv[7]
    ) as trainer:
        for version in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25 + version)
            truth = {
                name: p.full_tensor() if isinstance(p, DTensor) else p
                for name, p in model.named_parameters()
            }
            if rank == 0:
                torch.save(
                    {n: t.detach().clone() for n, t in truth.items()}, f"{folder}/{version}.pt"
                )
            trainer.publish(version)
        sys.stdin.read()  # the engines are looked at while the trainers live
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
