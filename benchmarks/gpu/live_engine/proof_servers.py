"""Servers of `prove_live_engine.py`, started on given GPUs from a checkpoint, and their weights and answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp

from live_engine.cases import DRAFT, Case
from live_engine.load import generate_request
from live_engine.servers import ENGINES, ServerSettings, Sglang, Vllm, start
from live_engine.stacks import write_stacks

_PREFIX = [(7919 * k + 11) % 32000 for k in range(320)]
PROMPTS = (
    *([5, 6, 7, 8], [9] * 40, list(range(100, 170)), [31999, 3, 1500]),
    *(_PREFIX, [*_PREFIX, 17, 4], [*_PREFIX, 23, 29999, 8]),
)
"""Prompts. The last three share a long prefix, which a prefix cache keeps. They are sent in this order, so that caches
without older entries have equal hits on every server."""
NUM_TOKENS = 16
BUSY_TOKENS = 64
ADAPTER = "tuned"
"""Name of the adapter in requests."""
MODEL = "model"
"""Name of the folder of the adapters' model, next to their folders."""
SMALL = {
    "vllm": ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)),
    "sglang": ("--mem-fraction-static", "0.85", "--max-total-tokens", "16384"),
}
"""Flags for servers and trainers that share a GPU. Without them vLLM counts all used memory as its own, and SGLang counts
memory that others take while it starts."""


@dataclass(frozen=True)
class Held:
    """Weights and answers of a server.

    Attributes:
        fingerprints: fingerprints of tensors by name, per rank.
        tokens: greedy tokens per prompt.
        logprobs: logprobs of these tokens.
    """

    fingerprints: list[dict[str, str]]
    tokens: list[list[int]]
    logprobs: list[list[float]]

    def distance(self, other: Held) -> float:
        """Return the largest distance between the logprobs of two servers with equal tokens."""
        pairs = zip(chain(*self.logprobs), chain(*other.logprobs), strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)

    def first_differences(self, other: Held) -> list[str]:
        """Describe, for each prompt with different tokens, the first of them: the tokens and their logprobs."""
        found = []
        for prompt, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            place = next(
                (k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None
            )
            if place is not None:
                logprobs = self.logprobs[prompt][place], other.logprobs[prompt][place]
                found.append(
                    f"prompt {prompt}, token {place}: {mine[place]} ({logprobs[0]:.4f}), "
                    f"{theirs[place]} ({logprobs[1]:.4f})"
                )
        return found

    def different(self, other: Held) -> list[str]:
        """Return the names of tensors, with ranks, that differ from `other`."""
        return [
            f"rank {rank}: {name}"
            for rank, (a, b) in enumerate(zip(self.fingerprints, other.fingerprints, strict=True))
            for name in sorted(a.keys() | b.keys())
            if a.get(name) != b.get(name)
        ]


class ProofServer:
    """Server that starts from a checkpoint or, without `with_weights`, with the engine's dummy weights."""

    def __init__(
        self,
        options: argparse.Namespace,
        case: Case,
        session: aiohttp.ClientSession,
        port: int,
        *,
        with_weights: bool = True,
    ) -> None:
        self.options, self.case, self.session = options, case, session
        settings = ServerSettings(
            engine=options.engine,
            port=port,
            tp=options.tp,
            transport=offered(options.transports),
            with_weights=with_weights,
            streams=16,
            cuda_graphs=options.cuda_graphs,
            compiles=options.compiles,
            on_cpu=options.on_cpu,
            python=options.python,
        )
        self.engine: Vllm | Sglang = ENGINES[options.engine](settings, session)
        self.port = port
        self.process: asyncio.subprocess.Process | None = None

    def command(self, folder: Path, controller: str) -> list[str]:
        """Return the arguments of `python -m`."""
        engine, extra = self.options.engine, self.case.flags.get(self.options.engine, ())
        if self.case.adapter:
            extra = (*extra, "--adapter", f"{ADAPTER}={folder}")
            folder = folder.parent / MODEL
        extra = tuple(word.replace(DRAFT, str(folder.parent / "first")) for word in extra)
        words = self.engine.command(str(folder), controller)
        return [*words, *(() if self.options.on_cpu else SMALL[engine]), *extra]

    async def start(self, folder: Path, controller: str, log: Path, devices: str) -> None:
        """Start the server. Without `devices` all GPUs are visible, and the server uses the first ones."""
        own = {} if self.options.on_cpu else engine_environment(self.options.engine)
        chosen = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        # Each server looks for free ports in a different range.
        chosen["VLLM_PORT"] = str(self.port + 100)
        words = self.command(folder, controller)
        self.process = await start(self.engine.settings, words, log, {**own, **chosen})

    async def ready(self, deadline_s: float) -> None:
        """Wait until the server serves and, if there is a controller, has joined."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), deadline_s)
        if not line:
            raise RuntimeError("the engine did not start, or its ranks did not join")

    async def held(self) -> Held:
        """Return the server's fingerprints and greedy answers."""
        tokens, logprobs = [], []
        for prompt in PROMPTS:
            route, body = generate_request(
                self.options.engine, list(prompt), NUM_TOKENS, 0.0, stream=False
            )
            if self.case.adapter:
                body["model"] = ADAPTER
            if self.options.engine == "vllm":
                body["sampling_params"]["logprobs"] = 1
            else:
                body["return_logprob"] = True
            answer = await self.engine.post(route, body)
            tokens.append(tokens_of(answer))
            logprobs.append(logprobs_of(answer))
        return Held(await self.engine.fingerprints(), tokens, logprobs)

    async def displace(self) -> None:
        """Ask long prompts of no other call, so that no block of an earlier prompt stays on the GPU."""
        for number in range(1, 6):
            prompt = [(104729 * number + 31 * k) % 32000 for k in range(400)]
            route, body = generate_request(self.options.engine, prompt, 4, 0.0, stream=False)
            await self.engine.post(route, body)

    async def count(self, what: str) -> float:
        """Return a counter of vLLM, such as `prefix_cache_hits` (tokens of prompts); 0 if the server does not report it."""
        async with self.session.get(f"{self.engine.url}/metrics") as response:
            text = await response.text()
        found = re.findall(rf"^vllm:{what}_total(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    @contextlib.asynccontextmanager
    async def busy(self, streams: int) -> AsyncIterator[list[int]]:
        """Keep `streams` requests running inside the block; the yielded list collects the number of tokens per answer."""
        answered: list[int] = []
        warm, ended = asyncio.Event(), asyncio.Event()

        async def stream(index: int) -> None:
            number = 0
            try:
                while not ended.is_set():
                    number += 1
                    prompt = [(index * 7919 + number * 104729 + k * 31) % 32000 for k in range(64)]
                    request = generate_request(
                        self.options.engine, prompt, BUSY_TOKENS, 1.0, stream=False
                    )
                    found = tokens_of(await self.engine.post(*request))
                    assert len(found) == BUSY_TOKENS, f"an answer ended after {len(found)} tokens"
                    answered.append(len(found))
                    warm.set()
            finally:
                warm.set()

        tasks = [asyncio.create_task(stream(index)) for index in range(streams)]
        try:
            if streams:
                # Kernels are compiled after this.
                await warm.wait()
            yield answered
        finally:
            ended.set()
            await asyncio.gather(*tasks)

    def stacks(self) -> None:
        """Let every process of the server write the stacks of its threads to the log."""
        if self.process is not None and self.process.returncode is None:
            write_stacks(self.process.pid)

    async def end(self) -> None:
        """End the launcher, which ends the engine's processes."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), 20)
            return
        self.process.kill()


def tokens_of(answer: Any) -> list[int]:
    """Return the tokens of an answer of either engine."""
    return list(answer["choices"][0]["token_ids"] if "choices" in answer else answer["output_ids"])


def logprobs_of(answer: Any) -> list[float]:
    """Return the logprobs of the tokens of an answer of either engine."""
    if "choices" in answer:
        return [float(entry["logprob"]) for entry in answer["choices"][0]["logprobs"]["content"]]
    return [float(entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]


def offered(transports: Sequence[str]) -> str:
    """Return the transport of an engine that offers all of `transports`."""
    if len(transports) == 1:
        return transports[0]
    return json.dumps({"type": "auto", "offers": list(transports)})


def engine_environment(engine: str) -> Mapping[str, str]:
    """Return the variables for GPUs; for SGLang also the paths of compiled kernels and the compiler."""
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
    """Return the version of the engine in this environment."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(engine)
    return "unknown"


_TELLING = re.compile(
    r"[\w.]*(?:Error|Exception|Unsupported\w+|Unreachable|Timeout|Aborted|OutOfMemory): .*"
    r"|.*\brefused\b.*"
)
_NOISE = (
    *("Traceback", "WARNING", "Route:", "For debugging", "See root cause", "raise "),
    "`--dp` is refused",
)


def reasons(log: Path, count: int = 8) -> list[str]:
    """Return the first and last distinct lines of a log that name an error."""
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
    """Return the last lines of a log, without warnings and lists of routes."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    kept = [x for x in lines if x.strip() and "WARNING" not in x and "Route:" not in x]
    return [line[:240] for line in kept[-count:]]
