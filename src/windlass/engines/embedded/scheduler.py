"""Request scheduler of rank 0: selects the requests to run, collects their tokens, and pauses generation.

Rank 0 broadcasts each forward pass or pause as a `Step`, and every rank carries out the same steps in the same order.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

import torch

from windlass.config import PauseMode
from windlass.engines.embedded.sampling import (
    GREEDY,
    biased,
    most_probable,
    penalised,
    sampled_logprobs,
)
from windlass.errors import ConfigError, PeerTimeout
from windlass.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    """One step of every rank: a forward pass, or a pause.

    Attributes:
        pause_id: id of the pause; empty for a forward pass.
        sleeps: whether the rank frees its weights and its KV cache at the beginning of the pause.
        slots: (B,) rows of the KV cache.
        tokens: (B, T) tokens, right-padded.
        start: (B,) position of the first token in `tokens`.
        lengths: (B,) number of tokens without padding.
    """

    pause_id: str = ""
    slots: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sleeps: bool = False


class FinishReason(StrEnum):
    """Reason why the generation for a request ended; values as in SGLang."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """One request and its generated tokens.

    Attributes:
        rid: id of the request.
        input_ids: tokens of the prompt.
        stop_token_ids: tokens that end the generation.
        has_stop_text: function that takes the output ids and returns whether the last ids contain a stop text.
        on_finish: callback, called once with this request, in the model loop's thread or in the thread that
            aborts the request.
        on_token: callback, called after each token in the model loop's thread.
        num_top: number of most probable tokens to record for each generated token.
        output_ids, logprobs, top, versions: one entry per generated token. `top` has pairs of a log-probability and a
            token. `versions` has the version of the weights that computed the token, and is extended last.
        finish: reason why the generation ended; None until then.
        failure: error message if a token could not be sampled; else empty.
        generator: random generator of a request with a seed; None for the engine's generator.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    on_finish: Callable[[Request], None]
    has_stop_text: Callable[[list[int]], bool] = lambda _: False
    on_token: Callable[[], None] = lambda: None
    num_top: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: str = ""
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if (seed := self.sampling.sampling_seed) is not None:
            self.generator = torch.Generator().manual_seed(seed)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.input_ids) + len(self.output_ids)


@final
class Scheduler:
    """Thread-safe request scheduler, and `EngineHooks` of rank 0.

    The HTTP server submits requests, the agent pauses and resumes generation, and the model loop calls `next_step`.

    Args:
        num_slots: number of requests that can run at once.
        max_positions: maximum number of tokens (prompt and output) of a request.
        paused: whether generation is paused until `resume` is called.
        seed: seed of sampling.
    """

    def __init__(self, *, num_slots: int, max_positions: int, paused: bool, seed: int) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free = list(range(num_slots))[::-1]
        self._max_positions = max_positions
        self._paused = paused
        self._pause_wanted: tuple[str, PauseMode, bool] | None = None
        self._quiesced_for: str | None = None
        self._num_sleeps = 0
        self._version = -1
        self._generator = torch.Generator().manual_seed(seed)

    # --- called by HTTP and by the agent -------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights, which is recorded for new tokens."""
        return self._version

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._paused

    def num_requests(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting requests."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request, and wake the model loop if it waits for work.

        Raises:
            ConfigError: the request does not fit into the cache.
        """
        needed = len(request.input_ids) + request.sampling.max_new_tokens
        if needed > self._max_positions:
            raise ConfigError(
                f"input_ids and max_new_tokens must fit into {self._max_positions} positions, "
                f"got {needed}"
            )
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()

    def abort(self, rid: str) -> bool:
        """End the request with this id; its answer has the tokens so far. Return False if no request has this id."""
        with self._changed:
            found = [r for r in (*self._running.values(), *self._waiting) if r.rid == rid]
            for request in found:
                self._finish(request, FinishReason.ABORT)
            self._changed.notify_all()
        return bool(found)

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """Pause generation, and wait until the current step has ended.

        Raises:
            PeerTimeout: the step has not ended within `deadline_s`.
        """
        self._pause(pause_id, mode, deadline_s, sleeps=False)

    def sleep(self, mode: PauseMode, deadline_s: float) -> None:
        """Pause generation as `pause` does, and wait until every rank has freed its weights and its KV cache.

        Raises:
            PeerTimeout: the step has not ended, or a rank has not freed its memory, within `deadline_s`.
        """
        self._num_sleeps += 1
        self._pause(f"sleep.{self._num_sleeps}", mode, deadline_s, sleeps=True)

    def _pause(self, pause_id: str, mode: PauseMode, deadline_s: float, *, sleeps: bool) -> None:
        """Ask the model loop for a pause, and wait until the loop has called `quiesced`; see `pause` and `sleep`.

        Raises:
            PeerTimeout: the current step of the model loop did not end within `deadline_s`.
        """
        with self._changed:
            self._pause_wanted = (pause_id, mode, sleeps)
            self._paused = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._quiesced_for == pause_id, deadline_s):
                raise PeerTimeout(
                    f"pause {pause_id}: the model loop's step did not end within {deadline_s} s"
                )

    def resume(self, deadline_s: float = 0.0) -> None:  # noqa: ARG002
        """Let generation continue, and wake the model loop. Idempotent."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def finalise(self) -> None:
        """Do nothing: this engine derives no values from its weights."""

    def set_version(self, version: int, deadline_s: float = 0.0) -> None:  # noqa: ARG002
        """Set the version that is recorded for tokens of later steps."""
        with self._changed:
            self._version = version

    # --- called by the model loop --------------------------------------------------------------

    def next_step(self) -> Step:
        """Wait for a request or a pause, and return the next step.

        If a pause is wanted, its mode decides whether this function first ends the requests, requeues them, or keeps them.
        """
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._pause_wanted is not None:
                pause_id, mode, sleeps = self._pause_wanted
                self._apply_pause(mode)
                return Step(pause_id, sleeps=sleeps)
            return self._forward()

    def quiesced(self, pause_id: str) -> None:
        """Record that the last step before the pause has ended, and wake the thread that waits in `pause` or `sleep`."""
        with self._changed:
            if self._pause_wanted is not None and self._pause_wanted[0] == pause_id:
                self._pause_wanted = None
            self._quiesced_for = pause_id
            self._changed.notify_all()

    def sample(self, step: Step, logits: torch.Tensor) -> None:
        """Sample one token per row of the step's logits (B, V), and append the token to the row's request.

        If torch cannot sample a row, end its request with the error.
        """
        with self._changed:
            requests = [self._running.get(slot) for slot in step.slots]
            for request, row in zip(requests, self._sample(requests, logits), strict=True):
                if request is not None and isinstance(row, str):
                    request.failure = row
                    self._finish(request, FinishReason.ABORT)
                elif request is not None and not isinstance(row, str):
                    self._append(request, *row)

    def _has_work(self) -> bool:
        """Return whether the loop must act: a pause is wanted, or there are requests and generation is not paused."""
        runs = not self._paused and bool(self._running or self._waiting)
        return runs or self._pause_wanted is not None

    def _apply_pause(self, mode: PauseMode) -> None:
        """End all requests (`ABORT`), return running requests to the queue (`RETRACT`), or do nothing (`IN_PLACE`)."""
        if mode is PauseMode.ABORT:
            for request in (*self._running.values(), *self._waiting):
                self._finish(request, FinishReason.ABORT)
        elif mode is PauseMode.RETRACT:
            for slot, request in sorted(self._running.items(), reverse=True):
                self._free.append(slot)
                self._waiting.appendleft(request)
            self._running.clear()

    def _forward(self) -> Step:
        """Return a prefill step if a request waits and a slot is free, else a decode step of the running requests.

        Before a prefill step, give each waiting request a free slot, until no request waits or no slot is free.
        """
        slots, rows = sorted(self._running), list[list[int]]()
        if self._waiting and self._free:
            slots = []
            while self._waiting and self._free:
                request, slot = self._waiting.popleft(), self._free.pop()
                self._running[slot] = request
                slots.append(slot)
                rows.append(request.input_ids + request.output_ids)
        else:
            rows = [self._running[slot].output_ids[-1:] for slot in slots]
        width = max(len(row) for row in rows)
        return Step(
            slots=slots,
            tokens=[row + [0] * (width - len(row)) for row in rows],
            start=[
                self._running[s].num_tokens - len(row) for s, row in zip(slots, rows, strict=True)
            ],
            lengths=[len(row) for row in rows],
        )

    def _sample(
        self, requests: list[Request | None], logits: torch.Tensor
    ) -> list[tuple[int, float, list[tuple[float, int]]] | str]:
        """Return, for each row, the values of `_drawn`, or an error message if torch cannot sample the row.

        If sampling fails for the batch, sample each row alone, so that only the failing rows get a message.
        """
        try:
            return [*zip(*self._drawn(requests, logits), strict=True)]
        except RuntimeError as error:
            if len(requests) == 1:
                return [str(error)]
            rows = (self._sample([r], logits[at : at + 1]) for at, r in enumerate(requests))
            return [row for (row,) in rows]

    def _drawn(
        self, requests: list[Request | None], logits: torch.Tensor
    ) -> tuple[list[int], list[float], list[list[tuple[float, int]]]]:
        """Sample one token per row; return the tokens, their log-probabilities, and the most probable tokens.

        `sampled_logprobs` describes the log-probabilities.
        """
        samplings = [None if request is None else request.sampling for request in requests]
        rows = [
            row if request is None else _adjusted(row, request)
            for row, request in zip(logits, requests, strict=True)
        ]
        logits = torch.stack(rows)
        logprobs = sampled_logprobs(logits, samplings)
        weights = logprobs.exp()
        drawn = torch.multinomial(weights, 1, generator=self._generator)[:, 0]
        for row, request in enumerate(requests):
            if request is not None and request.generator is not None:
                drawn[row] = torch.multinomial(weights[row], 1, generator=request.generator)
        greedy = torch.tensor([s is None or s.temperature < GREEDY for s in samplings])
        tokens = torch.where(greedy, logits.argmax(-1), drawn)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        top = [
            most_probable(row, 0 if request is None else request.num_top)
            for row, request in zip(logprobs, requests, strict=True)
        ]
        return tokens.tolist(), chosen.tolist(), top

    def _append(
        self, request: Request, token: int, logprob: float, top: list[tuple[float, int]]
    ) -> None:
        """Add a sampled token to a request, and end the request if the token ends the generation."""
        request.output_ids.append(token)
        request.logprobs.append(logprob)
        request.top.append(top)
        request.versions.append(self._version)
        request.on_token()
        if token in request.stop_token_ids or request.has_stop_text(request.output_ids):
            self._finish(request, FinishReason.STOP)
        elif len(request.output_ids) >= request.sampling.max_new_tokens:
            self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, free its slot, and call `on_finish`. Do nothing if the request has already ended."""
        if request.finish is not None:
            return
        request.finish = reason
        if request in self._waiting:
            self._waiting.remove(request)
        for slot, running in list(self._running.items()):
            if running is request:
                del self._running[slot]
                self._free.append(slot)
        request.on_finish(request)


def _adjusted(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the logits (V), changed by a request's bias and penalties.

    If the answer has fewer than `min_new_tokens` tokens, the logits of its stop tokens are -inf.
    """
    sampling, output = request.sampling, request.output_ids
    logits = biased(logits, sampling.logit_bias)
    logits = penalised(logits, request.input_ids + output, sampling.repetition_penalty)
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        counts = Counter(output)
        logits = biased(
            logits, {token: -frequency * count - presence for token, count in counts.items()}
        )
    ends = [token for token in request.stop_token_ids if 0 <= token < len(logits)]
    if ends and len(output) < sampling.min_new_tokens:
        logits = logits.index_fill(0, torch.tensor(ends), -torch.inf)
    return logits
