"""Plain engine servers without Windlass: the reference for updated servers.

This module has its own command lines, and Windlass is not on the path. It shares only the layout
and the dtype with the updated server, because both change how an engine rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import VENVS, Layout

from windlass.net.addresses import free_port

START_S = 600.0
HTTP_S = 120.0
SUPPORT = Path(__file__).parent
COMMANDS: Mapping[str, Sequence[str]] = {
    "vllm": (
        *("-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"),
        *("--skip-tokenizer-init", "--max-num-seqs", "8", "--enforce-eager", "--model"),
    ),
    "sglang": (
        *("-m", "sglang.launch_server", "--skip-tokenizer-init", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-cuda-graph", "--max-total-tokens", "2048", "--mem-fraction-static", "0.4"),
        "--model-path",
    ),
}
SIZES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "tp": "--tensor-parallel-size",
        "pp": "--pipeline-parallel-size",
        "dp": "--data-parallel-size",
    },
    "sglang": {"tp": "--tp-size", "pp": "--pp-size", "dp": "--dp-size"},
}
GAPS = """[vllm.general_plugins]
cpu_experts = vllm_cpu_experts:install
[sglang.srt.plugins]
cpu_gaps = sglang_cpu_gaps:install
cpu_sleep = sglang_cpu_sleep:install
"""
"""Entry points of a plugin that supplies the parts that the engines lack on CPUs."""
CHECKSUMS = {"vllm": "/weight_checker", "sglang": "/weights_checker"}
EMPTY = hashlib.sha256().hexdigest()
PACKS = "avx512f" in Path("/proc/cpuinfo").read_text()
"""Whether a plain vLLM multiplies by packed weights. Servers with Windlass do not pack them, and round differently."""
ROUNDING = {"float32": 1e-3, "bfloat16": 0.05 if PACKS else 0.0}
"""Largest difference of a log-probability between an updated and a fresh server, by dtype."""
Answer = tuple[list[int], list[float]]
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    },
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"},
}
HEALTH_S = 0.2


@dataclass(frozen=True)
class Fresh:
    """A server that has loaded a checkpoint."""

    engine: str
    url: str
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HTTP_S) as response:
            return json.loads(response.read())

    def answer(self, prompt: Sequence[int], count: int) -> Answer:
        """Return greedy tokens and their log-probabilities, by the engine's own route."""
        if self.engine == "sglang":
            sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
            body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
            said = self.post("/generate", body)
            entries = said["meta_info"]["output_token_logprobs"]
            return list(said["output_ids"]), [entry[0] for entry in entries]
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": list(prompt), "sampling_params": {**sampling, "detokenize": False}}
        choice = self.post("/inference/v1/generate", body)["choices"][0]
        return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def checksums(engine: str, post: Callable[[str, object], Any]) -> dict[str, str]:
    """Return the engine's own checksums of the parameters of all its ranks, by rank and name.

    A plain vLLM for CPUs packs some weights for its kernels and frees the originals. Those parameters are left out.
    """
    said = post(CHECKSUMS[engine], {"action": "checksum"})
    found: dict[str, str] = {}
    if engine == "vllm":
        found = said["checksums"]
    else:
        for rank, own in enumerate(said["ranks"]):
            found |= {f"{rank}: {name}": checksum for name, checksum in own["checksums"].items()}
    return {name: checksum for name, checksum in found.items() if checksum != EMPTY}


def require_equal_answers(
    updated: Sequence[Answer], fresh: Sequence[Answer], *, dtype: str = "float32"
) -> None:
    """Require equal greedy tokens and log-probabilities, within the rounding of `dtype`.

    Where the log-probabilities of two tokens differ by less than that, either token may be the greedy one. The answers
    then continue differently, so this function compares no further token of them.
    """
    within, num_compared = ROUNDING[dtype], 0
    for (tokens, logprobs), (fresh_tokens, fresh_logprobs) in zip(updated, fresh, strict=True):
        assert len(tokens) == len(fresh_tokens)
        for place, (one, other) in enumerate(zip(logprobs, fresh_logprobs, strict=True)):
            assert abs(one - other) <= within, (place, tokens, fresh_tokens)
            if tokens[place] != fresh_tokens[place]:
                assert within > 0, (place, tokens, fresh_tokens)
                break
            num_compared += 1
    assert num_compared > sum(len(tokens) for tokens, _ in fresh) / 2


def require_equal_parameters(updated: Mapping[str, str], fresh: Mapping[str, str]) -> None:
    """Require that every parameter of a fresh server is in the updated one, with the same checksum."""
    assert len(fresh) > len(updated) / 2
    assert [name for name, checksum in fresh.items() if updated.get(name) != checksum] == []


def filled_gaps(log: Path) -> str:
    """Return a path of imports with a plugin that supplies what the engines lack on CPUs; it is written beside `log`."""
    gaps = log.with_suffix(".gaps")
    info = gaps / "cpu_gaps-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-gaps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(GAPS)
    return f"{gaps}:{SUPPORT}"


@contextmanager
def serving_fresh(
    engine: str,
    model: Path,
    log: Path,
    *,
    layout: Layout | None = None,
    dtype: str = "float32",
    path: str = "",
    variables: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    port: int = 0,
) -> Iterator[Fresh]:
    """Run a server that has loaded a checkpoint as its user starts it.

    Args:
        path: folder of a plugin's distribution.
        options: further options of the server.
        variables: further variables of the server's environment.
    """
    if not (python := VENVS[engine] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs {engine}")
    layout = layout or Layout()
    url = f"http://127.0.0.1:{(port := port or free_port())}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WINDLASS_", "PYTHONPATH"))}
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **ENVIRONMENT[engine]}
    if layout.world_size == 2:
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    with log.open("w") as stream:
        process = subprocess.Popen(
            (
                *(str(python), *COMMANDS[engine], str(model), "--port", str(port)),
                *("--dtype", dtype, *_parallel(engine, layout), *options),
            ),
            env={
                **kept, **own, "PYTHONPATH": f"{filled_gaps(log)}:{path}", **(variables or {}),
            },
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        end_s = time.monotonic() + START_S
        while not _is_healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end_s, log.read_text()[-4000:]
            threading.Event().wait(HEALTH_S)
        server = Fresh(engine, url, process)
        if layout.pp > 1 and engine == "vllm":
            # Otherwise vLLM 0.32 for CPUs, with stages and without compilation, ends at the first
            # request.
            server.post("/collective_rpc", {"method": "execute_dummy_batch"})
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _parallel(engine: str, layout: Layout) -> list[str]:
    flags = []
    for name, flag in SIZES[engine].items():
        if (size := getattr(layout, name)) > 1:
            flags += [flag, str(size)]
    if layout.ep:
        own = ["--enable-expert-parallel"] if engine == "vllm" else ["--ep-size", str(layout.tp)]
        flags += own
    return flags


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HTTP_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False
