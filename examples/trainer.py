"""A trainer. Run `torchrun --nproc-per-node 2 examples/trainer.py CONTROLLER_URL CONFIG.json`.

WINDLASS_TOKEN is the controller's token. Replace the loss and the optimiser; Windlass needs only two lines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

import windlass


def main() -> None:
    """Train on batches from the controller, and publish after every step."""
    parser = argparse.ArgumentParser(description="A trainer rank, started by torchrun.")
    parser.add_argument("url", help="address that the controller has printed")
    parser.add_argument("config", type=Path, help="model configuration, a JSON file")
    parser.add_argument("--steps", type=int, default=3, help="the same number as the controller's")
    args = parser.parse_args()
    if not args.config.is_file():
        parser.error(f"CONFIG must be a JSON file with a model configuration, got {args.config}")
    if "RANK" not in os.environ:
        sys.exit(
            "RANK must be set by torchrun, got none; "
            "run `torchrun --nproc-per-node 2 examples/trainer.py URL CONFIG.json`"
        )
    url, secret = args.url, token()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(args.config.read_text()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        windlass.connect_trainer(model, controller=url, token=secret) as trainer,
        windlass.BatchClient(url, secret) as batches,
    ):
        show(trainer.publish(0).result())
        for step in range(args.steps):
            batch = batches.next_batch(step, dist.get_rank(), dist.get_world_size(), deadline_s=600)
            loss = policy_gradient(model, batch.samples)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            show(trainer.publish(step + 1).result())
    dist.destroy_process_group()


def show(report: windlass.UpdateReport) -> None:
    """Print a line about a published version."""
    if dist.get_rank() == 0:
        print(f"version {report.version}: {report.nbytes} bytes in {report.update_s:.3f} s")


def token() -> str:
    """Return the controller's secret. Every process of a job has it in its environment."""
    return os.environ.get("WINDLASS_TOKEN") or sys.exit(
        "WINDLASS_TOKEN must be set to a secret that all processes share, got none; "
        "run `export WINDLASS_TOKEN=a-secret-of-yours` in every terminal"
    )


def policy_gradient(
    model: torch.nn.Module, samples: tuple[windlass.TrainingSample, ...]
) -> torch.Tensor:
    """Return the REINFORCE loss with the mean reward as baseline, averaged over the tokens of all ranks."""
    rewards = torch.tensor([s.reward for s in samples])
    longest = max(len(s.prompt_ids) + len(s.output_ids) for s in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    trained = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        num_prompt, end = len(sample.prompt_ids), len(sample.prompt_ids + sample.output_ids)
        tokens[row, :end] = torch.tensor(sample.prompt_ids + sample.output_ids)
        trained[row, num_prompt:end] = torch.tensor(sample.loss_mask).float()
    # FSDP2 averages gradients over ranks with equal weight, but ranks have different numbers of tokens.
    totals = torch.stack([rewards.sum(), torch.tensor(float(len(samples))), trained.sum()])
    dist.all_reduce(totals)
    baseline, tokens_per_rank = totals[0] / totals[1], totals[2] / dist.get_world_size()
    # Padding comes after all trained tokens and attention is causal, so padding does not affect them.
    logits = model(tokens[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0] * trained[:, 1:]
    loss: torch.Tensor = -((rewards - baseline)[:, None] * chosen).sum() / tokens_per_rank
    return loss


if __name__ == "__main__":
    main()
