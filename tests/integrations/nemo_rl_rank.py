"""One rank of a policy, or of vLLM, that calls Windlass's checkpoint engine as NeMo-RL's workers do.

`python nemo_rl_rank.py RANK WORLD_SIZE STORE TRAIN_WORLD_SIZE OUT`: ranks below TRAIN_WORLD_SIZE belong to the policy.
Workers with `PolicyCheckpointEngineMixin` and `VllmCheckpointEngineMixin` use only the methods that are called here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine
from stream_processes import digest, weights

NUM_STEPS = 3
TRANSPORT = "windlass.integrations.nemo_rl:WindlassCheckpointEngine"
# Keys of `policy.generation.refit_cfg`, without the ratio that NeMo-RL turns into `bucket_size_bytes`.
ENGINE_KWARGS = {"release_after_refit": False, "transport": "cma", "device": "cpu"}


def exported(step: int, num_ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights like a policy, which gathers every tensor from all its ranks."""
    group = dist.new_group(list(range(num_ranks)), use_local_synchronization=True)
    for name, tensor in weights(step):
        dist.barrier(group)
        yield name, tensor


async def receive(engine: Any) -> dict[str, Any]:
    got = {}
    async for batch in engine.receive_weight_batches():
        got.update({name: digest(tensor) for name, tensor in batch})
    return got


def main() -> None:
    rank, world_size, num_policy = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world_size)
    engine = create_checkpoint_engine(
        TRANSPORT, bucket_size_bytes=64 << 10, engine_kwargs=ENGINE_KWARGS
    )
    found = []
    for step in range(NUM_STEPS):
        # The engine is kept between steps 0 and 1, and released after step 1.
        if step != 1:
            metadata: list[Any] = [None] * world_size
            dist.all_gather_object(metadata, {**engine.prepare(), "rank": rank})
            topology = {
                "train_world_size": num_policy,
                "rollout_world_size": world_size - num_policy,
                "metadata": metadata,
            }
            if rank < num_policy:
                engine.init_policy_process_group(worker_rank=rank, **topology)
            else:
                engine.init_rollout_process_group(rollout_rank=rank - num_policy, **topology)
        if rank < num_policy:
            asyncio.run(engine.send_weights(exported(step, num_policy)))
        else:
            got = asyncio.run(receive(engine))
            found.append(got == {name: digest(tensor) for name, tensor in weights(step)})
        if step:
            engine.finalize()
    Path(sys.argv[5]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
