"""A trainer that updates a live engine through the engine's own API; runs in its environment.

`python own_api.py vllm URL CHECKPOINT...` loads every checkpoint, then reads lines of `METHOD INDEX`
and answers each with a JSON line of seconds per stage. The method of vLLM is `reload` (a checkpoint
in shared memory, loaded by `collective_rpc`), because its weight transfers need CUDA.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = Mapping[str, torch.Tensor]
DEADLINE_S = 300.0


class Stages:
    """Seconds between calls of `end`, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = self._began = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": self._last - self._began}


def post(url: str, path: str, body: object) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        content = response.read()
    answer = json.loads(content) if content else {}
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RuntimeError(f"{path}: {answer}")
    return answer


class Vllm:
    """vLLM's own loading of a checkpoint while it runs."""

    def __init__(self, url: str, config: Path) -> None:
        self.url = url
        self.folder = Path(f"/dev/shm/own-api-{time.monotonic_ns()}")
        self.folder.mkdir()
        for file in config.glob("*.json"):
            shutil.copy(file, self.folder)
        self.methods = {"reload": self.reload}

    def reload(self, weights: Weights) -> dict[str, float]:
        stages = Stages()
        save_file(dict(weights), self.folder / "model.safetensors", metadata={"format": "pt"})
        stages.end("save")
        post(self.url, "/pause?mode=abort", {})
        stages.end("pause")
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(self.folder)},
            "timeout": DEADLINE_S,
        }
        post(self.url, "/collective_rpc", body)
        stages.end("load")
        post(self.url, "/resume", {})
        stages.end("resume")
        return stages.total()


def main() -> None:
    url, folders = sys.argv[2], [Path(p) for p in sys.argv[3:]]
    torch.set_num_threads(1)
    checkpoints = [load_file(folder / "model.safetensors") for folder in folders]
    trainer = Vllm(url, folders[0])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        for line in sys.stdin:
            method, index = line.split()
            sys.stdout.write(json.dumps(trainer.methods[method](checkpoints[int(index)])) + "\n")
            sys.stdout.flush()
    finally:
        shutil.rmtree(trainer.folder)


if __name__ == "__main__":
    main()
