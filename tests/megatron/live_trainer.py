"""One Megatron-core rank of `test_live.py`: trains a step, publishes, says its loss."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from cpu_shim import install
from megatron_rank import Case, all_tensors, build, checkpoint, fill, spec_of

NUM_TOKENS = 16


def main() -> None:
    rank, world_size, store, layout, url, folder = (
        *(int(sys.argv[1]), int(sys.argv[2])),
        *sys.argv[3:7],
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from windlass.training.megatron import connect_megatron_trainer

    spec = spec_of(json.loads(Path(folder, "config.json").read_text()))
    case = Case("live", spec, **json.loads(layout))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    model_parallel_cuda_manual_seed(1)
    (model,) = build(case)
    generator = torch.Generator().manual_seed(3)
    fill(
        model,
        {
            name: torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1)
            for name, tensor in checkpoint(spec).items()
        },
    )
    ids = torch.arange(NUM_TOKENS).reshape(1, -1) * 3 % spec.vocab_size
    mask = torch.triu(torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool), 1)
    place = torch.arange(NUM_TOKENS).reshape(1, -1)

    def loss() -> torch.Tensor:
        result: torch.Tensor = model(ids, place, mask, labels=ids.roll(-1)).mean()
        return result

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with connect_megatron_trainer(
        model,
        family=spec.family,
        vocab_size=spec.vocab_size,
        controller=url,
        token=os.environ["WINDLASS_TOKEN"],
    ) as trainer:
        for version in range(2):
            optimizer.zero_grad()
            before = loss()
            before.backward()  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                if "q_layernorm" in name or "k_layernorm" in name:  # of the rank's heads only
                    dist.all_reduce(
                        parameter.grad, group=parallel_state.get_tensor_model_parallel_group()
                    )
            optimizer.step()
            with torch.no_grad():
                after = loss()
            state = {
                "loss": float(after),
                "before": float(before.detach()),
                "tensors": [t.detach().clone() for t in all_tensors([model])],
            }
            torch.save(state, f"{folder}/{version}-{rank}.pt")
            trainer.publish(version)
        sys.stdin.read()  # the engine is looked at while the trainers live
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
