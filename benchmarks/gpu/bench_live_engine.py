"""A live engine under load, updated by Windlass and by the engine's own NCCL weight transfer.

    python benchmarks/gpu/bench_live_engine.py --engine vllm --json FILE [--model qwen3-32b] [--cuda-graphs]
        [--quantization fp8-block]

Half of the GPUs serve (tensor parallel), half train: FSDP2 ranks that hold a Qwen3 model in
transformers' own layout, or Megatron-core ranks (TP and EP over all of them), which rewrite every
weight before each update. Clients stream tokens all the time; what an
update costs is what they saw: the longest silence of each stream around it, beside the usual time
between two tokens; and the rate of tokens while bytes are on the wire, beside the rate just before, at
two budgets of the trainers' multiprocessors. At the end both ways deliver the same weights, and every tensor of the engine
must have the same fingerprint after either, and the tokens must be the same.

With `--quantization fp8-block` the engine starts from a checkpoint in block float8 and the trainers, in
bfloat16, quantise while they store. In the end the full bfloat16 weights are quantised by the engine's
own function and saved; a fresh server that loads them must hold the same bytes and give the same tokens.
On fewer GPUs than ranks the trainers share those of the engine, and times mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing as mp
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import block_float8

import windlass
from harness import Row, median_p95, parser, report
from harness import save as save_rows
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.transports.configs import CudaIpcConfig

TOKEN = "secret of the benchmark"
ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8]
BUCKET_NBYTES = 1 << 30
LATER_VERSION = 100
BEFORE_S = 0.4
WARM_TOKENS = 100
"""A stream that has brought so many has seen its kernels compiled."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_MODULE_LOADING": "LAZY",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Shape:
    """What distinguishes a Qwen3 model from another. `num_experts` 0: dense."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    num_experts: int = 0


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 128),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8),
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8),
}


def model_config(name: str) -> dict[str, Any]:
    shape = SHAPES[name]
    common = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.num_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if shape.num_experts else "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden if shape.num_experts else shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if not shape.num_experts:
        return common
    return common | {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": shape.inner,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }


def checkpoint_names(model: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape, config = SHAPES[model], model_config(model)
    hidden, vocab, head = shape.hidden, config["vocab_size"], config["head_dim"]
    q, kv = shape.heads * head, shape.key_value_heads * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (q, hidden)
        yield at + "self_attn.k_proj.weight", (kv, hidden)
        yield at + "self_attn.v_proj.weight", (kv, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, q)
        yield at + "self_attn.q_norm.weight", (head,)
        yield at + "self_attn.k_norm.weight", (head,)
        blocks = [f"{at}mlp.experts.{expert}." for expert in range(shape.num_experts)]
        if blocks:
            yield at + "mlp.gate.weight", (shape.num_experts, hidden)
        for block in blocks or [at + "mlp."]:
            yield block + "gate_proj.weight", (shape.inner, hidden)
            yield block + "up_proj.weight", (shape.inner, hidden)
            yield block + "down_proj.weight", (hidden, shape.inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def checkpoint_entries(
    model: str, *, quantised: bool
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Name, safetensors type, shape and bytes."""
    for name, shape in checkpoint_names(model):
        if quantised:
            yield from block_float8.entries(name, shape)
        else:
            yield name, "BF16", shape, 2 * _numel(shape)


def write_config(model: str, folder: Path, *, quantised: bool) -> None:
    folder.mkdir(exist_ok=True)
    config, shape = model_config(model), SHAPES[model]
    if quantised:
        settings = block_float8.settings(shape.layers, routed=bool(shape.num_experts))
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def write_model_folder(model: str, folder: Path) -> None:
    """config.json, and a safetensors file that has a header and no data: names, shapes, types."""
    write_config(model, folder, quantised=False)
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, nbytes in checkpoint_entries(model, quantised=False):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)


# --- trainer ranks -------------------------------------------------------------------------------


class TrainerRank:
    """One FSDP2 rank. Methods are called by name through a pipe, in all ranks together."""

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        from torch.distributed.fsdp import fully_shard

        self.rank, self.device = rank, device
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
        config = transformers.AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            self.module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            )
        for layer in self.module.model.layers:
            fully_shard(layer)
        fully_shard(self.module)
        self.module.to_empty(device="cuda")
        self.full: list[tuple[str, torch.Tensor]] = []
        self.own: Any = None

    def fill(self, seed: int) -> None:
        """Other weights in every place."""
        for index, parameter in enumerate(self.module.parameters()):
            generator = torch.Generator("cuda")
            generator.manual_seed((seed * 1000 + index) * 64 + self.rank)
            parameter.data.to_local().normal_(0, 0.02, generator=generator)
        torch.cuda.synchronize()

    def connect(self, controller: str, num_multiprocessors: int = 0) -> None:
        self.client = windlass.connect_trainer(
            self.module,
            controller=controller,
            token=TOKEN,
            transport=CudaIpcConfig(device=self.device, num_multiprocessors=num_multiprocessors),
        )

    def disconnect(self) -> None:
        self.client.close()

    def publish(self, version: int) -> windlass.UpdateReport:
        return self.client.publish(version)

    def gather(self) -> int:
        """All full tensors on rank 0, as the engines' own transfers want them."""
        for name, parameter in self.module.named_parameters():
            gathered = parameter.full_tensor().detach()
            if self.rank == 0:
                self.full.extend(unstack(name, gathered))
        torch.cuda.synchronize()
        return len(self.full)

    def check_quantiser(self, engine: str) -> tuple[int, int]:
        """How many values and scales of a matrix Windlass and the engine's function do not share."""
        weight = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
        theirs = block_float8.engines_own(engine)[1](weight)
        ours = block_float8.windlass_own(weight.cpu())
        return tuple(  # type: ignore[return-value]
            int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
            for a, b in zip(theirs, ours, strict=True)
        )

    def save_quantised(self, engine: str, folder: str) -> str:
        """The full weights as a checkpoint in block float8; says whose quantiser it was."""
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
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            self.own = NCCLWeightTransferEngine.trainer_init(
                {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
            )
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
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerSendWeightsArgs,
                NCCLWeightTransferEngine,
            )

            arguments = NCCLTrainerSendWeightsArgs(group=self.own, packed=True)
            NCCLWeightTransferEngine.trainer_send_weights(iter(self.full), arguments)
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
    """The same as a rank of Megatron-core, with TP and EP over all ranks."""

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        import megatron_model

        from windlass.training.megatron import describe_megatron_trainer

        self.rank, self.device = rank, device
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
        config = json.loads((Path(model) / "config.json").read_text())
        self.family, self.vocab = config["model_type"], config["vocab_size"]
        experts = config.get("num_experts", 0)
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
        megatron_model.start_parallel(world, world if experts else 1)
        self.module = megatron_model.build(sizes, world, world if experts else 1)
        self.described = describe_megatron_trainer(
            self.module, family=self.family, vocab_size=self.vocab
        )
        by_address = {p.data_ptr(): p.detach() for p in self.module.parameters()}
        self.tensors = [by_address[memory.address] for memory in self.described.parameters()]
        self.full = []
        self.own = None

    def fill(self, seed: int) -> None:
        """Other weights in every place; what all ranks hold whole is the same in all."""
        for index, tensor in enumerate(self.tensors):
            name = self.described.manifest.parameters[index].name
            replicated = tensor.dim() == 1 or "router" in name
            generator = torch.Generator("cuda")
            generator.manual_seed((seed * 1000 + index) * 64 + (0 if replicated else self.rank))
            tensor.normal_(0, 0.02, generator=generator)
        torch.cuda.synchronize()

    def connect(self, controller: str, num_multiprocessors: int = 0) -> None:
        from windlass.training.megatron import connect_megatron_trainer

        self.client = connect_megatron_trainer(
            self.module,
            family=self.family,
            vocab_size=self.vocab,
            controller=controller,
            token=TOKEN,
            transport=CudaIpcConfig(device=self.device, num_multiprocessors=num_multiprocessors),
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
    trainer = TRAINERS[kind](rank, device, world, store, model)
    pipe.send((0.0, "ready"))
    command = ""
    while command != "end":
        command, *arguments = pipe.recv()
        started = time.perf_counter()
        answer = getattr(trainer, command)(*arguments)
        pipe.send((time.perf_counter() - started, answer))


def unstack(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """transformers' stacked experts as the checkpoint's matrices."""
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
    """All trainer ranks; a command goes to every one."""

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


# --- load ----------------------------------------------------------------------------------------


Arrivals = list[list[list[float]]]
"""Times of tokens: stream, request, token."""


def load(url: str, engine: str, streams: int, vocab: int, pipe: Connection) -> None:
    """Clients that stream tokens until told to end; then sends arrival times, per stream and request."""
    asyncio.run(_load(url, engine, streams, vocab, pipe))


def generate_request(
    engine: str, prompt: list[int], count: int, temperature: float, *, stream: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    if engine == "vllm":
        sampling = {"max_tokens": count, "temperature": temperature, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
        return "/inference/v1/generate", body
    sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
    return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": stream}


async def _load(url: str, engine: str, streams: int, vocab: int, pipe: Connection) -> None:
    ended, warm = asyncio.Event(), asyncio.Event()
    arrivals: Arrivals = [[] for _ in range(streams)]
    errors: list[str] = []

    async def client(index: int, session: aiohttp.ClientSession) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            prompt = [(index * 7919 + number * 104729 + k * 31) % vocab for k in range(64)]
            path, body = generate_request(engine, prompt, 512, 1.0, stream=True)
            times: list[float] = []
            arrivals[index].append(times)
            try:
                async with session.post(url + path, json=body) as response:
                    if response.status != 200:
                        errors.append(f"{response.status}: {(await response.text())[:200]}")
                        return
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            times.append(time.monotonic())
                            if min(len(requests[0]) for requests in arrivals) >= WARM_TOKENS:
                                warm.set()
                        if ended.is_set():
                            return
            except aiohttp.ClientError as error:
                errors.append(f"{type(error).__name__}: {error}")

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        clients = [asyncio.create_task(client(index, session)) for index in range(streams)]
        await warm.wait()
        pipe.send("warm")
        await asyncio.to_thread(pipe.recv)
        ended.set()
        await asyncio.wait(clients, timeout=10)
        for task in clients:
            task.cancel()
    pipe.send((arrivals, errors))


def gaps_of(requests: list[list[float]]) -> Iterator[tuple[float, float]]:
    """Pairs of arrivals that follow each other in the same request."""
    return itertools.chain.from_iterable(itertools.pairwise(times) for times in requests)


def turns_of(requests: list[list[float]]) -> Iterator[tuple[float, float]]:
    """The last arrival of a request and the first of the next one in its stream."""
    begun = [times for times in requests if times]
    return ((a[-1], b[0]) for a, b in itertools.pairwise(begun))


def silences(arrivals: Arrivals, windows: list[tuple[float, float]]) -> list[list[float]]:
    """Per window: the longest time between two tokens of a request that overlaps it, of every stream."""
    found = []
    for begin, end in windows:
        longest = []
        for requests in arrivals:
            gaps = [b - a for a, b in gaps_of(requests) if b > begin and a < end]
            if gaps:
                longest.append(max(gaps))
        found.append(longest)
    return found


# --- the run -------------------------------------------------------------------------------------


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with session.post(url, json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {text[:500]}")
        return json.loads(text or "null")


def common_flags(options: argparse.Namespace, folder: str, controller: str) -> list[str]:
    """Without a controller: a server that stays as it is."""
    return [
        *("--name", options.engine, "--model", folder, "--port", str(options.port)),
        *("--tp", str(options.tp), "--controller", controller, "--transport", "cuda_ipc"),
        *(() if options.quantization == "fp8-block" else ("--load-format", "dummy")),
        *("--dtype", "bfloat16", "--skip-tokenizer-init"),
    ]


class Vllm:
    """vLLM 0.24."""

    environment: ClassVar[dict[str, str]] = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def __init__(self, options: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self.options, self.session = options, session
        self.url = f"http://127.0.0.1:{options.port}"

    def command(self, folder: str, controller: str) -> list[str]:
        return [
            *("windlass.engines.vllm", *common_flags(self.options, folder, controller)),
            *self._graphs(),
            *("--max-model-len", "1024", "--max-num-seqs", str(self.options.load)),
            *("--gpu-memory-utilization", "0.4", "--disable-custom-all-reduce"),
            *("--no-enable-prefix-caching", "--seed", "0", "--disable-uvicorn-access-log"),
            *("--weight-transfer-config", '{"backend": "nccl"}', "--tokens-only"),
        ]

    def _graphs(self) -> list[str]:
        if not self.options.cuda_graphs:
            return ["--enforce-eager"]
        settings = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [self.options.load],
        }
        return ["--compilation-config", json.dumps(settings)]

    async def post(self, path: str, body: Any) -> Any:
        return await post(self.session, self.url + path, body)

    async def tokens(self) -> list[int]:
        answer = await self.post(*generate_request("vllm", PROMPT, 16, 0.0, stream=False))
        return list(answer["choices"][0]["token_ids"])

    async def fingerprints(self) -> list[dict[str, str]]:
        found = await self.post("/collective_rpc", {"method": "windlass_digests"})
        return list(found["results"])

    async def own_init(self, trainers: Trainers, port: int) -> None:
        world = self.options.tp + 1
        joining = asyncio.create_task(trainers.all("own_init", "vllm", port, world))
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
        }
        await self.post("/init_weight_transfer_engine", {"init_info": info})
        await joining
        self.names = [n for b in (await trainers.all("bucket_names"))[0][1] for n in b]

    async def own_update(self, trainers: Trainers) -> float:
        started = time.monotonic()
        await self.post("/pause?mode=keep", {})
        await self.post("/start_weight_update", {})
        info = {
            "names": [name for name, _ in self.names],
            "dtype_names": ["bfloat16"] * len(self.names),
            "shapes": [shape for _, shape in self.names],
            "packed": True,
        }
        sending = asyncio.create_task(trainers.all("own_send"))
        await self.post("/update_weights", {"update_info": info})
        await sending
        await self.post("/finish_weight_update", {})
        await self.post("/resume", {})
        return time.monotonic() - started


class Sglang:
    """SGLang 0.5.16; its own way with flattened buckets of 1 GiB."""

    environment: ClassVar[dict[str, str]] = {
        "SGLANG_HOST_IP": "127.0.0.1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        # SGLang sets this for itself; ranks of a NCCL group must agree on it.
        "NCCL_CUMEM_ENABLE": "0",
    }

    def __init__(self, options: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self.options, self.session = options, session
        self.url = f"http://127.0.0.1:{options.port}"

    def command(self, folder: str, controller: str) -> list[str]:
        return [
            *("windlass.engines.sglang", *common_flags(self.options, folder, controller)),
            *("--context-length", "1024", "--attention-backend", "triton"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *self._graphs(),
            *("--enforce-disable-flashinfer-allreduce-fusion", "--mem-fraction-static", "0.4"),
            *("--max-running-requests", "64", "--max-total-tokens", "98304"),
            *("--chunked-prefill-size", "1024", "--disable-custom-all-reduce"),
            *("--random-seed", "0", "--skip-server-warmup", "--moe-runner-backend", "triton"),
            *("--disable-radix-cache", "--log-level", "info"),
        ]

    def _graphs(self) -> list[str]:
        if not self.options.cuda_graphs:
            return ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
        return ["--cuda-graph-bs-decode", str(self.options.load), "--disable-prefill-cuda-graph"]

    async def post(self, path: str, body: Any) -> Any:
        return await post(self.session, self.url + path, body)

    async def tokens(self) -> list[int]:
        answer = await self.post(*generate_request("sglang", PROMPT, 16, 0.0, stream=False))
        return list(answer["output_ids"])

    async def fingerprints(self) -> list[dict[str, str]]:
        from windlass.engines.sglang.hook import Digests, order_ranks

        tp = self.options.tp
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(order_ranks, self.url, Digests(folder), tp, 60.0)
            return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(tp)]

    async def own_init(self, trainers: Trainers, port: int) -> None:
        world = self.options.tp + 1
        joining = asyncio.create_task(trainers.all("own_init", "sglang", port, world))
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": "own",
            "backend": "nccl",
        }
        await self.post("/init_weights_update_group", body)
        await joining
        self.buckets = (await trainers.all("bucket_names"))[0][1]

    async def own_update(self, trainers: Trainers) -> float:
        started = time.monotonic()
        await self.post("/pause_generation", {"mode": "in_place"})
        for index, names in enumerate(self.buckets):
            body = {
                "names": [name for name, _ in names],
                "dtypes": ["bfloat16"] * len(names),
                "shapes": [shape for _, shape in names],
                "group_name": "own",
                "flush_cache": False,
                "load_format": "flattened_bucket",
            }
            sending = asyncio.create_task(trainers.all("own_send", index))
            await self.post("/update_weights_from_distributed", body)
            await sending
        await self.post("/continue_generation", {})
        return time.monotonic() - started


async def start_server(
    server: Vllm | Sglang, folder: str, controller: str, log: Path, extra: tuple[str, ...] = ()
) -> asyncio.subprocess.Process:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *server.command(folder, controller), *extra),
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": path,
            "WINDLASS_TOKEN": TOKEN,
        },
        stdout=subprocess.PIPE,
        stderr=log.open("wb"),
    )


ENGINES: dict[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


@dataclass(frozen=True)
class Stage:
    """Updates of one kind. `num_multiprocessors`: that the trainers' stores may occupy; 0 for all."""

    label: str
    mode: UpdateMode
    num_multiprocessors: int = 0


def plan_of(options: argparse.Namespace) -> list[Stage]:
    stages = [Stage("in_place", UpdateMode.IN_PLACE), Stage("staged", UpdateMode.STAGED)]
    if options.budget:
        label = f"staged by {options.budget} multiprocessors"
        stages.append(Stage(label, UpdateMode.STAGED, options.budget))
    return stages


async def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        quantised = options.quantization == "fp8-block"
        started, plain, saved = (Path(folder) / name for name in ("started", "plain", "saved"))
        write_config(options.model, plain, quantised=False)
        if quantised:
            write_config(options.model, started, quantised=True)
            write_config(options.model, saved, quantised=True)
        else:
            write_model_folder(options.model, started)
        entries = checkpoint_entries(options.model, quantised=quantised)
        nbytes = sum(entry[3] for entry in entries)
        num_devices = torch.cuda.device_count()
        shared = options.tp + options.trainers > num_devices
        devices = [(options.tp + i) % num_devices for i in range(options.trainers)]
        say(f"{num_devices} GPUs, trainers on {devices}; an update is {nbytes / 1e9:.1f} GB")
        os.environ.update(ENGINES[options.engine].environment)
        trainers = Trainers(options.trainer, devices, f"{folder}/store", str(plain))
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        process = None
        ours: Held = ([], [])
        log = options.log
        server = ENGINES[options.engine](options, session)
        port, used = 0, 0
        stages = plan_of(options)
        try:
            for number, stage in enumerate(stages):
                config = ControlConfig(mode=stage.mode, pause_mode=PauseMode.IN_PLACE)
                async with windlass.Controller(
                    token=TOKEN, config=config, journal_path=Path(folder) / "journal", port=port
                ) as controller:
                    port = int(controller.url.rsplit(":", 1)[1])
                    if process is None:
                        process = await bring_up(
                            options, server, trainers, (started, controller.url, shared), say
                        )
                    elif stage.num_multiprocessors != used:
                        used = stage.num_multiprocessors
                        await trainers.all("connect", controller.url, used)
                    await controller.wait_for_fleet(
                        num_trainers=options.trainers, engines=(options.engine,), deadline_s=120
                    )
                    version = 1 + number * LATER_VERSION
                    seconds, _ = (await trainers.all("publish", version))[0]
                    say(
                        f"{stage.label}: first version in {seconds:.2f} s, plans and tables included"
                    )
                    rows += await measure(
                        options, stage, server, trainers, version + 1, nbytes, say
                    )
                    save_rows(rows, options.json)
                    if number == 1 and options.own and not quantised:
                        rows += await compare(options, server, trainers, rows, version + 50, say)
                        save_rows(rows, options.json)
                    if number + 1 == len(stages):
                        if quantised:
                            ours = await settle(server, trainers)
                            await save(options, trainers, saved, say)
                    elif stages[number + 1].num_multiprocessors != used:
                        await trainers.all("disconnect")
            await trainers.all("end")
            if quantised and process is not None:
                process.terminate()
                await process.wait()
                options.port += 1
                server = ENGINES[options.engine](options, session)
                log = options.log.with_suffix(".fresh.log")
                process = await start_server(server, str(saved), "", log)
                assert process.stdout is not None
                ready = await asyncio.wait_for(process.stdout.readline(), 400)
                assert ready, "the fresh engine did not start"
                require_fresh(ours, (await server.fingerprints(), await server.tokens()), say)
        except Exception:
            say("failed; the end of the engine's log:")
            print(tail(log), flush=True)
            raise
        finally:
            await session.close()
            if process is not None and process.returncode is None:
                process.terminate()
                await process.wait()
            for rank in trainers.processes:
                rank.kill()
    return rows


async def bring_up(
    options: argparse.Namespace,
    server: Vllm | Sglang,
    trainers: Trainers,
    place: tuple[Path, str, bool],
    say: Any,
) -> asyncio.subprocess.Process:
    """`place`: the engine's checkpoint, the controller, whether both sides share GPUs."""
    folder, url, shared = place
    quantised = options.quantization == "fp8-block"
    if shared or quantised:  # engines measure what memory is free when they start
        await trainers.receive()
        await trainers.all("fill", 1)
    if quantised:
        await save(options, trainers, folder, say)
    process = await start_server(server, str(folder), url, options.log)
    try:
        if not (shared or quantised):
            await trainers.receive()
            await trainers.all("fill", 1)
        say("trainers are up")
        await trainers.all("connect", url)
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), 400)
        assert ready, "the engine did not start"
        say("engine is up, captured and connected")
    except BaseException:  # nobody else knows the process yet
        process.terminate()
        await process.wait()
        raise
    return process


async def measure(
    options: argparse.Namespace,
    stage: Stage,
    server: Vllm | Sglang,
    trainers: Trainers,
    version: int,
    nbytes: int,
    say: Any,
) -> list[Row]:
    """Updates under load."""
    mode = stage.label
    ours, theirs = mp.get_context("spawn").Pipe()
    clients = mp.get_context("spawn").Process(
        target=load, args=(server.url, options.engine, options.load, 151936, theirs)
    )
    clients.start()
    # Kernels that are compiled at first use are not the update's silence.
    assert await asyncio.to_thread(ours.poll, options.warm_up_s), "the streams bring no tokens"
    ours.recv()
    await asyncio.sleep(4)
    windows: list[tuple[float, float]] = []
    reports = []
    quiet = (time.monotonic() - 3.0, time.monotonic())
    for number in range(options.updates):
        await trainers.all("fill", version + number)
        begin = time.monotonic()
        answers = await trainers.all("publish", version + number)
        windows.append((begin, time.monotonic()))
        reports.append(answers[0][1])
        await asyncio.sleep(0.7)
    ours.send("end")
    arrivals, errors = await asyncio.to_thread(ours.recv)
    clients.join(20)
    if errors:
        say(f"{mode}: clients saw {len(errors)} errors, first: {errors[0]}")
    usual = statistics.median(
        b - a
        for requests in arrivals
        for a, b in gaps_of(requests)
        if quiet[0] <= a and b <= quiet[1]
    )
    touched: dict[bool, list[float]] = {True: [], False: []}
    for requests in arrivals:
        for a, b in turns_of(requests):
            touched[any(b > begin and a < end for begin, end in windows)].append(b - a)
    for during, turns in touched.items():
        if turns:
            say(
                f"{mode}: from a request to the next {'over an update' if during else 'otherwise'}: "
                f"median {statistics.median(turns):.3f} s, worst {max(turns):.3f} s, of {len(turns)}"
            )
    worst_by_update = [round(max(stream), 3) for stream in silences(arrivals, windows) if stream]
    say(f"{mode}: longest silence by update: {worst_by_update}")
    seen = [statistics.median(stream) for stream in silences(arrivals, windows) if stream]
    worst = [max(stream) for stream in silences(arrivals, windows) if stream]
    rate = count_between(arrivals, [quiet]) / (quiet[1] - quiet[0])
    say(f"{mode}: {rate:.0f} tokens/s, {1e3 * usual:.1f} ms between tokens without updates")
    assert all(report.digest_ok for report in reports), "a digest differs"
    last = reports[-1]
    say(f"{mode}: phases {json.dumps({k: round(v, 4) for k, v in last.phase_s.items()})}")
    say(f"{mode}: left out {last.left_out}, {last.nbytes / 1e9:.1f} GB")
    rows = during_the_wire(options, stage, arrivals, windows, reports, nbytes, say)
    ceiling = options.ceiling * 1e9 * options.trainers
    for metric, values in (
        ("wire", [r.wire_s for r in reports]),
        ("update", [r.update_s for r in reports]),
        ("pause, engine", [r.pause_s for r in reports]),
        ("publish, trainer", [b - a for a, b in windows]),
        ("longest silence, median stream", seen),
        ("longest silence, worst stream", worst),
    ):
        median, p95 = median_p95(values)
        say(f"{mode}: {metric}: median {median:.4f} s, p95 {p95:.4f} s")
        for name, value in (("median", median), ("p95", p95)):
            rows.append(
                Row(
                    case=case_of(options, stage, nbytes),
                    metric=f"{metric}, {name}",
                    value=value,
                    unit="s",
                    reference="time between tokens"
                    if "silence" in metric
                    else "bytes at link speed",
                    reference_value=usual if "silence" in metric else nbytes / ceiling,
                    ratio=value / (usual if "silence" in metric else nbytes / ceiling),
                )
            )
    return rows


Held = tuple[list[dict[str, str]], list[int]]
"""Fingerprints per rank, and greedy tokens."""


async def save(options: argparse.Namespace, trainers: Trainers, folder: Path, say: Any) -> None:
    differ = (await trainers.all("check_quantiser", options.engine))[0][1]
    assert differ == (0, 0), f"bytes of values and scales that differ: {differ}"
    answers = await trainers.all("save_quantised", options.engine, str(folder))
    seconds, quantiser = answers[0]
    say(f"weights quantised by {quantiser} and saved in {seconds:.1f} s")


async def settle(server: Vllm | Sglang, trainers: Trainers) -> Held:
    """Weights that can be made again, after others."""
    await trainers.all("fill", 8)
    await trainers.all("publish", 500)
    other = await server.fingerprints()
    await trainers.all("fill", 7)
    await trainers.all("publish", 501)
    held = await server.fingerprints()
    assert held != other, "other weights must be other fingerprints"
    return held, await server.tokens()


def require_fresh(ours: Held, fresh: Held, say: Any) -> None:
    """What a module keeps besides parameters and buffers is told, and not required."""
    different = [
        f"rank {rank}: {name}"
        for rank, (a, b) in enumerate(zip(ours[0], fresh[0], strict=True))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    required = [name for name in different if ": attribute:" not in name]
    say(f"attributes of modules that differ: {len(different) - len(required)} {different[:5]}")
    assert not required, f"{len(required)} tensors differ from a fresh load: {required[:5]}"
    assert ours[1] == fresh[1], f"tokens differ: {ours[1]} and {fresh[1]}"
    say(
        f"{sum(map(len, ours[0]))} tensors and the tokens {ours[1][:8]} are those of a fresh server "
        f"that loaded the quantised checkpoint"
    )


def case_of(options: argparse.Namespace, stage: Stage, nbytes: int) -> str:
    decode = "by graphs" if options.cuda_graphs else "eager"
    return (
        f"{options.trainer} -> {options.engine} TP{options.tp}, {options.model} "
        f"({nbytes / 1e9:.1f} GB{_label(options)}), {stage.label}, {options.load} streams, decode {decode}"
    )


def count_between(arrivals: Arrivals, spans: list[tuple[float, float]]) -> int:
    """Tokens that arrived within any of `spans`."""
    times = [t for requests in arrivals for one in requests for t in one]
    return sum(1 for t in times for a, b in spans if a <= t < b)


def during_the_wire(
    options: argparse.Namespace,
    stage: Stage,
    arrivals: Arrivals,
    windows: list[tuple[float, float]],
    reports: list[windlass.UpdateReport],
    nbytes: int,
    say: Any,
) -> list[Row]:
    """What the streams got while bytes travelled, beside the time just before each update."""
    if stage.mode is not UpdateMode.STAGED:
        return []
    wire, before = [], []
    for (begin, end), found in zip(windows, reports, strict=True):
        start = end - found.update_s
        for phase, seconds in found.phase_s.items():
            if phase == "write":
                break
            start += seconds
        wire.append((start, start + found.phase_s["write"]))
        before.append((begin - BEFORE_S, begin))
    figures: dict[str, tuple[float, float]] = {}
    for name, spans in (("before", before), ("wire", wire)):
        rate = count_between(arrivals, spans) / sum(b - a for a, b in spans)
        gaps = [
            y - x
            for requests in arrivals
            for x, y in gaps_of(requests)
            if any(a <= x and y <= b for a, b in spans)
        ]
        if not gaps:
            say(f"{stage.label}: {name}: too short for two tokens of a stream")
            return []
        figures[name] = (rate, statistics.median(gaps))
        say(
            f"{stage.label}: {name}: {rate:.0f} tokens/s over "
            f"{sum(b - a for a, b in spans):.2f} s; between tokens {1e3 * figures[name][1]:.2f} ms "
            f"median, {1e3 * statistics.fmean(gaps):.2f} mean, of {len(gaps)}"
        )
    metrics = (
        ("tokens per second during the wire phase", "1/s"),
        ("time between tokens during it", "s"),
    )
    return [
        Row(
            case=case_of(options, stage, nbytes),
            metric=metric,
            value=value,
            unit=unit,
            reference=f"{BEFORE_S} s before each update",
            reference_value=reference,
            ratio=value / reference,
        )
        for (metric, unit), value, reference in zip(
            metrics, figures["wire"], figures["before"], strict=True
        )
    ]


async def compare(
    options: argparse.Namespace,
    server: Vllm | Sglang,
    trainers: Trainers,
    rows: list[Row],
    version: int,
    say: Any,
) -> list[Row]:
    """The same weights by either way; vLLM's own is timed without load, in its favour."""
    await trainers.all("fill", 7)
    await trainers.all("publish", version)
    ours = (await server.fingerprints(), await server.tokens())
    await trainers.all("fill", 8)
    await trainers.all("publish", version + 1)
    assert await server.fingerprints() != ours[0], "other weights must be other fingerprints"
    await trainers.all("fill", 7)
    gather_s, num_tensors = (await trainers.all("gather"))[0]
    say(f"gathered {num_tensors} full tensors in {gather_s:.2f} s")
    await server.own_init(trainers, options.port + 77)
    own = [await server.own_update(trainers) for _ in range(options.own)]
    say(f"the engine's own transfer: {[round(seconds, 3) for seconds in own]}")
    theirs = (await server.fingerprints(), await server.tokens())
    different = [
        f"rank {rank}: {name}"
        for rank, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True))
        for name in a
        if a[name] != b.get(name)
    ]
    assert not different, f"{len(different)} tensors differ: {different[:5]}"
    assert ours[1] == theirs[1], f"tokens differ: {ours[1]} and {theirs[1]}"
    say(f"{sum(map(len, ours[0]))} tensors and the tokens {ours[1][:8]} are equal by both ways")
    median = median_p95(own)[0]
    return [
        Row(
            case=row.case,
            metric="update against the engine's own NCCL transfer (packed, gathered before)",
            value=row.value,
            unit="s",
            reference="own transfer, median",
            reference_value=median,
            ratio=median / row.value,
        )
        for row in rows
        if row.metric == "update, median"
    ]


def _label(options: argparse.Namespace) -> str:
    return ", bfloat16 -> block float8" if options.quantization == "fp8-block" else ""


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def tail(log: Path) -> str:
    """What is no warning and no list of routes."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(x for x in lines if " WARNING " not in x and "Route:" not in x)[-6000:]


def options_of(words: list[str]) -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--engine", choices=list(ENGINES), default="vllm")
    options.add_argument("--model", choices=list(SHAPES), default="qwen3-30b-a3b")
    options.add_argument(
        "--cuda-graphs", action="store_true", help="decode by CUDA graphs, as engines usually do"
    )
    options.add_argument(
        "--quantization", choices=("none", "fp8-block"), default="none", help="of the engine"
    )
    options.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    options.add_argument("--trainer", choices=list(TRAINERS), default="fsdp")
    options.add_argument(
        "--budget", type=int, default=0, help="multiprocessors of a third series of updates"
    )
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--trainers", type=int, default=2)
    options.add_argument("--updates", type=int, default=10, help="of each mode")
    options.add_argument("--own", type=int, default=5, help="updates by vLLM's own transfer")
    options.add_argument("--load", type=int, default=64, help="streams")
    options.add_argument("--warm-up-s", type=float, default=120.0, help="until tokens flow")
    options.add_argument("--port", type=int, default=18123)
    options.add_argument(
        "--ceiling", type=float, default=397.0, help="GB/s of one link (bench_nvlink)"
    )
    options.add_argument("--log", type=Path, default=Path("engine.log"))
    parsed = options.parse_args(words)
    if parsed.layers:
        SHAPES[parsed.model] = replace(SHAPES[parsed.model], layers=parsed.layers)
    return parsed


def main() -> None:
    parsed = options_of(sys.argv[1:])
    report(asyncio.run(run(parsed)), parsed.json, f"updates of a live {parsed.engine} server")


if __name__ == "__main__":
    main()
