"""Stand-ins for the parts of AReaL's Archon and Megatron engines that run on GPUs only."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


def archon_actor() -> type[Any]:
    """Return the class that `PPOTrainer` would use for `archon`, and let it run on a CPU."""
    from areal.experimental.engine import archon_engine

    # Micro-batches are padded to whole pages of a GPU, beyond the positions of the models of tests.
    vars(archon_engine)["DEFAULT_PAGE_SIZE_BYTES"] = 1
    found: type[Any] = archon_engine.ArchonPPOActor
    return found


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Build Megatron models on a CPU inside the block, without forward passes. Import AReaL inside the block.

    Transformer Engine needs CUDA. Its layers have only their parameters here.
    """
    from te_stub import install

    from windlass.jobs import megatron_cpu

    install("megatron.bridge")
    # Megatron-core then uses the optimizers of torch.
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]
    megatron_cpu.install()
    with megatron_cpu.without_cuda_tensors():
        yield


def megatron_actor() -> type[Any]:
    """Return the class that `PPOTrainer` would use for `megatron`, inside `megatron_on_cpu`."""
    import areal.engine
    from areal.engine import megatron_engine
    from transformers import Qwen3Config

    class CpuTorch(ModuleType):
        """torch, whose devices are the CPU."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def device(self, *_: object) -> torch.device:
            return torch.device("cpu")

    vars(megatron_engine)["torch"] = CpuTorch("torch")
    # mbridge reads this value at its place in transformers 4.
    Qwen3Config.rope_theta = 10000.0
    found: type[Any] = areal.engine.MegatronPPOActor
    return found


def step_megatron(actor: Any, version: int) -> None:
    """Make one optimizer step of AReaL's Megatron engine with given gradients, equal on ranks with equal parameters."""
    actor.optimizer_zero_grad()
    for name, parameter in actor.model.named_parameters():
        # Both ends of a pipeline have the matrix of tied embeddings.
        tied = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
        generator = torch.Generator().manual_seed(zlib.crc32(f"{tied} {version}".encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    assert actor.optimizer_step()["update_successful"] == 1.0
