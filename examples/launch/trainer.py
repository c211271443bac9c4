"""Trainer rank of the example job: FSDP2, REINFORCE with the mean of each group as baseline.

`windlass launch` starts it once per rank. Replace the loss, the model and the optimiser.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers

import windlass
from windlass.jobs import FsdpEngine, Samples, run_train_worker


def build_model() -> torch.nn.Module:
    """Return a model with random weights, equal on every rank."""
    config = json.loads(Path(sys.argv[1]).read_text())
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    return model


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    """Return the loss. All sequences of this job have the same length, so nothing is padded."""
    samples = [sample for group in groups for sample in group]
    tokens = torch.tensor([s.prompt_ids + s.output_ids for s in samples])
    rewards = torch.tensor([[s.reward for s in group] for group in groups])
    # Each group is on one rank, so its mean does not depend on the split of the batch.
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    num_prompt = len(samples[0].prompt_ids)
    logits = model(tokens[:, :-1]).logits[:, num_prompt - 1 :]
    chosen = logits.log_softmax(-1).gather(2, tokens[:, num_prompt:, None])[..., 0]
    found: torch.Tensor = -(advantages[:, None] * chosen).mean()
    return found


if __name__ == "__main__":
    if "WINDLASS_TRANSPORT" not in os.environ or len(sys.argv) != 2:
        sys.exit(
            "WINDLASS_TRANSPORT and the argument CONFIG.json must be given by a launched job, got "
            f"arguments {sys.argv[1:]}; run `windlass launch examples/launch/job.toml`"
        )
    torch.set_num_threads(1)
    run_train_worker(
        FsdpEngine(
            model=build_model,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            loss=loss,
            units=lambda model: list(model.get_submodule("model.layers").children()),
            transport=os.environ["WINDLASS_TRANSPORT"],
            replica=windlass.ReplicaPlace(os.environ["WINDLASS_REPLICA"]),
        )
    )
