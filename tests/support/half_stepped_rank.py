"""One FSDP2 rank that trains and publishes with options that could leave weights half-stepped. Tests only."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

import windlass
from windlass.errors import ConfigError, WindlassError

WORLD_SIZE, WIDTH, NUM_STEPS = 4, 12, 2
PLAIN = {
    "plain",
    "kept_gathered",
    "kept_gathered_after_backward",
    "looked_at_since",
    "mixed_precision",
    "hsdp",
    "offloaded",
    "accumulated",
}
"""Options that do not change the trained weights, except for rounding."""
EMA = "ema_swapped"
DIVERGED = "hsdp_diverged"
OPTIONS = (*sorted(PLAIN), EMA, DIVERGED)


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH + 1), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH + 1, 7)
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def step_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train one step. Every rank has the same batch, so one process alone computes the same."""
    optimizer.zero_grad()
    module(batch(step)).float().square().mean().backward()
    optimizer.step()


def trained_alone() -> dict[str, torch.Tensor]:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    for step in range(NUM_STEPS):
        step_of(module, optimizer, step)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def ema_of(weights: torch.Tensor) -> torch.Tensor:
    return weights * 0.5 + 3


def sharded(option: str) -> torch.nn.Module:
    module = model()
    replicated = option.startswith("hsdp")
    shape = (2, WORLD_SIZE // 2) if replicated else (WORLD_SIZE,)
    names = ("replicate", "shard") if replicated else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    gathered = option.startswith("kept_gathered")
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if option == "mixed_precision" else None
    )
    for unit in (module[0], module[2], module):  # type: ignore[index]
        if option == "offloaded":
            policy = CPUOffloadPolicy(pin_memory=False)
            fully_shard(unit, mesh=mesh, offload_policy=policy)
        else:
            fully_shard(unit, mesh=mesh, reshard_after_forward=not gathered, mp_policy=precision)
    if option == "kept_gathered_after_backward":
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_backward(False)
    return module


def trained(option: str, trainer: windlass.TrainerClient, module: torch.nn.Module) -> str:
    """Train and publish every step. Return why the last version was not published; empty if it was."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    said = ""
    for step in range(NUM_STEPS):
        # Half of the gradients are reduced later.
        if option == "accumulated":
            assert isinstance(module, FSDPModule)
            optimizer.zero_grad()
            module.set_requires_gradient_sync(False)
            (module(batch(step)).square().mean() / 2).backward()
            module.set_requires_gradient_sync(True)
            (module(batch(step)).square().mean() / 2).backward()
            optimizer.step()
        else:
            step_of(module, optimizer, step)
        if option in {"kept_gathered", "looked_at_since"}:
            with torch.no_grad():
                # With kept_gathered, this leaves the parameters gathered.
                module(batch(step))
        if option == DIVERGED and dist.get_rank() == 3:
            with torch.no_grad():
                local_of(module.get_parameter("2.weight"))[:1].add_(1)
        kept = {}
        if option == EMA:
            for name, parameter in module.named_parameters():
                kept[name] = copy.deepcopy(local_of(parameter))
                local_of(parameter).copy_(ema_of(kept[name]))
        try:
            trainer.publish(step, deadline_s=60)
            said = ""
        except WindlassError as error:
            said = str(error)
        for name, weights in kept.items():
            local_of(module.get_parameter(name)).copy_(weights)
    return said


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def run_rank(rank: int, urls: dict[str, str], token: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    for option, url in urls.items():
        try:
            module = sharded(option)
            with windlass.connect_trainer(module, controller=url, token=token) as trainer:
                said = trained(option, trainer, module)
        except (ConfigError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        Path(folder, f"{option}-{rank}").write_text(said)
        dist.barrier()
    dist.destroy_process_group()
