"""Servers of `prove_live_engine.py`: started on given GPUs from a checkpoint, and what they hold."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from live_engine.cases import Case
from live_engine.load import generate_request
from live_engine.servers import ENGINES, Sglang, Vllm, start

PROMPTS = ([5, 6, 7, 8], [9] * 40, list(range(100, 170)), [31999, 3, 1500])
NUM_TOKENS = 16
ADAPTER = "tuned"
"""The name that requests give."""
MODEL = "model"
"""Folder of the model that adapters are for, beside theirs."""
SMALL = {
    "vllm": ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)),
    "sglang": (),
}
"""Several servers and trainers share a GPU: vLLM would count the memory of the others as its own."""
ON_CPU = {
    "vllm": (
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--skip-tokenizer-init"),
    ),
    "sglang": (
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--max-total-tokens", "4096", "--disable-overlap-schedule", "--skip-tokenizer-init"),
        *("--mem-fraction-static", "0.5"),
    ),
}
ON_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}


@dataclass(frozen=True)
class Held:
    """What a server holds and says.

    Attributes:
        fingerprints: per rank, of every tensor by name.
        tokens: greedy ones, per prompt.
    """

    fingerprints: list[dict[str, str]]
    tokens: list[list[int]]

    def different(self, other: Held) -> list[str]:
        """Tensors of any rank that are not those of `other`."""
        return [
            f"rank {rank}: {name}"
            for rank, (a, b) in enumerate(zip(self.fingerprints, other.fingerprints, strict=True))
            for name in sorted(a.keys() | b.keys())
            if a.get(name) != b.get(name)
        ]


class ProofServer:
    """One server of its own; `python` is the interpreter of the engine's environment."""

    def __init__(
        self, options: argparse.Namespace, case: Case, session: aiohttp.ClientSession, port: int
    ) -> None:
        self.options, self.case, self.session = options, case, session
        # A server that loads a checkpoint, as those in float8 do, and not random weights.
        words = {**vars(options), "port": port, "quantization": "fp8-block", "load": 16}
        words["engine_memory"] = 0.4
        self.engine: Vllm | Sglang = ENGINES[options.engine](argparse.Namespace(**words), session)
        self.process: asyncio.subprocess.Process | None = None

    def command(self, folder: Path, controller: str) -> list[str]:
        """Of `python -m`."""
        engine, extra = self.options.engine, self.case.flags.get(self.options.engine, ())
        if self.case.adapter:
            extra = (*extra, "--adapter", f"{ADAPTER}={folder}")
            folder = folder.parent / MODEL
        words = self.engine.command(str(folder), controller)
        if not self.options.on_cpu:
            return [*words, *SMALL[engine], *extra]
        until = words.index("--transport") + 2
        return [*words[:until], *ON_CPU[engine], *extra]

    async def start(self, folder: Path, controller: str, log: Path, devices: str) -> None:
        """Without `devices` all GPUs are visible, and the first ones are taken."""
        own = ON_CPU_ENVIRONMENT if self.options.on_cpu else engine_environment(self.options.engine)
        chosen = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        words = self.command(folder, controller)
        self.process = await start(self.options.python, words, log, {**own, **chosen})

    async def ready(self, deadline_s: float) -> None:
        """Until it serves, and has joined if there is a controller."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), deadline_s)
        if not line:
            raise RuntimeError("the engine did not start, or its ranks did not join")

    async def held(self) -> Held:
        """Its tensors and greedy tokens."""
        tokens = []
        for prompt in PROMPTS:
            route, body = generate_request(
                self.options.engine, list(prompt), NUM_TOKENS, 0.0, stream=False
            )
            if self.case.adapter:
                body["model"] = ADAPTER
            answer = await self.engine.post(route, body)
            found = (
                answer["choices"][0]["token_ids"] if "choices" in answer else answer["output_ids"]
            )
            tokens.append(list(found))
        return Held(await self.engine.fingerprints(), tokens)

    async def end(self) -> None:
        """Its launcher ends the engine's processes."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), 20)
            return
        self.process.kill()


def engine_environment(engine: str) -> Mapping[str, str]:
    """What the engine needs on GPUs; SGLang also where its compiled kernels lie, and the compiler."""
    own = dict(ENGINES[engine].environment)
    found = importlib.util.find_spec("sglang") if engine == "sglang" else None
    if found is not None and found.origin is not None:
        kernels = Path(found.origin).parents[1] / "_jitcache"
        if kernels.is_dir():
            own["TVM_FFI_CACHE_DIR"] = os.environ.get("TVM_FFI_CACHE_DIR", str(kernels))
        if Path("/usr/local/cuda").is_dir():
            own["CUDA_HOME"] = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return own


def engine_version(engine: str) -> str:
    """Of the distribution that this interpreter sees."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(engine)
    return "unknown"


_TELLING = re.compile(
    r"[\w.]*(?:Error|Exception|Unsupported\w+|Unreachable|Timeout|Aborted|OutOfMemory): .*"
    r"|.*\brefused\b.*"
)
_NOISE = ("Traceback", "WARNING", "Route:", "For debugging", "See root cause", "raise ")


def reasons(log: Path, count: int = 8) -> list[str]:
    """The lines of a log that name an error, the first and the last of them, each once."""
    if not log.exists():
        return []
    found: dict[str, None] = {}
    for line in log.read_text(errors="replace").splitlines():
        telling = _TELLING.search(line)
        if telling and not any(word in line for word in _NOISE):
            found.setdefault(telling.group(0).strip()[:300])
    lines = list(found)
    return lines if len(lines) <= count else [*lines[: count // 2], "...", *lines[-count // 2 :]]


def tail(log: Path, count: int = 12) -> list[str]:
    """The last lines of a log, without warnings and lists of routes."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    kept = [x for x in lines if x.strip() and "WARNING" not in x and "Route:" not in x]
    return [line[:240] for line in kept[-count:]]
