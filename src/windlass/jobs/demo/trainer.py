"""Trainer rank of the demo: the model, the loss, and a copy of every version for the checker.

The job starts `trainer.py MODEL_CONFIG VERSIONS_DIR [SEED [DEVICE]]` once per rank.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from windlass.envs import environment_value
from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import run_train_worker
from windlass.rollout.messages import TrainingSample

CLIP = 0.2
LEARNING_RATE, OF_HIDDEN_SIZE = 2e-3, 128
"""Learning rate, and the largest hidden size with this rate. For larger models the rate is proportional to
1 / hidden size (muP, arXiv:2203.03466)."""


def build_model(config: Path) -> torch.nn.Module:
    """Build the causal LM that a transformers configuration describes, with random weights."""
    fields = msgspec.json.decode(config.read_bytes())
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**fields)
    )
    return model


def tokens_of(samples: Sequence[TrainingSample], device: torch.device) -> torch.Tensor:
    """Return the token ids (B, P + T) of prompts and answers, which have equal lengths in all samples."""
    return torch.tensor([s.prompt_ids + s.output_ids for s in samples], device=device)


def grpo_loss(logits: torch.Tensor, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Return the clipped policy-gradient loss with group-normalised advantages (GRPO, arXiv:2402.03300).

    The ratio divides the model's probability by the engine's, so it corrects tokens that older versions generated.

    Args:
        logits: logits (B, P + T or P + T - 1, V) of the model for `tokens_of(samples)`.
        samples: B samples.
    """
    device, num_prompt = logits.device, len(samples[0].prompt_ids)
    outputs = torch.tensor([s.output_ids for s in samples], device=device)
    behaviour = torch.tensor([s.logprobs for s in samples], device=device)
    advantages = torch.tensor(_advantages(samples), device=device)[:, None]
    following = logits[:, num_prompt - 1 :][:, : outputs.shape[1]].float().log_softmax(-1)
    ratio = (following.gather(2, outputs[..., None])[..., 0] - behaviour).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def learning_rate(hidden_size: int) -> float:
    """Return Adam's learning rate for a model of this width."""
    return LEARNING_RATE * min(1.0, OF_HIDDEN_SIZE / hidden_size)


def _advantages(samples: Sequence[TrainingSample]) -> list[float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample.reward)
    moments = {
        group: (mean := sum(r) / len(r), (sum((x - mean) ** 2 for x in r) / len(r)) ** 0.5)
        for group, r in groups.items()
    }
    return [(s.reward - moments[s.group_id][0]) / (moments[s.group_id][1] + 1e-4) for s in samples]


def _save_version(model: torch.nn.Module, path: Path) -> None:
    """Gather the weights, and write them from rank 0 for the checker. Collective.

    Only the checker needs this gather; a weight update of Windlass gathers nothing.
    """
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    if dist.get_rank() == 0:
        save_file(weights, path)


def make_engine(
    config: Path, versions_dir: Path, seed: int, device: str, *, publish_to_fleet: bool = True
) -> FsdpEngine:
    """Return the engine of a rank; see `FsdpEngine` for `publish_to_fleet`."""
    torch.set_num_threads(1)
    versions = itertools.count()

    def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
        # At the beginning of a step, the model has the weights of the newest published version.
        _save_version(model, versions_dir / f"{next(versions)}.safetensors")
        samples = [sample for group in groups for sample in group]
        tokens = tokens_of(samples, next(model.parameters()).device)
        return grpo_loss(model(tokens[:, :-1]).logits, samples)

    return FsdpEngine(
        model=lambda: build_model(config),
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate(model.get_parameter("model.embed_tokens.weight").shape[1]),
            weight_decay=0.0,
        ),
        loss=loss,
        units=lambda model: list(model.get_submodule("model.layers").children()),
        backend="gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        device=device,
        seed=seed,
        publish_to_fleet=publish_to_fleet,
        transport=environment_value("WINDLASS_TRANSPORT") or "auto",
    )


def main(config: str, versions_dir: str, seed: str = "0", device: str = "cpu") -> None:
    """Run commands of the job's train controller until it sends `Stop`."""
    run_train_worker(make_engine(Path(config), Path(versions_dir), int(seed), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
