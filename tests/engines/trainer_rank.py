"""One rank of a real trainer: trains a step, writes what it has as a checkpoint, publishes it.

`python trainer_rank.py RANK WORLD_SIZE JOB`, where JOB is a JSON file with `trainer`, `layout`,
`kind`, `folder` (of `old`, the model; `new`, written here; `store`), `url`, `transport`, `version`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from servers import CONFIGS, build

import windlass
from windlass.training.client import TrainerClient

NUM_TOKENS = 16
LEARNING_RATE = 0.02


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    job: dict[str, Any] = json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    store = f"file://{job['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    train = {"fsdp2": fsdp2, "megatron": megatron}[job["trainer"]]
    with train(job) as client:
        report = client.publish(job["version"])
    if rank == 0:
        Path(job["folder"], "report.json").write_text(json.dumps({"digest_ok": report.digest_ok}))
    dist.destroy_process_group()


def connection(job: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "controller": job["url"],
        "token": os.environ["WINDLASS_TOKEN"],
        "transport": job["transport"],
    }


def fsdp2(job: Mapping[str, Any]) -> TrainerClient:
    """float32 masters, one unit per decoder layer, AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = build(job["kind"], seed=1).float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = torch.arange(NUM_TOKENS).reshape(1, -1) * 7 % 250
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    plain = build(job["kind"], seed=1)
    with torch.no_grad():
        for (name, parameter), target in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert full.shape == target.shape, name
            target.copy_(full)
    if dist.get_rank() == 0:
        plain.save_pretrained(Path(job["folder"], "new"))
        copy_config(Path(job["folder"]))
    return windlass.connect_trainer(model, **connection(job))


def megatron(job: Mapping[str, Any]) -> TrainerClient:
    """float32 parameters in Megatron's own layout, SGD."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
    from cpu_shim import install
    from megatron_rank import Case, checkpoint, fill, spec_of
    from megatron_rank import build as build_megatron

    install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from windlass.training.megatron import connect_megatron_trainer

    folder = Path(job["folder"])
    spec = spec_of(CONFIGS[job["kind"]])
    case = Case("live", spec, **job["layout"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    model_parallel_cuda_manual_seed(1)
    (model,) = build_megatron(case)
    numbered = checkpoint(spec)
    fill(model, numbered)  # which element of the checkpoint lies where
    numbers = [p.detach().long().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(3)
    fill(
        model,
        {
            name: torch.randn(tensor.shape, generator=generator) * 0.05 + (tensor.dim() == 1)
            for name, tensor in numbered.items()
        },
    )
    ids = torch.arange(NUM_TOKENS).reshape(1, -1) * 7 % spec.vocab_size
    mask = torch.triu(torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool), 1)
    place = torch.arange(NUM_TOKENS).reshape(1, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model(ids, place, mask, labels=ids.roll(-1)).mean().backward()
    for name, parameter in model.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:  # of the rank's heads only
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    save_numbered(folder, numbered, numbers, [p.detach() for p in model.parameters()])
    return connect_megatron_trainer(
        model, family=spec.family, vocab_size=spec.vocab_size, **connection(job)
    )


def save_numbered(
    folder: Path,
    numbered: Mapping[str, torch.Tensor],
    numbers: list[torch.Tensor],
    values: list[torch.Tensor],
) -> None:
    """Every rank's elements put where their numbers say; collective, rank 0 writes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.save((numbers, values), folder / f"part-{rank}.pt")
    dist.barrier()
    if rank:
        return
    flat = torch.full((1 + sum(t.numel() for t in numbered.values()),), torch.nan)
    for other in range(world_size):
        for number, value in zip(*torch.load(folder / f"part-{other}.pt"), strict=True):
            real = number > 0  # not the padding of a vocabulary
            known = flat[number[real]]
            same = known.isnan() | (known == value[real])
            assert same.all(), "replicas of a parameter must be equal"
            flat[number[real]] = value[real]
    assert not flat[1:].isnan().any(), "every element of the checkpoint must lie on a rank"
    tensors = {n: flat[t.long()].to(torch.bfloat16).contiguous() for n, t in numbered.items()}
    (folder / "new").mkdir()
    save_file(tensors, folder / "new" / "model.safetensors", metadata={"format": "pt"})
    copy_config(folder)


def copy_config(folder: Path) -> None:
    shutil.copy(folder / "old" / "config.json", folder / "new" / "config.json")


if __name__ == "__main__":
    main()
