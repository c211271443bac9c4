"""Plain engine servers without Windlass, as an oracle for updated servers.

This module shares no setting with the updated server: it has its own command lines, and Windlass is not on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import VENVS

from windlass.net.addresses import free_port

START_S = 240.0
HTTP_S = 120.0
SUPPORT = Path(__file__).parent
COMMANDS: Mapping[str, Sequence[str]] = {
    "vllm": (
        *(
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--enable-scale-out",
            "--skip-tokenizer-init",
        ),
        *("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"),
        "--model",
    ),
    "sglang": (
        *("-m", "sglang.launch_server", "--skip-tokenizer-init", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-cuda-graph", "--max-total-tokens", "2048", "--mem-fraction-static", "0.4"),
        *("--dtype", "float32", "--model-path"),
    ),
}
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

    def post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HTTP_S) as response:
            return json.loads(response.read())

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
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


@contextmanager
def serving_fresh(
    engine: str, model: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Fresh]:
    """A server of one rank, in float32; `environment` is added, for model classes of a plugin."""
    if not (python := VENVS[engine] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs {engine}")
    url = f"http://127.0.0.1:{(port := free_port())}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WINDLASS_", "PYTHONPATH"))}
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **ENVIRONMENT[engine]}
    with log.open("w") as stream:
        process = subprocess.Popen(
            (str(python), *COMMANDS[engine], str(model), "--port", str(port)),
            env={**kept, **own, **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        end_s = time.monotonic() + START_S
        while not _is_healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end_s, log.read_text()[-4000:]
            threading.Event().wait(HEALTH_S)
        yield Fresh(engine, url)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HTTP_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False
