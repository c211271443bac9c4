"""Log-probabilities of the sampled distribution in SGLang's ranks, and the seeds of data-parallel replicas.

SGLang (0.5.23) returns log-probabilities after temperature only, but samples from the tokens that remain after `top_k`,
`top_p` and `min_p`. This module divides the probability of each sampled token by the sum of the remaining tokens'
probabilities. With speculative decoding, SGLang samples the accepted tokens in another function, from the `top_p` part of
the renormalised `top_k` part, without `min_p`.

SGLang gives the same seed to all replicas of a server. This module gives each replica a different seed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from windlass.errors import UnsupportedLayout

_CUTS = ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling")
"""Attributes of SGLang's sampling parameters: whether any request of the batch sets `top_k`, `top_p` or `min_p`."""
_TOLERANCE = 0.01
"""Largest difference from 1 of the sum of a row of probabilities."""
_OF_DRAFTS = ("compute_spec_logprobs", "compute_spec_v2_logprobs")
"""Functions of SGLang 0.5.23 and 0.5.16 that compute log-probabilities of accepted tokens."""


@functools.cache
def return_sampled_logprobs() -> None:
    """Patch SGLang's sampler to return log-probabilities of the distribution that it samples from. Idempotent."""
    module = sys.modules.get("sglang.srt.layers.sampler")
    # This rank does not sample.
    if module is None:
        return
    Sampler: Any = vars(module)["Sampler"]  # noqa: N806 - a class
    forward = Sampler.forward
    is_checked = False

    @functools.wraps(forward)
    def _with_sampled_logprobs(
        sampler: Any, output: Any, sampling: Any, return_logprob: bool, *given: Any, **named: Any
    ) -> Any:
        nonlocal is_checked
        tokens = forward(sampler, output, sampling, return_logprob, *given, **named)
        if not return_logprob or not any(vars(sampling)[cut] for cut in _CUTS):
            return tokens
        if not sampling.is_all_greedy:
            probs = output.next_token_logits
            if not is_checked:
                _require_probabilities(probs)
                is_checked = True
            mass, num_left = _left(probs, sampling)
            output.next_token_logprobs -= mass.log()
            _correct_top(output, mass, num_left)
        # SGLang gives a greedy request temperature 1 and top_k 1, and returns the model's log-probability. In any
        # other request with top_k 1, only one token can be sampled: its log-probability is 0.
        alone = (sampling.top_ks == 1) & (sampling.temperatures[:, 0] != 1.0)
        output.next_token_logprobs.masked_fill_(alone, 0.0)
        if _has_top(output):
            values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
            for at in alone.nonzero()[:, 0].tolist():
                values[at], ids[at] = torch.zeros_like(values[at][:1]), ids[at][:1]
        return tokens

    Sampler.forward = _with_sampled_logprobs
    for name in _OF_DRAFTS:
        for loaded in [m for n, m in sys.modules.items() if n.startswith("sglang.srt.")]:
            if callable(compute := vars(loaded).get(name)):
                setattr(loaded, name, _of_accepted(compute))


def _of_accepted(compute: Any) -> Any:
    """Return a function that calls SGLang's `compute`, and then corrects the log-probabilities of the accepted tokens."""

    @functools.wraps(compute)
    def _with_sampled_logprobs(
        batch: Any,
        output: Any,
        predict: torch.Tensor,
        accept_index: torch.Tensor | None = None,
        *given: Any,
        **named: Any,
    ) -> None:
        if given:  # SGLang 0.5.16
            compute(batch, output, predict, accept_index, *given, **named)
        else:
            compute(batch, output, predict, accept_index=accept_index, **named)
        sampling = batch.sampling_info
        cuts = sampling.need_top_k_sampling or sampling.need_top_p_sampling
        if sampling.is_all_greedy or not cuts:
            return
        logits = output.next_token_logits
        if accept_index is not None:
            logits = logits[accept_index.long().reshape(-1)]
        found = output.next_token_logprobs
        per_request = found.numel() // len(sampling.temperatures)
        temperatures, top_ks, top_ps = (
            torch.repeat_interleave(setting.reshape(-1), per_request)[:, None]
            for setting in (sampling.temperatures, sampling.top_ks, sampling.top_ps)
        )
        probs = torch.softmax(logits / temperatures, dim=-1)
        ordered = probs.sort(dim=-1, descending=True).values
        ordered = ordered * (torch.arange(probs.shape[-1], device=probs.device) < top_ks)
        total = ordered.sum(-1, keepdim=True)
        before = (ordered.cumsum(-1) - ordered) / total
        mass = (ordered * (before <= top_ps)).sum(-1)
        # A greedy request in a mixed batch has temperature 1 and top_k 1. It returns the model's log-probability.
        is_greedy = (top_ks == 1) & (temperatures == 1.0)
        mass = torch.where(is_greedy[:, 0], 1.0, mass)
        found -= mass.log().reshape(found.shape)

    return _with_sampled_logprobs


def _left(probs: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row, the sum of the probabilities of all tokens that can be sampled, and the number of these tokens.

    If top_k is 1, return the sum 1, so that the caller's correction changes nothing. For a greedy request, return the
    number of all tokens, so that the caller removes none.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept = rank < sampling.top_ks[:, None]
    kept &= ordered.cumsum(-1) - ordered <= sampling.top_ps[:, None]
    if sampling.need_min_p_sampling:
        kept &= ordered >= ordered[:, :1] * sampling.min_ps[:, None]
    is_one = sampling.top_ks == 1
    mass = torch.where(is_one, 1.0, (ordered * kept).sum(-1))
    is_greedy = is_one & (sampling.temperatures[:, 0] == 1.0)
    return mass, torch.where(is_greedy, probs.shape[-1], kept.sum(-1))


def _correct_top(output: Any, mass: torch.Tensor, num_left: torch.Tensor) -> None:
    """Correct the log-probabilities of each row's most probable tokens. Remove tokens that cannot be sampled."""
    # If no request asks for such tokens, return before `tolist` waits for the GPU.
    if not _has_top(output):
        return
    values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    for at, (change, count) in enumerate(zip(mass.log().tolist(), num_left.tolist(), strict=True)):
        values[at], ids[at] = values[at][:count] - change, ids[at][:count]


def _has_top(output: Any) -> bool:
    """Return whether a request of the batch asks for the most probable tokens."""
    return any(map(len, output.next_token_top_logprobs_val or ()))


def _require_probabilities(probs: torch.Tensor) -> None:
    """Raise UnsupportedLayout unless `probs` are probabilities.

    On CPUs and Nvidia's GPUs, SGLang's sampler overwrites the logits with probabilities; `probs` must be its output.
    """
    sums = probs.float().sum(-1)
    if float((sums - 1).abs().max()) > _TOLERANCE or float(probs.min()) < 0:
        raise UnsupportedLayout(
            "sglang: after Sampler.forward, each row of next_token_logits must contain probabilities (>= 0, with the "
            f"sum 1), got sums of {float(sums.min())} to {float(sums.max())} and the minimum {float(probs.min())}; "
            "Windlass needs them for log-probabilities after top_p and top_k"
        )


def seed_replica(index: int) -> None:
    """Add `index` to the seed that the server has set for torch's generators. Call this once per process.

    `index` is the index of a data-parallel replica, or of a rank group with data-parallel attention. All ranks with this
    index must call this between the same two sampling steps, because they must sample equal tokens.
    """
    if index:
        torch.manual_seed(torch.initial_seed() + index)
