"""Distribution of the next token: applies penalties, temperature, `min_p`, `top_k` and `top_p`, in vLLM's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from windlass.sampling import SamplingParams

GREEDY = 1e-5
"""If a request's temperature is below this limit, the engine takes the most probable token."""


def sampled_logprobs(
    logits: torch.Tensor, samplings: Sequence[SamplingParams | None]
) -> torch.Tensor:
    """Return the log-probability (B, V) of each token; -inf for a token that cannot be sampled.

    Args:
        logits: (B, V) logits of the model.
        samplings: sampling parameters of each row. If a row is greedy or its parameters are None, the function
            returns log_softmax of its logits.
    """
    drawn = [None if s is None or s.temperature < GREEDY else s for s in samplings]
    scaled = logits / torch.tensor([s.temperature if s else 1.0 for s in drawn])[:, None]
    min_p = [s.min_p if s else 0.0 for s in drawn]
    if max(min_p) > 0:
        least = scaled.amax(-1, keepdim=True) + torch.tensor(min_p).log()[:, None]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    top_k = [s.top_k if s and s.top_k > 0 else scaled.shape[-1] for s in drawn]
    top_p = [s.top_p if s else 1.0 for s in drawn]
    return _nucleus(_highest(scaled, top_k), top_p).log_softmax(-1)


def biased(logits: torch.Tensor, bias: Mapping[int, float]) -> torch.Tensor:
    """Return the logits (V) after adding the numbers in `bias` (token id -> number)."""
    if not bias:
        return logits
    added = torch.tensor([*bias.values()], dtype=logits.dtype)
    return logits.index_add(0, torch.tensor([*bias]), added)


def penalised(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    """Return the logits (V) with the repetition penalty for `seen`, the tokens of prompt and answer."""
    if penalty == 1.0:
        return logits
    ids = torch.tensor([*set(seen)])
    found = logits[ids]
    return logits.index_copy(0, ids, torch.where(found > 0, found / penalty, found * penalty))


def most_probable(logprobs: torch.Tensor, num_tokens: int) -> list[tuple[float, int]]:
    """Return (log-probability, id) of at most `num_tokens` tokens, most probable first; skip tokens with -inf."""
    if not num_tokens:
        return []
    found = logprobs.topk(min(num_tokens, len(logprobs)))
    pairs = zip(found.values.tolist(), found.indices.tolist(), strict=True)
    return [(logprob, token) for logprob, token in pairs if logprob > -torch.inf]


def _highest(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Return the logits; in each row, all but the `top_k` highest are replaced by -inf."""
    if min(top_k) >= logits.shape[-1]:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    outside = torch.arange(logits.shape[-1]) >= torch.tensor(top_k)[:, None]
    return torch.empty_like(logits).scatter(1, order, ordered.masked_fill(outside, -torch.inf))


def _nucleus(logits: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Return the logits; in each row, tokens outside the nucleus of `top_p` are replaced by -inf."""
    limits = torch.tensor(top_p)[:, None]
    if min(top_p) >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    weights = ordered.softmax(-1)
    # `limits < 1.0`: for a limit of 1 no token is outside, even if rounding makes a sum exceed 1.
    outside = (weights.cumsum(-1) - weights >= limits) & (limits < 1.0)
    # Keep the most probable token even if `top_p` is 0.0.
    outside[:, 0] = False
    return torch.empty_like(logits).scatter(1, order, ordered.masked_fill(outside, -torch.inf))
