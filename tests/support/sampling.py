"""Expected distribution of an engine's samples, computed by transformers in the test's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_k": 5},
    {"top_k": 1},
    {"temperature": 0.5, "top_p": 0.5},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 0.5, "top_k": 1},
    {"top_p": 0.5, "top_k": 5},
    {"temperature": 0.5, "top_p": 0.5, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_p": 0.5, "top_k": 5},
)
"""Values of `sampling_params`. Engines run requests with all of them in one batch."""
SPECIAL_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"min_p": 0.3},
    {"temperature": 1.5, "min_p": 0.1, "top_k": 20},
    {"repetition_penalty": 1.5},
    {"temperature": 0.5, "repetition_penalty": 0.8, "min_p": 0.05, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"min_new_tokens": 8, "stop_token_ids": [0, 1, 2]},
    {"temperature": 0.5, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": -1.5},
    {"logit_bias": {7: 5.0, 8: 6.0, 9: -100.0}, "presence_penalty": 2.0, "top_k": 3},
)
"""Further values, for engines that apply them to prompt and answer as vLLM does."""

Filter = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
"""Function of logits after division by the temperature; it returns -inf for each token that is not sampled."""


def top_k_then_top_p(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Filter as transformers and vLLM do: `top_p` cuts the distribution of the `top_k` tokens."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    if "min_p" in sampling:
        logits = MinPLogitsWarper(sampling["min_p"])(ids, logits)
    if "top_k" in sampling:
        logits = TopKLogitsWarper(sampling["top_k"])(ids, logits)
    if "top_p" in sampling:
        logits = TopPLogitsWarper(sampling["top_p"])(ids, logits)
    return logits


def top_k_and_top_p(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Filter as SGLang does: `top_k` and `top_p` each cut the distribution of all tokens."""
    names = ("top_k", "top_p", "min_p")
    cut = [top_k_then_top_p(logits, {n: sampling[n]}) for n in names if n in sampling]
    return torch.stack([logits, *cut]).amin(0)


@torch.no_grad()
def distributions(
    model: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: dict[str, Any],
    cut: Filter = top_k_then_top_p,
) -> torch.Tensor:
    """Return log-probabilities (T, V) at the place of each output token; for greedy answers, of
    the model after the penalty."""
    tokens = torch.tensor([[*prompt, *output[:-1]]])
    logits: torch.Tensor = model(tokens).logits[0].float()
    logits = logits[len(prompt) - 1 :]
    for token, bias in sampling.get("logit_bias", {}).items():
        logits[:, token] += bias
    if "repetition_penalty" in sampling:
        penalise = RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"])
        seen = [tokens[:, : len(prompt) + number] for number in range(len(output))]
        rows = zip(seen, logits, strict=True)
        logits = torch.cat([penalise(ids, row[None]) for ids, row in rows])
    for number, row in enumerate(logits):
        for token, count in Counter(output[:number]).items():
            row[token] -= count * sampling.get("frequency_penalty", 0.0)
            row[token] -= sampling.get("presence_penalty", 0.0)
    for number in range(sampling.get("min_new_tokens", 0)):
        logits[number, sampling["stop_token_ids"]] = -torch.inf
    if temperature := sampling.get("temperature", 1.0):
        ids = torch.zeros(len(logits), 1, dtype=torch.long)
        logits = cut(TemperatureLogitsWarper(temperature)(ids, logits), sampling)
    return logits.log_softmax(-1)


def expected_logprobs(
    model: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: dict[str, Any],
    cut: Filter = top_k_then_top_p,
) -> torch.Tensor:
    """Return the log-probability of each output token."""
    tokens = torch.tensor(output)[:, None]
    return distributions(model, prompt, output, sampling, cut).gather(1, tokens)[:, 0]
