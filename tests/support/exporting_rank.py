"""Ranks whose exporter gathers a tensor over all ranks, or stops on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from windlass.errors import WindlassError
from windlass.layout.manifest import Shard, ShardManifest
from windlass.trainers.exporter import captured_export


def shard(rank: int, world_size: int, folder: str) -> None:
    """Check that the exporter of an FSDP2 model gives the same manifest as a name map."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from windlass.trainers.fsdp import describe_trainer

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    before = [local(t).clone() for t in model.parameters()]

    def export(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in models[0].state_dict().items():
            assert isinstance(tensor, DTensor)
            yield f"model.{name}", tensor

    captured = describe_trainer(model, group="trainer", name_map=None, exporter=export)
    mapped = describe_trainer(model, group="trainer", name_map=lambda name: f"model.{name}")
    assert shards(captured.manifest) == shards(mapped.manifest)
    assert captured.manifest.parameters == mapped.manifest.parameters
    for tensor, values in zip(model.parameters(), before, strict=True):
        assert torch.equal(local(tensor), values)
    dist.destroy_process_group()


def local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def shards(manifest: ShardManifest) -> list[Shard]:
    """Return the rows of a manifest; the stride along a dim of size 1 has no meaning."""
    return [
        replace(
            one,
            strides_bytes=tuple(
                step if size > 1 else 0
                for step, size in zip(one.strides_bytes, one.box.sizes, strict=True)
            ),
        )
        for one in manifest.shards()
    ]


def run(rank: int, world_size: int, case: str, folder: str) -> None:
    """Write the boxes of this rank, or the error and its time, to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{case}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    rows = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    columns = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    norm = torch.nn.Parameter(torch.ones(5))
    tensors = {"rows": rows, "columns": columns, "norm": norm}
    if rank:
        tensors["last"] = torch.nn.Parameter(torch.zeros(4))

    def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(parts, tensor.detach())
        return torch.cat(parts, dim)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        if case == "raises" and rank:
            raise KeyError("no name for this layer")
        if case == "only the first" and rank:
            gathered(rows, 0)
            return
        yield "q", gathered(rows, 0)
        if case == "only the first":
            return
        yield "o", gathered(columns, 1).float()
        # Replicas: every rank yields its own.
        yield "norm", norm
        last = tensors.get("last", torch.zeros(4))
        dist.broadcast(last.data, src=1)
        yield "head", last

    begun = time.monotonic()
    try:
        found = captured_export(tensors, export, required=tensors, deadline_s=3.0)
        text = "\n".join(
            f"{name}: {s.tensor} {s.global_shape} {s.box} {s.offset} {s.strides}"
            for name, placed in found.items()
            for s in placed.shards
        )
    except WindlassError as error:
        text = f"{type(error).__name__}: {error}"
    assert not any(bool(tensor.any()) for name, tensor in tensors.items() if name != "norm")
    assert bool((norm == 1).all())
    Path(folder, f"{case}-{rank}").write_text(f"{time.monotonic() - begun:.1f}\n{text}")
    if case == "gathers":
        dist.destroy_process_group()
