"""Log-probabilities of the sampled distribution in SGLang's ranks, and seeds of replicas.

SGLang (0.5.23) returns log-probabilities after temperature. Its sampler then cuts tokens off by `top_k`, `top_p` and
`min_p`, and draws from the rest. This module divides each probability by the share of the rest.

A server chooses a seed at each start, and gives the same seed to all of its replicas.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from windlass.errors import UnsupportedLayout

_CUTS = ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling")
_TOLERANCE = 0.01


@functools.cache
def return_sampled_logprobs() -> None:
    """Have this rank return log-probabilities of the distribution that it samples from. Once per process."""
    module = sys.modules.get("sglang.srt.layers.sampler")
    if module is None:  # not a rank that samples
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
            output.next_token_logprobs -= _mass_left(probs, sampling).log()
        # SGLang spells a greedy request as temperature 1 and top_k 1; another request with top_k 1 has no other answer.
        alone = (sampling.top_ks == 1) & (sampling.temperatures[:, 0] != 1.0)
        output.next_token_logprobs.masked_fill_(alone, 0.0)
        return tokens

    Sampler.forward = _with_sampled_logprobs


def _mass_left(probs: torch.Tensor, sampling: Any) -> torch.Tensor:
    """Return the probability of all tokens that may be drawn, for each row; 1 for a greedy one."""
    ordered = probs.sort(dim=-1, descending=True).values
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept = rank < sampling.top_ks[:, None]
    kept &= ordered.cumsum(-1) - ordered <= sampling.top_ps[:, None]
    if sampling.need_min_p_sampling:
        kept &= ordered >= ordered[:, :1] * sampling.min_ps[:, None]
    mass = (ordered * kept).sum(-1)
    return torch.where(sampling.top_ks == 1, 1.0, mass)


def _require_probabilities(probs: torch.Tensor) -> None:
    """Raise unless the sampler left probabilities where it found logits, as SGLang does on CPUs and on Nvidia's GPUs."""
    sums = probs.float().sum(-1)
    if float((sums - 1).abs().max()) > _TOLERANCE or float(probs.min()) < 0:
        raise UnsupportedLayout(
            "sglang: Sampler.forward must leave probabilities in next_token_logits, by which "
            "log-probabilities of top_p and top_k are made right, got sums of "
            f"{float(sums.min())} to {float(sums.max())}"
        )


def seed_replica(index: int) -> None:
    """Derive the seed of a replica, or of a group of data-parallel attention, from the server's seed.

    All ranks of the replica call this in the same step, so they continue to draw equal tokens.
    """
    if index:
        torch.manual_seed(torch.initial_seed() + index)
