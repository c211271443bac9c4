"""Comparison of rollout log-probabilities with the trainer's model in the first step of a job.

Before the first step, engines serve the trainer's weights, so the log-probabilities differ only by rounding. A larger
difference makes all importance weights wrong. The cause is an engine that reports another distribution than it samples
from, or an engine with other logits than the trainer. The check reads the logits from the forward pass of the loss, so
it needs no other forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from windlass.engines.embedded.sampling import sampled_logprobs
from windlass.jobs.train_worker import LOGPROB_DIFFERENCE
from windlass.rollout.messages import TrainingSample
from windlass.sampling import SamplingParams

MAX_SAMPLES = 8
"""Largest number of samples that a rank compares."""
MAX_PLACES = 64
"""Largest number of places in a forward pass at which one sample is compared."""
_MAX_DISTANCE = 1.0
"""Upper limit of a token's distance, which would be infinite if rounding moves the token out of the `top_p` set."""


@final
class LogprobCheck:
    """Comparison of the log-probabilities of a rank's samples with the logits that the rank's loss computes.

    Args:
        samples: samples of this rank.
        sampling: sampling parameters of the job.
    """

    def __init__(self, samples: Sequence[TrainingSample], sampling: SamplingParams) -> None:
        whole = [s for s in samples if s.prompt_ids and s.num_trained]
        self._samples = whole[:MAX_SAMPLES] if _can_compute(sampling) else []
        self._sampling = sampling
        self.distances: list[torch.Tensor] = []
        """Differences of the log-probabilities, one tensor per checked sample."""

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside the block, compare each sample with the logits of the first forward pass of `model` on this sample."""
        hook = model.register_forward_hook(self._compare, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def metrics(self) -> dict[str, float]:
        """Return the metric `LOGPROB_DIFFERENCE`, the mean |trainer's - engine's logprob| per token of compared samples.

        Return an empty mapping if no sample was compared. This happens if each forward pass had only parts of samples, or
        if the trainer cannot compute the engines' distribution from the sampling parameters.
        """
        if not self.distances:
            return {}
        return {LOGPROB_DIFFERENCE: float(torch.cat(self.distances).mean())}

    def _compare(
        self, _model: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        """Compare samples with the logits of a forward pass. torch calls this hook after each pass of the model.

        Skip samples that the pass does not contain. Add the differences of the other samples to `distances`, and do not
        compare these samples again.
        """
        tokens = _whole(given[0] if given else named.get("input_ids"), 2)
        logits = _whole(
            output if isinstance(output, torch.Tensor) else vars(output).get("logits"), 3
        )
        if tokens is None or logits is None or tokens.shape != logits.shape[:2]:
            return
        left = []
        for sample in self._samples:
            distances = []
            for row, column in _find(tokens, (*sample.prompt_ids, *sample.output_ids[:-1])):
                begin = column + len(sample.prompt_ids) - 1
                found = logits[row, begin : begin + len(sample.output_ids)].detach().float().cpu()
                distances.append(_distance(found, sample, self._sampling))
            if distances:
                # The pass may contain these tokens at several places. In a longer conversation, other tokens precede
                # them and change the logits. So use the place with the smallest distance.
                self.distances.append(min(distances, key=lambda each: float(each.sum())))
            else:
                left.append(sample)
        self._samples = left


def _can_compute(sampling: SamplingParams) -> bool:
    """Return whether the distribution of a token follows from its logits and the sampling parameters alone.

    Return False if it also depends on earlier tokens, on a grammar, or on the kind of the engine.
    """
    depends_on_tokens = sampling.repetition_penalty != 1.0 or sampling.min_new_tokens > 0
    is_changed = sampling.needs_whole_answer or bool(sampling.logit_bias)
    # vLLM applies `top_p` to the tokens that `min_p` leaves, and SGLang to all tokens.
    differs = sampling.min_p > 0 and sampling.top_p < 1
    return not (depends_on_tokens or is_changed or differs)


def _whole(tensor: object, num_dims: int) -> torch.Tensor | None:
    """Return `tensor` if it is a plain tensor (not sharded) with `num_dims` dimensions; otherwise None."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        return None
    return tensor if tensor.dim() == num_dims else None


def _find(tokens: torch.Tensor, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Find a sequence of tokens in `tokens` (B, T). Return (row, column) of its first token at each place.

    Return at most `MAX_PLACES` places.

    A row may be padded, or contain several samples.
    """
    if len(wanted) > tokens.shape[1]:
        return []
    windows = tokens.unfold(1, len(wanted), 1)
    places = (windows == torch.tensor(wanted, device=tokens.device)).all(-1).nonzero()
    return [(row, column) for row, column in places[:MAX_PLACES].tolist()]


def _distance(
    logits: torch.Tensor, sample: TrainingSample, sampling: SamplingParams
) -> torch.Tensor:
    """Return the absolute difference between the trainer's and the sample's log-probability, for each trained token.

    vLLM applies `top_p` to the `top_k` tokens, and SGLang applies it to all tokens. The sample does not tell which of
    these engines generated it. So compute both differences, and return the smaller one for each token. Replace
    differences above `_MAX_DISTANCE` by this limit.

    Args:
        logits: the trainer's logits (T, V) for the answer's tokens, on the CPU.
        sample: sample with T output tokens and their log-probabilities from the engine.
        sampling: sampling parameters of the engine.
    """
    tokens = torch.tensor(sample.output_ids)[:, None]

    def of(settings: SamplingParams) -> torch.Tensor:
        return sampled_logprobs(logits, [settings] * len(tokens))

    replace = msgspec.structs.replace
    nucleus_of_all = of(replace(sampling, top_k=-1))
    at_once = of(replace(sampling, top_p=1.0)).masked_fill(nucleus_of_all.isneginf(), -torch.inf)
    served = torch.tensor(sample.logprobs)
    distances = [
        (logprobs.gather(1, tokens)[:, 0] - served).abs()
        for logprobs in (of(sampling), at_once.log_softmax(-1))
    ]
    return torch.minimum(*distances).clamp(max=_MAX_DISTANCE)[torch.tensor(sample.loss_mask)]
