"""A rank of `test_megatron_engine.py`: a `MegatronEngine` on gloo or a GPU, with weights from a
checkpoint of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from hf_settings import spec_of
from safetensors.torch import load_file

from windlass.jobs.megatron_cpu import name_te_gemm

LR, NORM = 0.02, 0.5


def main(folder: Path, layout: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    device = layout.pop("device", "cpu")
    if device != "cpu":
        name_te_gemm()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron_rank import Case, build_chunk, config_of, fill

    from windlass.jobs import MegatronEngine, run_train_worker

    config = json.loads((folder / "config.json").read_text())
    spec = spec_of(config)
    distributed, overlaps = layout.pop("distributed", False), layout.pop("overlaps", False)
    dtype = torch.bfloat16 if layout.pop("bf16", False) else torch.float32
    per_token = layout.pop("per_token", False)
    kind, rate = layout.pop("optimizer", "adam"), layout.pop("rate", LR)
    norm = layout.pop("norm", NORM)
    new_rate = folder / "new_rate"
    if new_rate.exists():
        rate = float(new_rate.read_text())
    routers, frozen = layout.pop("routers", {}), layout.pop("frozen", None)
    case = Case("engine", spec, config=config, dtype=dtype, **layout)
    checkpoint = load_file(folder / "model.safetensors")

    def chunk(config: Any, first: bool, last: bool, stage: int | None) -> torch.nn.Module:
        made = build_chunk(case, config, stage)
        assert (vars(made)["pre_process"], vars(made)["post_process"]) == (first, last)
        fill(made, checkpoint)
        for name, parameter in made.named_parameters():
            is_frozen = first if frozen == "first stage" else frozen is not None and frozen in name
            parameter.requires_grad_(not is_frozen)
        return made

    def forward(model: torch.nn.Module, groups: Any) -> Any:
        tokens = [s.prompt_ids + s.output_ids for group in groups for s in group]
        ids = torch.tensor(tokens, device=device)
        place = torch.arange(ids.shape[1], device=device).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).triu(1)
        return model(ids, place, mask, labels=ids.roll(-1, 1)), lambda losses: losses[:, :-1].mean()

    settings = config_of(case)
    settings.calculate_per_token_loss = per_token
    for name, value in routers.items():
        setattr(settings, name, value)
    engine = MegatronEngine(
        config=settings,
        model=chunk,
        optimizer=OptimizerConfig(
            optimizer=kind, lr=rate, min_lr=0.0, weight_decay=0.0, clip_grad=norm, adam_eps=1e-8,
            use_distributed_optimizer=distributed, params_dtype=dtype, bf16=dtype is torch.bfloat16,
            overlap_param_gather=overlaps,
        ),
        forward=forward,
        family=config["model_type"],
        vocab_size=spec.vocab_size,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=overlaps, overlap_param_gather=overlaps,
        ),
        lr_schedule=lambda optimizer: OptimizerParamScheduler(
            optimizer, init_lr=rate, max_lr=rate, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
        ),
        num_groups=1,
        seq_length=len(json.loads((folder / "sequence.json").read_text())),
        micro_batch_size=2,
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        device=device,
        # The test's engine is in host memory.
        publish_to_fleet=device == "cpu",
    )  # fmt: skip

    def biases(_: object) -> dict[str, Any]:
        found = [
            b
            for chunk in engine.chunks
            for n, b in chunk.named_buffers()
            if n.endswith("expert_bias")
        ]
        return {
            "values": torch.cat([bias.detach().clone() for bias in found]),
            "addresses": [bias.data_ptr() for bias in found],
        }

    def gradients(_: object) -> dict[str, torch.Tensor]:
        (chunk,) = engine.chunks
        return {
            name: vars(parameter)["main_grad"].clone()
            for name, parameter in chunk.named_parameters()
        }

    run_train_worker(engine, operations={"biases": biases, "gradients": gradients})


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
