"""Trainer that updates a live engine through the engine's own API. It runs in the engine's environment.

`python own_api.py sglang|vllm URL CHECKPOINT...` loads every checkpoint, then reads lines of `METHOD INDEX` and answers
each with a JSON line of seconds per stage. SGLang has the methods `tensor` (flattened bucket in shared memory) and
`distributed` (broadcast over gloo). vLLM has `reload` (checkpoint in shared memory, loaded by `collective_rpc`),
because its weight transfers need CUDA.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from windlass.engines.private_routes import KEY_HEADER, saved_key

Weights = Mapping[str, torch.Tensor]
GROUP = "own_api"
DEADLINE_S = 300.0


class Stages:
    """Timer of stages: seconds between calls of `end`, by name."""

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
        url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", KEY_HEADER: saved_key(url)},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        content = response.read()
    answer = json.loads(content) if content else {}
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RuntimeError(f"{path}: {answer}")
    return answer


class Sglang:
    """SGLang's two update methods for a trainer in another process."""

    def __init__(self, url: str) -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        self.url = url
        self.group: dist.ProcessGroup | None = None
        self.methods: dict[str, Callable[[Weights], dict[str, float]]] = {
            "tensor": self.tensor,
            "distributed": self.distributed,
        }

    def tensor(self, weights: Weights) -> dict[str, float]:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        stages = Stages()
        bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
        content = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.metadata,
        }
        payload = base64.b64encode(ForkingPickler.dumps(content)).decode()
        stages.end("flatten")
        self._pause(stages)
        post(
            self.url,
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"},
        )
        stages.end("load")
        return self._resume(stages)

    def distributed(self, weights: Weights) -> dict[str, float]:
        if self.group is None:
            self.group = self._join()
        stages = Stages()
        self._pause(stages)
        body = {
            "names": list(weights),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
            "shapes": [list(t.shape) for t in weights.values()],
            "group_name": GROUP,
        }
        request = threading.Thread(
            target=post, args=(self.url, "/update_weights_from_distributed", body)
        )
        request.start()
        for tensor in weights.values():
            dist.broadcast(tensor, src=0, group=self.group)
        stages.end("broadcast")
        request.join()
        stages.end("load")
        return self._resume(stages)

    def _pause(self, stages: Stages) -> None:
        post(self.url, "/pause_generation", {"mode": "abort"})
        post(self.url, "/begin_weight_update", {"selector": "all"})
        stages.end("pause")

    def _resume(self, stages: Stages) -> dict[str, float]:
        post(self.url, "/end_weight_update", {})
        post(self.url, "/continue_generation", {})
        stages.end("resume")
        return stages.total()

    def _join(self) -> dist.ProcessGroup:
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        body = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": 2, "group_name": GROUP, "backend": "gloo",
        }  # fmt: skip
        request = threading.Thread(target=post, args=(self.url, "/init_weights_update_group", body))
        request.start()
        made: dist.ProcessGroup = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0,
            group_name=GROUP,
        )  # fmt: skip
        request.join()
        return made


class Vllm:
    """vLLM's own update method, which reloads a checkpoint while the server runs."""

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
    engine, url, folders = sys.argv[1], sys.argv[2], [Path(p) for p in sys.argv[3:]]
    torch.set_num_threads(1)
    checkpoints = [load_file(folder / "model.safetensors") for folder in folders]
    trainer = Sglang(url) if engine == "sglang" else Vllm(url, folders[0])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        for line in sys.stdin:
            method, index = line.split()
            sys.stdout.write(json.dumps(trainer.methods[method](checkpoints[int(index)])) + "\n")
            sys.stdout.flush()
    finally:
        if isinstance(trainer, Vllm):
            shutil.rmtree(trainer.folder)


if __name__ == "__main__":
    main()
