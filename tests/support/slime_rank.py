"""One Megatron-core rank of a slime job: a rank of `trainer_rank.py` that publishes as slime's
actor does.

`url` of an `Order` is the URL of a server. Rank 0 has the server as a Ray actor, as in slime.
`transport` is `new` if slime would report new engines.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
import torch.distributed as dist
from servers import CONFIGS
from trainer_rank import Megatron, Order

from windlass.integrations.slime import WeightUpdater


class Engine:
    """The used part of slime's `SGLangEngine`."""

    def __init__(self, url: str | None) -> None:
        self._url = url

    def get_url(self) -> str | None:
        return self._url


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    kind, layout, folder = sys.argv[4], json.loads(sys.argv[5]), Path(sys.argv[6])
    torch.set_num_threads(1)
    store = f"file://{folder}/store-slime"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    trained = Megatron(kind, layout)
    if rank == 0:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    args = Namespace(hf_checkpoint=str(folder), vocab_size=CONFIGS[kind]["vocab_size"])
    updater = WeightUpdater(
        args, trained.chunks, dict, model_name="qwen3config", quantization_config=None
    )
    # The option `--update-weight-start-version` has the same effect.
    updater.weight_version = 40
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        trained.step()
        trained.save(Path(order.checkpoint))
        if rank == 0:
            shutil.copy(folder / "config.json", order.checkpoint)
        if order.transport == "new":
            # None is the second node of the server.
            nodes = (order.url, None)
            remote: Any = ray.remote(num_cpus=0)(Engine)
            actors = [remote.remote(url) for url in nodes] if rank == 0 else []
            updater.connect_rollout_engines(actors, None, engine_gpu_counts=[1])
            dist.barrier()
        updater.update_weights()
        assert updater.weight_version == order.version
        metrics = updater.pop_metrics()
        assert metrics["perf/windlass_nbytes"] > 0
        assert not updater.pop_metrics()
        os.write(1, b'{"digest_ok": true}\n')
    updater.close()
    if rank == 0:
        ray.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
