"""One Megatron-core rank of `test_live.py`: trains a step, saves its loss, publishes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_settings import spec_of
from megatron_rank import Case, build, checkpoint, fill, start_parallel
from real_step import RealTraining

from windlass.jobs.megatron_cpu import install, without_cuda_tensors

NUM_TOKENS = 16


def main() -> None:
    rank, world_size, store, options, url, folder = (
        *(int(sys.argv[1]), int(sys.argv[2])),
        *sys.argv[3:7],
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from windlass.trainers.megatron import connect_megatron_trainer

    config = json.loads(Path(folder, "config.json").read_text())
    spec, layout = spec_of(config), json.loads(options)
    distributed = layout.pop("distributed", False)
    case = Case("live", spec, config=config, **layout)
    start_parallel(case)
    model_parallel_cuda_manual_seed(1)
    chunks = build(case)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + ("norm" in name)
        for name, tensor in checkpoint(spec).items()
    }
    for chunk in chunks:
        fill(chunk, weights)
    with without_cuda_tensors():
        training = RealTraining(chunks, num_tokens=NUM_TOKENS, lr=0.01, distributed=distributed)
    with connect_megatron_trainer(
        training.models if len(chunks) > 1 else training.models[0],
        family=spec.family,
        vocab_size=spec.vocab_size,
        controller=url,
        token=os.environ["WINDLASS_TOKEN"],
    ) as trainer:
        for version in range(2):
            with without_cuda_tensors():
                before = training.loss()
                training.step()
                state = {"loss": training.loss(), "before": before}
            torch.save(state, f"{folder}/{version}-{rank}.pt")
            trainer.publish(version)
        # The test reads the engine's weights while the trainers live.
        sys.stdin.read()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
