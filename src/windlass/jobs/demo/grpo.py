"""The model and the loss of the demo: plain PyTorch, nothing of Windlass in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from windlass.rollout.messages import TrainingSample

__all__ = ["build_model", "grpo_loss", "token_logprobs"]

CLIP = 0.2


def build_model(model_config: dict[str, Any], seed: int) -> torch.nn.Module:
    """A causal LM with random weights, the same on every rank."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**model_config)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def token_logprobs(
    model: torch.nn.Module, prompt_ids: torch.Tensor, output_ids: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities (B, T) of outputs (B, T) after prompts (B, P), in float32."""
    tokens = torch.cat([prompt_ids, output_ids], dim=1)
    logits = model(tokens[:, :-1]).logits[:, prompt_ids.shape[1] - 1 :].float()
    chosen: torch.Tensor = logits.log_softmax(-1).gather(2, output_ids[..., None])[..., 0]
    return chosen


def grpo_loss(model: torch.nn.Module, samples: Sequence[TrainingSample]) -> torch.Tensor:
    """Clipped policy-gradient loss with group-normalised advantages (GRPO, arXiv:2402.03300).

    The ratio is taken against the logprobs that the engine served, so answers begun under
    an older version are corrected token by token.
    """
    prompts = torch.tensor([s.prompt_ids for s in samples])
    outputs = torch.tensor([s.output_ids for s in samples])
    behaviour = torch.tensor([s.logprobs for s in samples])
    advantages = torch.tensor(_advantages(samples))[:, None]
    ratio = (token_logprobs(model, prompts, outputs) - behaviour).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def _advantages(samples: Sequence[TrainingSample]) -> list[float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample.reward)
    moments = {
        group: (mean := sum(r) / len(r), (sum((x - mean) ** 2 for x in r) / len(r)) ** 0.5)
        for group, r in groups.items()
    }
    return [(s.reward - moments[s.group_id][0]) / (moments[s.group_id][1] + 1e-4) for s in samples]
