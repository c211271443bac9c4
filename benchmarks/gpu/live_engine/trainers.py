"""Trainer ranks in separate processes, controlled by commands."""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import block_float8
import torch
import torch.distributed as dist
import transformers

import windlass
from live_engine import vllm_nccl
from live_engine.surroundings import TOKEN
from windlass.transports.cuda_ipc import CudaIpcConfig
from windlass.transports.registry import TransportConfig, parse_transport

BUCKET_NBYTES = 1 << 30


def transport_of(name: str, device: int, num_multiprocessors: int) -> TransportConfig:
    """Return the transport that `--transport` names; network transports find the parameters' GPU by themselves."""
    config = parse_transport(name)
    if isinstance(config, CudaIpcConfig):
        return CudaIpcConfig(device=device, num_multiprocessors=num_multiprocessors)
    return config


class TrainerRank:
    """FSDP2 rank. `Trainers` calls its methods by name through a pipe, in all ranks together."""

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.begin(rank, device, world, store)
        mesh = init_device_mesh(self.kind, (world,))
        config = transformers.AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            self.module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            )
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.module.to_empty(device=self.kind)
        self.full: list[tuple[str, torch.Tensor]] = []
        self.own: Any = None

    def begin(self, rank: int, device: int, world: int, store: str) -> None:
        """Connect to the other ranks, on a GPU, or without one if `device` is below 0."""
        self.rank, self.device = rank, device
        self.kind = "cpu" if device < 0 else "cuda"
        if device >= 0:
            torch.cuda.set_device(device)
        backend = "gloo" if device < 0 else "nccl"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)

    def fill(self, seed: int) -> None:
        """Set new weights everywhere. Weights of norms are near 1, so that different prompts get different tokens."""
        for index, (name, parameter) in enumerate(self.module.named_parameters()):
            generator = torch.Generator(self.kind)
            generator.manual_seed((seed * 1000 + index) * 64 + self.rank)
            mean = 1.0 if "norm" in name else 0.0
            parameter.data.to_local().normal_(mean, 0.02, generator=generator)
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
        )

    def disconnect(self) -> None:
        self.client.close()

    def publish(self, version: int) -> windlass.UpdateReport:
        return self.client.publish(version).result()

    def gather(self) -> int:
        """Gather all full tensors on rank 0, as the engines' own transfers need them."""
        for name, parameter in self.module.named_parameters():
            gathered = parameter.full_tensor().detach()
            if self.rank == 0:
                self.full.extend(unstack(name, gathered))
        torch.cuda.synchronize()
        return len(self.full)

    def check_quantiser(self, engine: str) -> tuple[int, int]:
        """Quantise a matrix with Windlass and the engine's function; return the numbers of different values and scales."""
        weight = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
        theirs = block_float8.engines_own(engine)[1](weight)
        ours = block_float8.windlass_own(weight.cpu())
        return tuple(  # type: ignore[return-value]
            int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
            for a, b in zip(theirs, ours, strict=True)
        )

    def save_quantised(self, engine: str, folder: str) -> str:
        """Save the full weights as a checkpoint in block float8; return the name of the quantiser."""
        name_of_quantiser, quantise = block_float8.engines_own(engine)
        writer = block_float8.Writer(Path(folder), quantise)
        for name, parameter in self.module.named_parameters():
            gathered = parameter.full_tensor().detach()
            if self.rank == 0:
                for part_name, part in unstack(name, gathered):
                    writer.add(part_name, part)
        if self.rank == 0:
            writer.flush()
        return name_of_quantiser

    def own_init(self, engine: str, port: int, world_size: int) -> None:
        if self.rank != 0:
            return
        self.engine = engine
        if engine == "vllm":
            self.own = vllm_nccl.trainer_group(port, world_size)
        else:
            from sglang.srt.utils import init_custom_process_group

            self.own = init_custom_process_group(
                backend="nccl",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=world_size,
                rank=0,
                group_name="own",
            )

    def own_send(self, bucket: int = 0) -> None:
        if self.rank != 0:
            return
        if self.engine == "vllm":
            vllm_nccl.send(self.own, self.full, packed=True)
        else:
            parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in self.buckets()[bucket]]
            dist.broadcast(torch.cat(parts), src=0, group=self.own)
        torch.cuda.synchronize()

    def buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        found: list[list[tuple[str, torch.Tensor]]] = [[]]
        nbytes = 0
        for name, tensor in self.full:
            if nbytes and nbytes + tensor.nbytes > BUCKET_NBYTES:
                found.append([])
                nbytes = 0
            found[-1].append((name, tensor))
            nbytes += tensor.nbytes
        return found

    def bucket_names(self) -> list[list[tuple[str, list[int]]]]:
        return [[(name, list(t.shape)) for name, t in bucket] for bucket in self.buckets()]

    def end(self) -> None:
        self.client.close()
        dist.destroy_process_group()


class MegatronRank(TrainerRank):
    """Megatron-core rank, with TP and EP over all ranks."""

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        import megatron_model

        from windlass.jobs.megatron_cpu import install
        from windlass.trainers.megatron import describe_megatron_trainer

        if device < 0:
            install()
        self.begin(rank, device, world, store)
        config = json.loads((Path(model) / "config.json").read_text())
        self.family, self.vocab = config["model_type"], config["vocab_size"]
        experts = config.get("num_experts", config.get("n_routed_experts", 0))
        ep = world if experts else 1
        megatron_model.start_parallel(world, ep)
        if "kv_lora_rank" in config:
            self.module = megatron_model.build_latent(config, world, ep)
        else:
            sizes = megatron_model.Sizes(
                hidden=config["hidden_size"],
                inner=config["moe_intermediate_size"] if experts else config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                key_value_heads=config["num_key_value_heads"],
                num_experts=experts,
                vocab=self.vocab,
                head=config["head_dim"],
            )
            self.module = megatron_model.build(sizes, world, ep)
        self.described = describe_megatron_trainer(
            self.module, family=self.family, vocab_size=self.vocab
        )
        held = (*self.module.parameters(), *self.module.buffers())
        by_address = {tensor.data_ptr(): tensor.detach() for tensor in held}
        self.tensors = [by_address[memory.address] for memory in self.described.parameters()]
        self.full = []
        self.own = None

    def fill(self, seed: int) -> None:
        """Set new weights everywhere; replicated weights are equal on all ranks.

        With smaller weights, a Qwen3 model with experts gives prompts that share a long prefix the same tokens.
        """
        generator = torch.Generator(self.kind)
        spread = 0.06 if self.family == "qwen3_moe" else 0.02
        manifest = self.described.manifest
        first = {shard.parameter: shard for shard in reversed(list(manifest.shards()))}
        for parameter, tensor in zip(manifest.parameters, self.tensors, strict=True):
            shard = first[parameter.name]
            place = f"{seed} {shard.tensor} {shard.box.offsets}"
            generator.manual_seed(zlib.crc32(place.encode()))
            tensor.normal_(1.0 if "norm" in shard.tensor else 0.0, spread, generator=generator)
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def connect(
        self, controller: str, num_multiprocessors: int = 0, transport: str = "cuda_ipc"
    ) -> None:
        from windlass.trainers.megatron import connect_megatron_trainer

        self.client = connect_megatron_trainer(
            self.module,
            family=self.family,
            vocab_size=self.vocab,
            controller=controller,
            token=TOKEN,
            transport=transport_of(transport, self.device, num_multiprocessors),
        )

    def gather(self) -> int:
        import megatron_model

        full = megatron_model.gather(self.described, self.tensors)
        self.full = full if self.rank == 0 else []
        return len(self.full)

    def save_quantised(self, engine: str, folder: str) -> str:
        name_of_quantiser, quantise = block_float8.engines_own(engine)
        writer = block_float8.Writer(Path(folder), quantise)
        self.gather()
        for name, tensor in self.full:
            writer.add(name, tensor)
        self.full = []
        writer.flush()
        return name_of_quantiser


TRAINERS: dict[str, type[TrainerRank]] = {"fsdp": TrainerRank, "megatron": MegatronRank}


def train(
    kind: str, rank: int, device: int, world: int, store: str, model: str, pipe: Connection
) -> None:
    """Run a rank."""
    serve(TRAINERS[kind](rank, device, world, store, model), pipe)


def serve(trainer: TrainerRank, pipe: Connection) -> None:
    """Carry out commands (names of methods) until `end`; answer each with its seconds."""
    pipe.send((0.0, "ready"))
    command = ""
    while command != "end":
        command, *arguments = pipe.recv()
        started = time.perf_counter()
        answer = getattr(trainer, command)(*arguments)
        pipe.send((time.perf_counter() - started, answer))


def unstack(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield the checkpoint's matrices of a parameter with stacked experts."""
    at, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        inner = tensor.shape[1] // 2
        for expert in range(tensor.shape[0]):
            yield f"{at}.{expert}.gate_proj.weight", tensor[expert, :inner]
            yield f"{at}.{expert}.up_proj.weight", tensor[expert, inner:]
    elif kind == "down_proj":
        for expert in range(tensor.shape[0]):
            yield f"{at}.{expert}.down_proj.weight", tensor[expert]
    else:
        yield name, tensor


class Trainers:
    """All trainer ranks. Every rank receives each command."""

    def __init__(self, kind: str, devices: list[int], store: str, model: str) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=train, args=(kind, rank, device, len(devices), store, model, theirs)
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    async def receive(self, deadline_s: float = 300.0) -> list[Any]:
        found = []
        for pipe in self.pipes:
            there = await asyncio.to_thread(pipe.poll, deadline_s)
            if not there:
                raise TimeoutError("a trainer rank does not answer")
            found.append(await asyncio.to_thread(pipe.recv))
        return found

    async def all(self, *command: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(command)
        return await self.receive()
