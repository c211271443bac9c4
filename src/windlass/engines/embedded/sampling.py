"""Distribution that tokens are sampled from: temperature, then `top_k`, then `top_p`, as in transformers and vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.sampling import SamplingParams

GREEDY = 1e-5
"""Temperatures below it take the most probable token."""


def sampled_logprobs(
    logits: torch.Tensor, samplings: Sequence[SamplingParams | None]
) -> torch.Tensor:
    """Return the log-probabilities (B, V) of each row's distribution; -inf for a token that is never sampled.

    Args:
        logits: (B, V), of the model.
        samplings: sampling parameters of the rows. A greedy row, and a row without parameters, has the
            log-probabilities of the model.
    """
    drawn = [None if s is None or s.temperature < GREEDY else s for s in samplings]
    scaled = logits / torch.tensor([s.temperature if s else 1.0 for s in drawn])[:, None]
    top_k = [s.top_k if s and s.top_k > 0 else scaled.shape[-1] for s in drawn]
    top_p = [s.top_p if s else 1.0 for s in drawn]
    return _nucleus(_highest(scaled, top_k), top_p).log_softmax(-1)


def _highest(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Return the logits with -inf for all but the `top_k` highest of each row."""
    if min(top_k) >= logits.shape[-1]:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    outside = torch.arange(logits.shape[-1]) >= torch.tensor(top_k)[:, None]
    return torch.empty_like(logits).scatter(1, order, ordered.masked_fill(outside, -torch.inf))


def _nucleus(logits: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Return the logits with -inf for each token outside the nucleus of its row."""
    limits = torch.tensor(top_p)[:, None]
    if min(top_p) >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    weights = ordered.softmax(-1)
    # A sum of all weights may round to more than 1.
    outside = (weights.cumsum(-1) - weights >= limits) & (limits < 1.0)
    # A nucleus that is 0.0 in float32 still has the most probable token.
    outside[:, 0] = False
    return torch.empty_like(logits).scatter(1, order, ordered.masked_fill(outside, -torch.inf))
