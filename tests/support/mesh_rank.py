"""Ranks of `test_fsdp_engine_mesh.py`: they train a small decoder in every requested way, one after another.

`trained` of the test computes the reference in one process, without FSDP, meshes or collectives.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from windlass.jobs.fsdp_engine import FsdpEngine, ParallelSizes, Samples
from windlass.jobs.train_worker import TrainContext
from windlass.rollout.messages import TrainingSample

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH = 31, 24, 4, 2, 8
DEADLINE_S = 60.0
WORLD_SIZE = 4


class Block(nn.Module):
    """Attention and a gated MLP. `context` is the group that shares the sequence."""

    context: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [p(y).unflatten(-1, (-1, WIDTH // NUM_HEADS)) for p in (self.q, self.k, self.v)]
        q, k, v = (each.transpose(1, 2) for each in heads)
        first = 0
        # Every rank has its part of the queries, and all keys.
        if self.context is not None:
            first = dist.get_rank(self.context) * x.shape[1]
            k, v = (
                all_gather_tensor_autograd(each.contiguous(), 2, self.context) for each in (k, v)
            )
        at = torch.arange(k.shape[2])
        mask = at[None, :] <= (first + torch.arange(q.shape[2]))[:, None]
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: torch.Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """Decoder from tokens (B, T) to logits (B, T, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x).float()
        return found


class Sparse(nn.Module):
    """Decoder whose experts each get the samples of one kind; the others and two more layers get no gradient.

    The layer `tower` is a unit of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.unused, self.tower = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([self.tower])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        kinds = tokens[:, 0] % len(self.experts)
        for kind in {*kinds.tolist()}:
            x = x + self.experts[kind](x) * (kinds == kind)[:, None, None]
        found: torch.Tensor = self.head(x).float()
        return found


def module_of(way: dict[str, Any]) -> nn.Module:
    """Return the module that the ranks train in this way."""
    return Sparse() if way.get("sparse") else Decoder()


PLAN = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up", "gate")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("o", "down")},
}


def cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the linear layers. Norms, embedding and head stay whole, on another mesh."""
    parallelize_module(module, mesh, PLAN)


def batch(step: int, num_groups: int) -> list[list[TrainingSample]]:
    """Return groups of two samples; every sample has its own tokens and reward."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for group in range(num_groups):
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator).tolist()
        found.append(
            [
                TrainingSample(
                    prompt_ids=tuple(each[:1]),
                    output_ids=tuple(each[1:]),
                    logprobs=(-1.0,) * LENGTH,
                    versions=(step,) * LENGTH,
                    reward=1.0 + group + 0.5 * index,
                    group_id=group,
                    engine="e",
                )
                for index, each in enumerate(tokens)
            ]
        )
    return found


def groups_of(way: dict[str, Any], step: int) -> list[list[TrainingSample]]:
    """Return the groups of all ranks. For `Sparse`, the samples of a group are of one kind."""
    found = batch(step, way["groups"])
    if not way.get("sparse"):
        return found
    return [
        [msgspec.structs.replace(sample, prompt_ids=(kind,)) for sample in group]
        for kind, group in enumerate(found)
    ]


def mean_loss(module: nn.Module, groups: Samples, rank: int = 0, size: int = 1) -> torch.Tensor:
    """Return the mean loss over samples, of this part of the sequence."""
    samples = [sample for group in groups for sample in group]
    tokens = torch.tensor([(*s.prompt_ids, *s.output_ids) for s in samples])
    part = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    logits = module(tokens[:, :-1][:, part])
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:][:, part, None])[..., 0]
    found: torch.Tensor = -(torch.tensor([s.reward for s in samples])[:, None] * chosen).mean()
    return found


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    decay = 0.1 if isinstance(module, Sparse) else 0.0
    # On GPUs, foreach is the default.
    return torch.optim.SGD(
        module.parameters(), lr=0.5, momentum=0.9, weight_decay=decay, foreach=True
    )


def schedule(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.25)


def engine_of(way: dict[str, Any]) -> FsdpEngine:
    """Return the engine that the rank runs."""
    sizes = ParallelSizes(**way.get("sizes", {}))

    def loss(module: nn.Module, groups: Samples) -> torch.Tensor:
        if way.get("nan"):
            # The loss is 0, and its gradients are 0 * infinity.
            return (mean_loss(module, groups) * 0).sqrt()
        if sizes.cp == 1:
            return mean_loss(module, groups)
        Block.context = made.mesh["cp"].get_group()
        return mean_loss(module, groups, dist.get_rank(Block.context), sizes.cp)

    made = FsdpEngine(
        model=partial(module_of, way),
        optimizer=optimizer,
        loss=loss,
        units=lambda module: list(module.get_submodule("layers").children()),
        sizes=sizes,
        tensor_parallel=cut if sizes.tp > 1 else None,
        num_groups=way.get("num_groups", 0),
        lr_schedule=schedule if way.get("schedule") else None,
        mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if way.get("bfloat16")
        else None,
        max_grad_norm=way["max_grad_norm"],
        seed=7,
        publish_to_fleet=False,
    )
    return made


def work(rank: int, folder: Path, way: dict[str, Any], port: int) -> None:
    engine = engine_of(way)
    index, size = engine.setup(
        TrainContext(
            rank=rank,
            world_size=WORLD_SIZE,
            store_host="127.0.0.1",
            store_port=port,
            controller="",
            token="",
            deadline_s=DEADLINE_S,
        )
    )
    if way.get("load"):
        engine.load(str(folder / way["load"]))
    metrics = [
        dict(engine.train_step(step, groups_of(way, step)[index::size])) for step in way["steps"]
    ]
    if way.get("save"):
        engine.save(str(folder / way["save"]))
    weights = {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in engine.model.named_parameters()
    }
    found = {"weights": weights, "metrics": metrics, "data_parallel": (index, size)}
    torch.save(found, folder / f"{way['name']}-{rank}.pt")
    engine.close()


def main(folder: Path, ways: list[dict[str, Any]], ports: list[int]) -> None:
    """Run every rank of every way in its own process, because torch keeps state of destroyed
    groups.

    Import modules before the fork, so that no process imports them again.
    """
    for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(name)
    for way, port in zip(ways, ports, strict=True):
        children = []
        for rank in range(WORLD_SIZE):
            if not (child := os.fork()):
                work(rank, folder, way, port)
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * WORLD_SIZE, way["name"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
