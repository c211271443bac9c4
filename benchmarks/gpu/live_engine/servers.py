"""Servers of the engines, and the engines' own update methods."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from live_engine import vllm_nccl
from live_engine.load import generate_request
from live_engine.surroundings import ENVIRONMENT, ROOT, TOKEN
from live_engine.trainers import Trainers
from tools.entry_points import write_entry_points
from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import KEY_HEADER, saved_key
from windlass.engines.rank_reports import RankReports

PROMPT = [5, 6, 7, 8]
ON_CPU = {
    "vllm": (
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "1024", "--skip-tokenizer-init"),
    ),
    "sglang": (
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--max-total-tokens", "4096", "--disable-overlap-schedule", "--skip-tokenizer-init"),
        *("--mem-fraction-static", "0.5"),
    ),
}
"""Flags of an engine built for CPUs, instead of those for GPUs."""
ON_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    This type has no defaults, so mypy and the call that starts a server report a missing setting.

    Attributes:
        engine: key of `ENGINES`.
        port: port of the server.
        tp: number of tensor-parallel ranks.
        transport: name of the transport, or JSON.
        with_weights: whether the server loads a checkpoint when it starts, and not dummy weights.
        streams: number of requests that the server decodes in parallel.
        engine_memory: fraction of a GPU's memory.
        cuda_graphs: whether the server decodes with CUDA graphs.
        compiles: whether vLLM also compiles the model, with piecewise CUDA graphs.
        on_cpu: whether the engine is built for CPUs.
        python: interpreter of the engine's environment.
    """

    engine: str
    port: int
    tp: int
    transport: str
    with_weights: bool
    streams: int
    engine_memory: float = 0.4
    cuda_graphs: bool = False
    compiles: bool = False
    on_cpu: bool = False
    python: str = sys.executable


class _Routes:
    """Client of a server on a port of this machine."""

    def __init__(self, settings: ServerSettings, session: aiohttp.ClientSession) -> None:
        self.settings, self.session = settings, session
        self.url = f"http://127.0.0.1:{settings.port}"

    async def call(self, path: str) -> None:
        """Post an empty body to a route whose answer is empty or not needed."""
        headers = {KEY_HEADER: saved_key(self.url)}
        async with self.session.post(self.url + path, headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"{self.url}{path}: {response.status} {text[:500]}")

    async def post(self, path: str, body: Any) -> Any:
        """Post JSON to a route and return the answer."""
        headers = {KEY_HEADER: saved_key(self.url)}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"{self.url}{path}: {response.status} {text[:500]}")
            return json.loads(text or "null")


def common_flags(settings: ServerSettings, folder: str, controller: str) -> list[str]:
    """Return the flags of every server; one without a controller keeps its weights."""
    return [
        *("--name", settings.engine, "--model", folder, "--port", str(settings.port)),
        *("--tp", str(settings.tp), "--controller", controller, "--transport", settings.transport),
        *(() if settings.with_weights else ("--load-format", "dummy")),
    ]


class Vllm(_Routes):
    """Server of vLLM 0.24."""

    environment: ClassVar[dict[str, str]] = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    digests: ClassVar[str] = "windlass_digests"
    """Name of the worker method that returns fingerprints."""

    def command(self, folder: str, controller: str) -> list[str]:
        words = ["windlass.engines.vllm", *common_flags(self.settings, folder, controller)]
        return [*words, *(ON_CPU["vllm"] if self.settings.on_cpu else self._on_gpu())]

    def _on_gpu(self) -> list[str]:
        return [
            *("--dtype", "bfloat16", "--skip-tokenizer-init"),
            *self._graphs(),
            *("--max-model-len", "1024", "--max-num-seqs", str(self.settings.streams)),
            *(
                "--gpu-memory-utilization",
                str(self.settings.engine_memory),
                "--disable-custom-all-reduce",
            ),
            *("--seed", "0", "--disable-uvicorn-access-log", "--tokens-only"),
        ]

    def _graphs(self) -> list[str]:
        if self.settings.compiles:
            sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, self.settings.streams]}
            return ["--compilation-config", json.dumps(sizes)]
        if not self.settings.cuda_graphs:
            return ["--enforce-eager"]
        settings = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [self.settings.streams],
        }
        return ["--compilation-config", json.dumps(settings)]

    async def tokens(self) -> list[int]:
        answer = await self.post(*generate_request("vllm", PROMPT, 16, 0.0, stream=False))
        return list(answer["choices"][0]["token_ids"])

    async def fingerprints(self) -> list[dict[str, str]]:
        found = await self.post("/collective_rpc", {"method": self.digests})
        return list(found["results"])

    async def own_init(self, trainers: Trainers, port: int) -> None:
        world = self.settings.tp + 1
        joining = asyncio.create_task(trainers.all("own_init", "vllm", port, world))
        await self.post("/init_weight_transfer_engine", vllm_nccl.server_info(port, world))
        await joining
        self.names = [n for b in (await trainers.all("bucket_names"))[0][1] for n in b]

    async def own_update(self, trainers: Trainers) -> float:
        started = time.monotonic()
        await self.post("/pause?mode=keep", {})
        await self.post("/start_weight_update", {})
        sending = asyncio.create_task(trainers.all("own_send"))
        await self.post("/update_weights", vllm_nccl.update_info(self.names, packed=True))
        await sending
        await self.post("/finish_weight_update", {})
        await self.post("/resume", {})
        return time.monotonic() - started


class VllmWithNccl(Vllm):
    """Plain server whose weights arrive by vLLM's own NCCL transfer. A server has one transfer backend."""

    digests = "held_weights"

    def command(self, folder: str, controller: str = "") -> list[str]:
        """Return the arguments of `python -m`. The server joins no controller."""
        assert not controller
        return [
            *("vllm.entrypoints.openai.api_server", "--model", folder),
            *("--port", str(self.settings.port)),
            *("--tensor-parallel-size", str(self.settings.tp), "--load-format", "dummy"),
            *("--weight-transfer-config", '{"backend": "nccl"}'),
            *("--worker-extension-cls", "live_engine.held_weights.HeldWeights"),
            *self._on_gpu(),
        ]

    async def start(self, folder: str, log: Path, deadline_s: float) -> asyncio.subprocess.Process:
        """Start the server, wait until it serves, and return its process."""
        process = await start(
            self.settings, self.command(folder), log, {"VLLM_SERVER_DEV_MODE": "1"}
        )
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._serves():
                    assert process.returncode is None, "the server with NCCL ended"
                    await asyncio.sleep(0.5)
        except BaseException:
            if process.returncode is None:
                process.terminate()
            raise
        return process

    async def _serves(self) -> bool:
        try:
            async with self.session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


class Sglang(_Routes):
    """Server of SGLang 0.5.16. Its own update method uses flattened buckets of 1 GiB."""

    environment: ClassVar[dict[str, str]] = {
        "SGLANG_HOST_IP": "127.0.0.1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        # SGLang sets this for its own ranks, and all ranks of an NCCL group must use the same value.
        "NCCL_CUMEM_ENABLE": "0",
        # Trainers may take memory of one GPU while the server starts.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }

    def command(self, folder: str, controller: str) -> list[str]:
        words = ["windlass.engines.sglang", *common_flags(self.settings, folder, controller)]
        if self.settings.on_cpu:
            return [*words, *ON_CPU["sglang"]]
        return [
            *(*words, "--dtype", "bfloat16", "--skip-tokenizer-init"),
            *("--context-length", "1024", "--attention-backend", "triton"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *self._graphs(),
            *(
                "--enforce-disable-flashinfer-allreduce-fusion",
                "--mem-fraction-static",
                str(self.settings.engine_memory),
            ),
            *("--max-running-requests", "64", "--max-total-tokens", "98304"),
            *("--chunked-prefill-size", "1024", "--disable-custom-all-reduce"),
            *("--random-seed", "0", "--skip-server-warmup", "--moe-runner-backend", "triton"),
            *("--log-level", "info"),
        ]

    def _graphs(self) -> list[str]:
        if not self.settings.cuda_graphs:
            return ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
        return [
            "--cuda-graph-bs-decode",
            str(self.settings.streams),
            "--disable-prefill-cuda-graph",
        ]

    async def tokens(self) -> list[int]:
        answer = await self.post(*generate_request("sglang", PROMPT, 16, 0.0, stream=False))
        return list(answer["output_ids"])

    async def fingerprints(self) -> list[dict[str, str]]:
        from windlass.engines.sglang.orders import Digests, order_ranks

        server, ranks = EngineHttp(self.url, saved_key(self.url)), self.settings.tp
        with RankReports(ranks) as reports:
            await asyncio.to_thread(order_ranks, server, Digests(reports.folder), ranks, 60.0)
            return [json.loads(report) for report in await asyncio.to_thread(reports.gather, 60.0)]

    async def own_init(self, trainers: Trainers, port: int) -> None:
        world = self.settings.tp + 1
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


async def start(
    settings: ServerSettings, words: Sequence[str], log: Path, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start `python -m words` with this checkout's Windlass and its plugins; it prints a line when it serves."""
    installed = log.with_suffix(".installed")
    if not installed.exists():
        write_entry_points(installed)
    path = os.pathsep.join(
        [
            *(str(ROOT / part) for part in ("src", "benchmarks", "benchmarks/gpu")),
            str(Path(__file__).parent / "at_start"),
            *(str(installed), os.environ.get("PYTHONPATH", "")),
        ]
    )
    with log.open("wb") as sink:
        return await asyncio.create_subprocess_exec(
            *(settings.python, "-m", *words),
            env={
                **os.environ,
                **ENVIRONMENT,
                **(ON_CPU_ENVIRONMENT if settings.on_cpu else {}),
                **environment,
                "PYTHONPATH": path,
                "WINDLASS_TOKEN": TOKEN,
            },
            stdout=subprocess.PIPE,
            stderr=sink,
        )


async def start_server(
    server: Vllm | Sglang, folder: str, controller: str, log: Path, extra: tuple[str, ...] = ()
) -> asyncio.subprocess.Process:
    """Start a server on the GPUs that are visible, with the variables of this process."""
    return await start(server.settings, [*server.command(folder, controller), *extra], log, {})


ENGINES: dict[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


def tail(log: Path) -> str:
    """Return the last lines of a log, without warnings and lists of routes."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(x for x in lines if " WARNING " not in x and "Route:" not in x)[-6000:]
