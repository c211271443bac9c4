"""Replay of a trained sample on an engine: generate its answers again and compare the tokens and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import msgspec

from windlass.errors import ConfigError
from windlass.rollout.generate import AttemptError, generate
from windlass.rollout.messages import EngineTarget, Partial, RolloutTask, TrainingSample
from windlass.sampling import SamplingParams
from windlass.wording import counted

MAX_REQUESTS = 16
"""Number of requests at a time to the engine."""
REQUEST_DEADLINE_S = 600.0
"""Longest time of one request to the engine."""
CHANGES_LOGPROBS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "logit_bias"),
    *("json_schema", "regex", "ebnf", "choice"),
)
"""Sampling parameters that change the log-probabilities of a sample. A request for one token in the middle of an answer
cannot repeat their effect."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Comparison of a sample with an engine.

    Attributes:
        num_generated: number of generated tokens in the sample.
        num_compared: number of tokens with compared log-probabilities.
        num_other_version: number of generated tokens whose version differs from `engine_version`.
        engine_version: version that the engine has now.
        is_exact: whether sampling is greedy or has a seed, so that all tokens must be equal.
        first_difference: with `is_exact`, index in `output_ids` of the first token that differs; None if all are equal.
        largest_distance: largest difference of two log-probabilities.
        mean_distance: mean difference.
    """

    num_generated: int
    num_compared: int
    num_other_version: int
    engine_version: int
    is_exact: bool
    first_difference: int | None
    largest_distance: float
    mean_distance: float

    @property
    def is_identical(self) -> bool:
        """Whether the engine has generated the same tokens with the same log-probabilities, bit for bit."""
        return self.is_exact and self.first_difference is None and self.largest_distance == 0.0

    def agrees(self, tolerance: float) -> bool:
        """Return whether `first_difference` is None, and no two log-probabilities differ by more than `tolerance`."""
        return self.first_difference is None and self.largest_distance <= tolerance

    def text(self) -> str:
        """Return the comparison as one line."""
        if self.is_identical:
            said = f"the engine generated the same {counted(self.num_compared, 'token')} with the same log-probabilities"
        else:
            said = (
                f"{self.num_compared} of {self.num_generated} tokens compared; their log-probabilities differ by at most "
                f"{self.largest_distance:.3g} (mean {self.mean_distance:.3g})"
            )
            if self.first_difference is not None:
                said += f"; the tokens first differ at output_ids[{self.first_difference}]"
        if self.num_other_version:
            said += (
                f"; the engine serves version {self.engine_version}, but the sample has "
                f"{counted(self.num_other_version, 'token')} of other versions"
            )
        return said


async def replay(
    http: aiohttp.ClientSession,
    url: str,
    sample: TrainingSample,
    sampling: SamplingParams,
    seed: int | None = None,
) -> Replay:
    """Compare a sample with an engine.

    If sampling is greedy, or the sample has one answer and a seed, the engine generates whole answers again. Their
    tokens must equal the sample's. Otherwise, the engine returns its most probable token at each position.
    At positions where this is the sample's token, compare the log-probabilities.

    Args:
        http: session with the engine's token.
        url: address of the engine. The engine should serve the version of the sample's tokens.
        sample: the sample.
        sampling: sampling parameters of the sample.
        seed: seed of the sample's rollout; None if it has no seed.

    Raises:
        ConfigError: the sample has images, or no generated token; or `sampling` changes log-probabilities (see `CHANGES_LOGPROBS`)
            and the engine cannot generate the answers again.
        AttemptError: the engine failed, or returned no token.
    """
    sample.refuse_images("replay")
    spans = list(_spans(sample))
    # Later turns of a conversation have other seeds, which are not recorded.
    is_seeded = seed is not None and len(spans) == 1
    is_exact = sampling.temperature == 0 or is_seeded
    neutral = SamplingParams(max_new_tokens=1)
    for name in CHANGES_LOGPROBS:
        found, wanted = (msgspec.structs.asdict(each)[name] for each in (sampling, neutral))
        if not is_exact and found != wanted:
            raise ConfigError(
                f"replay: sampling.{name} must be {wanted!r} unless the sampling is greedy or seeded, got {found!r}; the "
                "replay cannot compute the log-probabilities that this setting changes"
            )
    if not spans:
        raise ConfigError("replay: the sample must have a token that an engine generated, got none")
    # Engines round differently in larger batches. So send one request at a time if the tokens must be equal.
    slots = asyncio.Semaphore(1 if is_exact else MAX_REQUESTS)

    begins = {number: span[0] for span in spans for number in range(*span)}

    async def ask(first: int, last: int) -> Partial:
        # With `min_new_tokens`, the engine gave end tokens no probability at the beginning of the answer.
        has_no_end = first - begins[first] < sampling.min_new_tokens
        keeps_ends = is_exact or has_no_end
        settings = msgspec.structs.replace(
            sampling,
            max_new_tokens=last - first,
            min_new_tokens=min(sampling.min_new_tokens, last - first) if keeps_ends else 0,
            temperature=sampling.temperature if is_seeded else 0.0,
            sampling_seed=seed if is_seeded else None,
            # A request for one recorded token must return a token even where the recorded answer ends.
            ignore_eos=sampling.ignore_eos or not keeps_ends,
            stop=sampling.stop if is_exact else (),
            stop_token_ids=sampling.stop_token_ids if keeps_ends else (),
        )
        task = RolloutTask(
            task_id=f"replay-{first}",
            attempt=1,
            prompt_ids=(*sample.prompt_ids, *sample.output_ids[:first]),
            sampling=settings,
            engine=EngineTarget("replay", url),
            deadline_s=REQUEST_DEADLINE_S,
        )
        async with slots:
            return (await generate(http, task)).tokens

    asked = spans if is_exact else [(n, n + 1) for span in spans for n in range(*span)]
    answers = await asyncio.gather(*(ask(*each) for each in asked))
    return _compared(sample, spans, asked, answers, is_exact=is_exact)


def _spans(sample: TrainingSample) -> Iterator[tuple[int, int]]:
    """Yield the range [first, last) of each sequence of consecutive generated tokens in a sample's output."""
    first: int | None = None
    # Tokens that no engine generated have version -1. Tokens of an engine without a controller also have version -1, but
    # their loss mask is True.
    pairs = zip(sample.versions, sample.loss_mask, strict=True)
    for number, is_generated in enumerate([*(v >= 0 or used for v, used in pairs), False]):
        if is_generated and first is None:
            first = number
        elif not is_generated and first is not None:
            yield first, number
            first = None


def _compared(
    sample: TrainingSample,
    spans: list[tuple[int, int]],
    asked: list[tuple[int, int]],
    answers: list[Partial],
    *,
    is_exact: bool,
) -> Replay:
    """Compare the engine's answers with the sample. Each answer is for one range [first, last) of `asked`.

    Raises:
        AttemptError: no answer has a token.
    """
    distances: list[float] = []
    differences: list[int] = []
    for (first, last), answer in zip(asked, answers, strict=True):
        for number in range(first, last):
            index = number - first
            is_there = index < len(answer.output_ids)
            if not is_there or answer.output_ids[index] != sample.output_ids[number]:
                differences.append(number)
                break
            distances.append(abs(answer.logprobs[index] - sample.logprobs[number]))
    versions = [answer.versions[-1] for answer in answers if answer.versions]
    if not versions:
        raise AttemptError(
            f"replay: the engine returned no token in {len(answers)} answers", answers[0]
        )
    version = max(versions)
    generated = [n for span in spans for n in range(*span)]
    return Replay(
        num_generated=len(generated),
        num_compared=len(distances),
        num_other_version=sum(sample.versions[n] != version for n in generated),
        engine_version=version,
        is_exact=is_exact,
        first_difference=min(differences, default=None) if is_exact else None,
        largest_distance=max(distances, default=0.0),
        mean_distance=sum(distances) / max(len(distances), 1),
    )
