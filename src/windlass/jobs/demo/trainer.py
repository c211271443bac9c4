"""The demo's trainer: what a user writes in a torchrun script of their own.

`python -m torch.distributed.run --nproc-per-node 2 -m windlass.jobs.demo.trainer SETTINGS URL`
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import windlass
from windlass.envs import control_token
from windlass.jobs.demo.grpo import build_model, grpo_loss
from windlass.jobs.demo.settings import DemoSettings, load_settings


def shard(model: torch.nn.Module, num_ranks: int) -> None:
    """FSDP2: one unit per decoder layer, one for the rest."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def save_version(model: torch.nn.Module, settings: DemoSettings, version: int) -> None:
    """Rank 0 keeps the gathered weights, so that the demo can prove what engines served.

    Collective. Windlass itself gathers nothing; this is the demo's own oracle.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = full.detach().clone()
    if dist.get_rank() == 0:
        save_file(weights, settings.versions_dir / f"{version}.safetensors")


def main() -> None:
    """Train and publish until the steps are done."""
    settings = load_settings(Path(sys.argv[1]))
    url, token = sys.argv[2], control_token()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model(msgspec.json.decode(settings.model_config_path.read_bytes()), settings.seed)
    shard(model, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    with (
        windlass.connect_trainer(
            model, controller=url, token=token, transport=settings.transport
        ) as trainer,
        windlass.BatchClient(url, token) as batches,
    ):
        save_version(model, settings, 0)
        trainer.publish(0)
        for step in range(settings.steps):
            batch = batches.next_batch(step, rank, world_size, deadline_s=settings.step_deadline_s)
            loss = grpo_loss(model, batch.samples)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            save_version(model, settings, step + 1)
            trainer.publish(step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
