"""One rank that trains a step in Megatron-core, then saves its description and its results."""

from __future__ import annotations

import ctypes
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_rank import Case, build, start_parallel

NUM_TOKENS = 16


@dataclass(frozen=True)
class Trained:
    """A model, its layout, and its training.

    Attributes:
        family: naming table.
        distributed: use the distributed optimizer.
    """

    case: Case
    family: str
    distributed: bool = False

    def __str__(self) -> str:
        return self.case.name


def run_trained(rank: int, world_size: int, rows: list[Trained], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    from windlass.jobs.megatron_cpu import install, without_cuda_tensors

    install()
    with without_cuda_tensors():
        for row in rows:
            torch.save(trained(row), Path(folder) / f"{row}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def trained(row: Trained) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from real_step import RealTraining

    from windlass.trainers.megatron import describe_megatron_trainer

    case = row.case
    start_parallel(case)
    model_parallel_cuda_manual_seed(1)
    chunks = build(case)
    for chunk in chunks:
        scatter(chunk)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    if case.dtype is torch.bfloat16:
        models = [Float16Module(chunk.config, chunk) for chunk in chunks]
    else:
        models = chunks
    training = RealTraining(models, num_tokens=NUM_TOKENS, lr=0.01, distributed=row.distributed)
    loss = training.loss()
    training.step()
    after = [p.detach() for chunk in chunks for p in chunk.parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    described = describe_megatron_trainer(
        training.models if len(training.models) > 1 else training.models[0],
        family=row.family,
        vocab_size=case.spec.vocab_size,
    )
    parameters = described.parameters()
    result = {
        "manifest": described.manifest.encode(),
        "memory": [bytes_at(m.address, m.nbytes) for m in parameters],
        "losses": (loss, training.loss()),
        "moved": sum(moved) / len(moved),
        "in_buffers": [lies_in(m.address, m.nbytes, training.models) for m in parameters],
        "logits": training.logits(),
    }
    parallel_state.destroy_model_parallel()
    return result


def lies_in(address: int, nbytes: int, models: list[Any]) -> bool:
    """Return whether memory is part of a parameter buffer of Megatron's data-parallel wrapper."""
    buffers = [b for m in models for b in (*m.buffers, *m.expert_parallel_buffers)]
    held = [b.param_data for b in buffers if b.param_data is not None]
    begins = [(memory.data_ptr(), memory.nbytes) for memory in held]
    return any(at <= address and address + nbytes <= at + size for at, size in begins)


def bytes_at(address: int, nbytes: int) -> bytes:
    """Return the bytes that a one-sided read would get."""
    return ctypes.string_at(address, nbytes)


@torch.no_grad()
def scatter(chunk: Any) -> None:
    """Fill a chunk with distinct random values: equal for replicas, different for parts."""
    from megatron.core import parallel_state as ps

    tensors = dict(chunk.named_parameters())
    tensors |= {n: b for n, b in chunk.named_buffers() if n.endswith("expert_bias")}
    for local_name, tensor in tensors.items():
        name = global_name(chunk, local_name)
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        expert = ".experts." in name
        part = (
            (ps.get_expert_model_parallel_rank(), ps.get_expert_tensor_parallel_rank())
            if expert
            else (0, ps.get_tensor_model_parallel_rank())
        )
        if not vars(tensor).get("tensor_model_parallel") and not expert:
            part = (0, 0)
        seed = zlib.crc32(f"{name} {part}".encode())
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(noise * 0.15 + (1.0 if "norm" in name else 0.0))


def global_name(chunk: Any, name: str) -> str:
    """Return the name with the layer's number in the whole model."""
    found = re.fullmatch(r"(decoder\.layers\.\d+)(\..*)", name)
    if found is None:
        return name
    return f"layer {chunk.get_submodule(found.group(1)).layer_number}{found.group(2)}"
