"""One Megatron-core rank of a slime job: a rank of `trainer_rank.py` that trains and publishes as slime's actor does.

`url` of an `Order` is the URL of a server. Rank 0 has the server as a Ray actor, as in slime. `transport` has words:

- `train`: only train a step. `update`: only update the weights. Without these two words, the rank does both.
- `new`: slime would report new engines.
- `dies`: the last rank ends by SIGKILL when the engine has read its weights, before it can report that.

SLIME_ARGS has options of slime as JSON. With `offload_train`, the model's memory has no pages between a step and the
next step, as with torch_memory_saver, and the weights are in copies in host memory, as in slime's `TensorBackuper`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
import torch.distributed as dist
from servers import CONFIGS
from sglang_cpu_sleep import HostSaver, moved
from trainer_rank import Megatron, Order

from windlass.integrations.slime import WeightUpdater
from windlass.transports.base import WriteBatch
from windlass.transports.pull import PullTransport

MEMORY = "training"


class Engine:
    """The used part of slime's `SGLangEngine`."""

    def __init__(self, url: str | None) -> None:
        self._url = url

    def get_url(self) -> str | None:
        return self._url


class Actor:
    """The parts of slime's `MegatronTrainRayActor` that train a step and update the weights."""

    def __init__(self, args: Namespace, trained: Megatron) -> None:
        self._args, self._trained, self._saver = args, trained, HostSaver()
        self._copies: dict[str, torch.Tensor] = {}
        if args.offload_train:
            for tensor in self._tensors().values():
                tensor.data = moved(tensor.data, MEMORY, backed_up=True)
        self._back_up()
        self.updater = WeightUpdater(
            args,
            trained.chunks,
            lambda: self._copies,
            model_name="qwen3config",
            quantization_config=None,
        )
        # The option `--update-weight-start-version` has the same effect.
        self.updater.weight_version = args.update_weight_start_version
        self._sleep()

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters under names as in slime, which differ from those of the model."""
        named = (pair for chunk in self._trained.chunks for pair in chunk.named_parameters())
        return {f"module.{name}": parameter for name, parameter in named}

    @torch.no_grad()
    def _back_up(self) -> None:
        for name, tensor in self._tensors().items():
            self._copies.setdefault(name, torch.empty_like(tensor, device="cpu")).copy_(tensor)

    def _sleep(self) -> None:
        if self._args.offload_train:
            if self._args.use_critic and not self._args.colocate:
                self.updater.disconnect_rollout_engines()
            self._saver.pause(MEMORY)

    def _wake(self) -> None:
        if self._args.offload_train:
            self._saver.resume(MEMORY)

    def train(self, order: Order, config: Path) -> None:
        self._wake()
        self._trained.step()
        self._back_up()
        self._trained.save(Path(order.checkpoint))
        if dist.get_rank() == 0:
            shutil.copy(config, order.checkpoint)
        self._sleep()

    def update_weights(self, order: Order, *, has_new_engines: bool) -> None:
        args = self._args
        reconnects = args.offload_train and args.use_critic and not args.colocate
        if reconnects:
            self._wake()
        if has_new_engines or reconnects:
            # None is the second node of the server.
            nodes = (order.url, None)
            remote: Any = ray.remote(num_cpus=0)(Engine)
            actors = [remote.remote(url) for url in nodes] if dist.get_rank() == 0 else []
            self.updater.connect_rollout_engines(actors, None, engine_gpu_counts=[1])
            dist.barrier()
        self.updater.update_weights()
        assert self.updater.weight_version == order.version
        metrics = self.updater.pop_metrics()
        assert metrics["perf/windlass_nbytes"] > 0
        assert not self.updater.pop_metrics()
        if reconnects:
            self._sleep()


def die_when_read() -> None:
    """Let this process end by SIGKILL after its next write."""
    write = PullTransport.write

    def write_and_die(transport: PullTransport, batch: WriteBatch, *, deadline_s: float) -> None:
        write(transport, batch, deadline_s=deadline_s)
        os.kill(os.getpid(), signal.SIGKILL)

    PullTransport.write = write_and_die  # type: ignore[method-assign, assignment]


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    kind, layout, folder = sys.argv[4], json.loads(sys.argv[5]), Path(sys.argv[6])
    torch.set_num_threads(1)
    store = f"file://{folder}/store-slime"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    trained = Megatron(kind, layout)
    if rank == 0:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    usual = {
        "hf_checkpoint": str(folder),
        "vocab_size": CONFIGS[kind]["vocab_size"],
        "colocate": False,
        "offload_train": False,
        "offload_rollout": False,
        "use_critic": False,
        "update_weight_start_version": 40,
    }
    given = json.loads(os.environ.get("SLIME_ARGS", "{}"))
    actor = Actor(Namespace(**{**usual, **given}), trained)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        words = order.transport.split()
        if "update" not in words:
            actor.train(order, folder / "config.json")
        if "dies" in words and rank == world_size - 1:
            die_when_read()
        if "train" not in words:
            actor.update_weights(order, has_new_engines="new" in words)
        os.write(1, b'{"digest_ok": true}\n')
    actor.updater.close()
    if rank == 0:
        ray.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
