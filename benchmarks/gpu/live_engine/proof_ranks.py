"""Trainer ranks of `prove_live_engine.py`, for small models of transformers or Megatron-core."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing as mp
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

import windlass
from live_engine.stacks import write_stacks
from live_engine.surroundings import TOKEN
from live_engine.trainers import MegatronRank, TrainerRank, Trainers, serve, transport_of
from windlass.layout.naming.adapters import adapter_names
from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS, StackedRule
from windlass.transfer.dtensor import NameMap

RANK = 8
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "",
    "r": RANK,
    "lora_alpha": 12,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
    "use_dora": False,
    "use_rslora": False,
}
"""Configuration of the adapter. alpha / rank is not a power of two, so scaling rounds."""


_MIXTRAL_LAYER = "model.layers.{layer}"
_MIXTRAL_EXPERT = f"{_MIXTRAL_LAYER}.block_sparse_moe.experts.{{expert}}"
STACKED: Mapping[str, tuple[StackedRule, ...]] = {
    "mixtral": (
        StackedRule(
            f"{_MIXTRAL_LAYER}.mlp.experts.gate_up_proj",
            (f"{_MIXTRAL_EXPERT}.w1.weight", f"{_MIXTRAL_EXPERT}.w3.weight"),
        ),
        StackedRule(f"{_MIXTRAL_LAYER}.mlp.experts.down_proj", (f"{_MIXTRAL_EXPERT}.w2.weight",)),
    ),
    "gpt_oss": (),
}
"""Model type -> checkpoint names of stacked experts that differ from Qwen3-MoE; gpt-oss also stacks in checkpoints."""
RENAMED: Mapping[str, tuple[str, str]] = {"mixtral": (".mlp.gate.", ".block_sparse_moe.gate.")}
"""Model type -> part of transformers' names, and its replacement in checkpoints."""


class FsdpProof(TrainerRank):
    """FSDP2 rank. Tied parameters stay tied; buffers of checkpoints are trained, too."""

    spread = 0.03

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.begin(rank, device, world, store)
        config = transformers.AutoConfig.from_pretrained(model)
        self.module_type: str = config.model_type
        torch.manual_seed(1)
        with torch.device(self.kind):
            self.module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            )
        mesh = init_device_mesh(self.kind, (world,))
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        # Engines have these buffers in float32.
        for buffer in self._buffers().values():
            buffer.data = buffer.data.float()
        self.full: list[tuple[str, torch.Tensor]] = []
        self.own: Any = None

    def _buffers(self) -> dict[str, torch.Tensor]:
        saved = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Set new values such that tokens depend on the whole prompt, see `norm_mean`."""
        generator = torch.Generator(self.kind)
        # With smaller weights, a Qwen3 model with experts gives prompts that share a long prefix the same tokens.
        spread = 0.06 if self.module_type == "qwen3_moe" else self.spread
        for index, (name, parameter) in enumerate(self.module.named_parameters()):
            generator.manual_seed((seed * 1000 + index) * 64 + self.rank)
            mean = norm_mean(self.module_type) if is_norm(name) else 0.0
            parameter.to_local().normal_(mean, spread, generator=generator)
        # These values are equal on every rank.
        for index, buffer in enumerate(self._buffers().values()):
            generator.manual_seed((seed * 1000 + 999 - index) * 64)
            buffer.normal_(0.0, 0.03, generator=generator)
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def connect(
        self, controller: str, num_multiprocessors: int = 0, transport: str = "cuda_ipc"
    ) -> None:
        self.client = windlass.connect_trainer(
            self.module,
            controller=controller,
            token=TOKEN,
            transport=transport_of(transport, self.device, num_multiprocessors),
            name_map=self.names(),
            stacked=STACKED.get(self.module_type, TRANSFORMERS_EXPERTS),
            release=self.releases(),
        )

    def releases(self) -> Callable[[], None] | None:
        """Return the function that frees the rank's weights after an update; None if it keeps them."""
        return None

    def names(self) -> NameMap | None:
        """Return the map from names in the module to names in the checkpoint."""
        if self.module_type not in RENAMED:
            return None
        ours, theirs = RENAMED[self.module_type]
        return lambda name: name.replace(ours, theirs)

    def save(self, folder: str) -> None:
        """Save the full weights as a checkpoint with transformers' names, one file per layer.

        Only one layer is held in full at a time. All ranks must call this together.
        """
        layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        tensors = (*self.module.named_parameters(), *self._buffers().items())
        for name, tensor in tensors:
            layers[".".join(name.split(".")[:3])][name] = tensor.detach()
        files: dict[str, str] = {}
        for number, layer in enumerate(layers.values()):
            whole = {
                name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                for name, tensor in layer.items()
            }
            named = revert_weight_conversion(self.module, whole)
            file = f"model-{number:05}.safetensors"
            write(self.rank, iter(named.items()), Path(folder), file)
            files |= dict.fromkeys(named, file)
        if self.rank == 0:
            index = {"metadata": {}, "weight_map": files}
            (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))


def is_norm(name: str) -> bool:
    """Return whether a parameter is the scale of a norm."""
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def norm_mean(model_type: str) -> float:
    """Return the mean of the weights of norms.

    With a mean of 1, Gemma always repeats the last token whatever the layers add, because its embeddings are tied and
    scaled. Greedy tokens would then prove nothing about keys and values.
    """
    return 6.0 if model_type == "gemma3_text" else 1.0


class AdapterProof(FsdpProof):
    """FSDP2 rank that trains only a LoRA adapter, with PEFT's names; its model does not change."""

    spread = 0.2

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(rank, device, world, store, model)
        self.model = self.module
        self.module = torch.nn.Module()
        for name, parameter in self.model.named_parameters():
            path = name.removesuffix(".weight")
            if not path.endswith("_proj"):
                continue
            rows, columns = parameter.shape
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                low = torch.empty(shape, dtype=torch.bfloat16, device=self.kind)
                put(self.module, f"base_model.model.{path}.{part}.default.weight", low)
        fully_shard(self.module, mesh=init_device_mesh(self.kind, (world,)))

    def names(self) -> NameMap | None:
        """See `FsdpProof.names`."""
        return adapter_names()

    def save_model(self, folder: str) -> None:
        """Save the model without the adapter."""
        self.module, adapter = self.model, self.module
        super().fill(99)
        super().save(folder)
        self.module = adapter

    def save(self, folder: str) -> None:
        """Save the adapter in PEFT's format. All ranks must call this together."""
        held = (
            (name.replace(".default.", "."), parameter.full_tensor().detach())
            for name, parameter in self.module.named_parameters()
        )
        write(self.rank, held, Path(folder), "adapter_model.safetensors")
        if self.rank == 0:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))


def put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Add a parameter with a dotted name, and create missing modules on its path."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, torch.nn.Parameter(tensor))


class MegatronProof(MegatronRank):
    """Megatron-core rank."""

    def save(self, folder: str) -> None:
        """See `FsdpProof.save`."""
        self.gather()
        write(self.rank, iter(self.full), Path(folder))
        self.full = []
        if self.kind == "cuda":
            # Engines measure the free memory when they start.
            torch.cuda.empty_cache()


def write(
    rank: int,
    tensors: Iterator[tuple[str, torch.Tensor]],
    folder: Path,
    file: str = "model.safetensors",
) -> None:
    """Write `tensors` on rank 0. All ranks iterate over them, because gathering needs all ranks."""
    from safetensors.torch import save_file

    held = {}
    for name, tensor in tensors:
        if rank == 0:
            held[name] = tensor.cpu().contiguous()
    if rank == 0:
        save_file(held, folder / file, metadata={"format": "pt"})


RANKS: dict[str, type[FsdpProof] | type[MegatronProof]] = {
    "fsdp": FsdpProof,
    "fsdp-adapter": AdapterProof,
    "megatron": MegatronProof,
}


def ranks_of(kind: str) -> type[FsdpProof] | type[MegatronProof]:
    """Return the class of a rank."""
    if kind == "fsdp-turns":
        # It imports this module.
        from live_engine.turns import TurnsRank

        return TurnsRank
    return RANKS[kind]


def train(
    kind: str,
    rank: int,
    device: int,
    world: int,
    store: str,
    model: str,
    log: str,
    pipe: Connection,
) -> None:
    """Run a rank. Its output goes to a file; on SIGUSR2 also the stacks of its threads."""
    with Path(log).open("a") as sink:
        os.dup2(sink.fileno(), sys.stdout.fileno())
        os.dup2(sink.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    serve(ranks_of(kind)(rank, device, world, store, model), pipe)


class ProofTrainers(Trainers):
    """`Trainers` with a log file."""

    def __init__(self, kind: str, devices: list[int], store: str, model: str, log: Path) -> None:
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            arguments = (kind, rank, device, len(devices), store, model, str(log), theirs)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            # Closed here, so that this process notices the end of a rank.
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def stacks(self) -> None:
        """Let every rank write the stacks of its threads to the log."""
        for process in self.processes:
            write_stacks(process.pid)

    def kill(self) -> None:
        """Kill all ranks. Ranks that have ended are ignored."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
