"""One rank of a real trainer: for each order, it trains a step, saves a checkpoint, and publishes.

`python trainer_rank.py RANK WORLD_SIZE NAME KIND LAYOUT FOLDER` reads one `Order` in JSON per line
and answers each with a line. LAYOUT is JSON; FOLDER contains `config.json` of the model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from servers import CONFIGS, adapted, build

import windlass
from windlass.layout.naming.adapters import adapter_names
from windlass.trainers.client import TrainerClient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NUM_TOKENS = 16
LEARNING_RATE = 0.02
IN_FLOAT32 = "e_score_correction_bias"
"""Tensor that every checkpoint stores in float32."""


class Order(msgspec.Struct, frozen=True):
    """Order to train a step, write the weights to `checkpoint` and publish them as `version`."""

    url: str
    transport: str
    version: int
    checkpoint: str


class Trained(Protocol):
    """A model in the layout of its framework."""

    def step(self) -> None:
        """Train one step; collective."""
        ...

    def save(self, folder: Path) -> None:
        """Write safetensors in bfloat16; collective, rank 0 writes."""
        ...

    def connect(self, url: str, transport: str) -> TrainerClient:
        """Connect to a controller."""
        ...


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    name, kind, layout, folder = *sys.argv[3:5], json.loads(sys.argv[5]), Path(sys.argv[6])
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{name}-{'-'.join(layout)}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    trained = trained_by(name, kind, layout)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        trained.step()
        trained.save(Path(order.checkpoint))
        if rank == 0:
            shutil.copy(folder / "config.json", order.checkpoint)
        with trained.connect(order.url, order.transport) as client:
            report = client.publish(order.version).result()
        os.write(1, msgspec.json.encode({"digest_ok": report.digest_ok}) + b"\n")
    dist.destroy_process_group()


def trained_by(name: str, kind: str, layout: Mapping[str, Any]) -> Trained:
    """Return the model of a framework. Kinds that end in `+lora` train an adapter and publish only
    the adapter."""
    if name == "megatron":
        return Megatron(kind, layout)
    base = kind.removesuffix("+lora")
    return Fsdp(kind, layout) if base == kind else FsdpAdapter(base)


class Fsdp:
    """FSDP2 with float32 masters, one unit per decoder layer, AdamW.

    `layout` has the sizes of some of the axes `replicate` (HSDP), `dp`, `cp` and `tp`. FSDP2 shards over `dp`, or over
    `cp`. The axes `cp` and `tp` are for Qwen3.
    """

    def __init__(self, kind: str, layout: Mapping[str, int] | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = build(kind, seed=1).float()
        sizes = {axis: (layout or {}).get(axis, 1) for axis in ("replicate", "dp", "cp", "tp")}
        if layout is None:
            sizes["dp"] = dist.get_world_size()
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._tensor, self._context = mesh["tp"], mesh["cp"]
        if sizes["tp"] > 1:
            split_over(self._tensor, self.model)
        if sizes["cp"] > 1:
            share_sequences(self._context, self.model)
        sharded = mesh["replicate", "dp"] if sizes["replicate"] > 1 else mesh["dp"]
        if sizes["cp"] > 1:
            sharded = mesh["cp"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(self.model, mesh=sharded)
        # Parameters on meshes of one and of two axes cannot be in one operation of `foreach`.
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, foreach=False
        )
        self._plain = build(kind, seed=1)

    def step(self) -> None:
        ids = torch.arange(NUM_TOKENS).reshape(1, -1) * 7 % 250
        # Each context-parallel rank has its own part of the sequence.
        part = torch.arange(NUM_TOKENS).chunk(self._context.size())[self._context.get_local_rank()]
        self._optimizer.zero_grad()
        self.model(
            input_ids=ids[:, part],
            position_ids=part[None],
            labels=ids[:, part],
            shift_labels=torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)[:, part],
            # FSDP2 averages over the ranks, whose parts have different numbers of labels.
            num_items_in_batch=torch.tensor((NUM_TOKENS - 1) / self._context.size()),
        ).loss.backward()
        if self._tensor.size() > 1:
            for name, parameter in self.model.named_parameters():
                # These norms see the heads of this rank only.
                if "q_norm" in name or "k_norm" in name:
                    dist.all_reduce(parameter.grad.to_local(), group=self._tensor.get_group())
        self._optimizer.step()

    @torch.no_grad()
    def whole(self) -> dict[str, torch.Tensor]:
        from torch.distributed.tensor import DTensor

        return {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in self.model.named_parameters()
        }

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        whole = self.whole()
        for name, target in self._plain.named_parameters():
            assert whole[name].shape == target.shape, name
            target.copy_(whole[name])
        if dist.get_rank() == 0:
            self._plain.save_pretrained(folder)

    def connect(self, url: str, transport: str) -> TrainerClient:
        return windlass.connect_trainer(
            self.model, controller=url, token=os.environ["WINDLASS_TOKEN"], transport=transport
        )


def split_over(mesh: DeviceMesh, model: Any) -> None:
    """Split the matrices of a Qwen3 over tensor-parallel ranks."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"},
            f"{attention}.o_proj": RowwiseParallel(),
            **{f"{mlp}.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            f"{mlp}.down_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )


def share_sequences(mesh: DeviceMesh, model: Any) -> None:
    """Let a model attend over sequences that are split over context-parallel ranks."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    group = mesh.get_group()

    def attend(
        module: Any, query: Any, key: Any, value: Any, _mask: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend with this rank's part of the queries to the keys of all ranks."""
        key, value = (
            all_gather_tensor_autograd(each.contiguous(), 2, group) for each in (key, value)
        )
        at = mesh.get_local_rank() * query.shape[2] + torch.arange(query.shape[2])
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, torch.arange(key.shape[2])[None, :] <= at[:, None],
            scale=settings["scaling"], enable_gqa=True,
        )  # fmt: skip
        return found.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("shared", attend)
    model.set_attn_implementation("shared")


class FsdpAdapter:
    """A PEFT adapter in float32 over frozen weights, sharded with them; AdamW."""

    def __init__(self, kind: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = adapted(build(kind, seed=1).float(), seed=2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        self._plain = adapted(build(kind, seed=1).float(), seed=3)

    def step(self) -> None:
        ids = torch.arange(NUM_TOKENS).reshape(1, -1) * 7 % 250
        self._optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Save as PEFT does."""
        from torch.distributed.tensor import DTensor

        targets = dict(self._plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor), name
                targets[name].copy_(parameter.full_tensor())
        if dist.get_rank() == 0:
            self._plain.save_pretrained(folder)

    def connect(self, url: str, transport: str) -> TrainerClient:
        return windlass.connect_trainer(
            self.model, controller=url, token=os.environ["WINDLASS_TOKEN"], transport=transport,
            name_map=adapter_names(),
        )  # fmt: skip


class Megatron:
    """float32 parameters in Megatron's own layout, with its wrapper, schedule and AdamW."""

    def __init__(self, kind: str, layout: Mapping[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
        from hf_settings import spec_of
        from megatron_rank import Case, all_tensors, checkpoint, fill
        from megatron_rank import build as build_megatron
        from real_step import RealTraining

        from windlass.jobs.megatron_cpu import install, without_cuda_tensors

        install()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self._spec = spec_of(CONFIGS[kind])
        case = Case("live", self._spec, config=CONFIGS[kind], **layout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
        )
        model_parallel_cuda_manual_seed(1)
        chunks: Any = build_megatron(case)
        (model,) = chunks
        self._tensors: Sequence[torch.Tensor] = all_tensors(chunks)
        self._numbered = checkpoint(self._spec)
        # The numbers show the place of each element of the checkpoint.
        fill(model, self._numbered)
        self._numbers = [tensor.detach().long().clone() for tensor in self._tensors]
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: torch.randn(tensor.shape, generator=generator) * 0.05 + ("norm" in name)
            for name, tensor in self._numbered.items()
        }
        fill(model, weights)
        self._on_cpu = without_cuda_tensors
        with self._on_cpu():
            self._training = RealTraining(chunks, num_tokens=NUM_TOKENS, lr=LEARNING_RATE)

    @property
    def chunks(self) -> Sequence[torch.nn.Module]:
        """Return the chunks of this rank in Megatron's wrapper."""
        return self._training.models

    def step(self) -> None:
        with self._on_cpu():
            self._training.step()

    def names_here(self) -> list[str]:
        """Return the checkpoint's tensors of which this rank has elements."""
        here = torch.cat([number.flatten() for number in self._numbers])
        return [name for name, n in self._numbered.items() if torch.isin(n.long(), here).any()]

    def whole(self) -> dict[str, torch.Tensor]:
        return gather_numbered(self._numbered, self._numbers, self._tensors)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        tensors = {
            name: tensor.to(torch.float32 if name.endswith(IN_FLOAT32) else torch.bfloat16)
            for name, tensor in self.whole().items()
        }
        if dist.get_rank() == 0:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def connect(self, url: str, transport: str) -> TrainerClient:
        from windlass.trainers.megatron import connect_megatron_trainer

        return connect_megatron_trainer(
            self._training.models[0], family=self._spec.family, vocab_size=self._spec.vocab_size,
            controller=url, token=os.environ["WINDLASS_TOKEN"], transport=transport,
        )  # fmt: skip


def gather_numbered(
    numbered: Mapping[str, torch.Tensor],
    numbers: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Put the elements of every rank where their numbers say; collective."""
    mine = list(zip(numbers, [value.detach() for value in values], strict=True))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    flat = torch.full((1 + sum(t.numel() for t in numbered.values()),), torch.nan)
    for part in parts:
        for number, value in part:
            # Number 0 and below mark the padding of a vocabulary.
            real = number > 0
            known = flat[number[real]]
            same = known.isnan() | (known == value[real])
            assert same.all(), "replicas of a parameter must be equal"
            flat[number[real]] = value[real]
    assert not flat[1:].isnan().any(), "every element of the checkpoint must lie on a rank"
    return {name: flat[number.long()] for name, number in numbered.items()}


if __name__ == "__main__":
    main()
