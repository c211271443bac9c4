"""Run one attempt at an engine, through SGLang's `/generate` route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import msgspec

from windlass.errors import DECODE_ERRORS, PeerUnreachable, RolloutError
from windlass.net.clock import Backoff
from windlass.net.sockets import connection_error
from windlass.rollout.images import ImagePrompt
from windlass.rollout.messages import ErrorKind, OnAbort, Partial, RolloutTask, TurnIncrement
from windlass.rollout.tensors import SampleTensor
from windlass.sampling import SamplingParams

MAX_STALLS = 8
"""Number of requests in a row without a new token after which an attempt fails."""
STALL_BACKOFF = Backoff(0.05, 1.0)
"""Pauses after requests without a new token."""
ABORT = "abort"
"""Reason with which an engine ends the requests that a weight update interrupts."""


PASSING_4XX = frozenset({408, 409, 425, 429})
"""4xx HTTP statuses after which the engine may accept the same request later."""


class AttemptError(RolloutError):
    """Raised when an attempt fails; `partial` contains the tokens that the engine generated before."""

    def __init__(self, message: str, partial: Partial, kind: ErrorKind = ErrorKind.PASSING) -> None:
        super().__init__(message)
        self.partial, self.kind = partial, kind


class Reject(RolloutError):
    """Raised by a workflow to discard its answer; the controller then submits the rollout again.

    An engine call raises this too if an answer has the token of an image, see `AttemptProgress.tokens_of`.
    """


class AttemptResult(msgspec.Struct, frozen=True):
    """Result of a successful attempt: tokens of a plain prompt (and their text), or turns and value of a workflow."""

    tokens: Partial = Partial()
    finish_reason: str = ""
    turns: tuple[TurnIncrement, ...] = ()
    value: bytes = b""
    text: str = ""
    tensors: dict[str, SampleTensor] = {}


class GeneratedToken(NamedTuple):
    """Token of an answer.

    Attributes:
        top: ids and log-probabilities of the most probable tokens at this place, the highest first. Tokens that cannot be
            sampled are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """Request of a caller to see the tokens of an answer.

    Attributes:
        on_tokens: function that gets every token of the answer once, in order. A token that it got stays part of the
            answer, also if an update aborts the generation.
        streams: whether `on_tokens` gets tokens while the engine generates them. A token that the engine may have to
            generate again comes later, see `_num_kept`. Without `streams`, all tokens come at the end.
        num_top: number of tokens in each `GeneratedToken.top`, if so many can be sampled.
    """

    on_tokens: Callable[[Sequence[GeneratedToken]], None]
    streams: bool = False
    num_top: int = 0


class _FinishReason(msgspec.Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None


class _TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    token_id: int
    text: str | None = None


class _VersionSpan(msgspec.Struct, frozen=True):
    """Weight version of the output tokens [start, end), in the format of SGLang and vLLM."""

    version: int | str
    start: int
    end: int


class _MetaInfo(msgspec.Struct, frozen=True):
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[_TokenLogprob] = []
    output_top_logprobs: list[list[_TokenLogprob] | None] = []
    completion_tokens: int = 0
    output_token_versions: list[int] | None = None
    weight_versions: list[_VersionSpan] | None = None
    weight_version: int | str | None = None


class GenerateAnswer(msgspec.Struct, frozen=True):
    """Answer of an engine to `POST /generate`."""

    meta_info: _MetaInfo
    output_ids: list[int] = []
    prompt_token_ids: list[int] | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None


class _Event(GenerateAnswer, frozen=True, kw_only=True):
    """Event of a streamed answer.

    An event of SGLang contains all tokens so far. An event of another engine contains only new tokens. `completion_tokens`
    counts all tokens so far, so it tells both kinds of events apart. The last event contains the versions of all tokens.
    """

    meta_info: _MetaInfo = _MetaInfo()
    error: _Error | None = None


async def generate(
    session: aiohttp.ClientSession,
    task: RolloutTask,
    watch: Watch | None = None,
    images: ImagePrompt | None = None,
) -> AttemptResult:
    """Generate the answer to one prompt. If a weight update aborts the generation, send another request.

    With `OnAbort.CONTINUE`, the next request continues after the generated tokens. With `OnAbort.RETRY`, the next
    request starts from the prompt again.

    Args:
        session: HTTP session for `POST {engine}/generate`.
        task: attempt with a plain prompt, or one engine call of a workflow's attempt.
        watch: function that gets the tokens, or None.
        images: images of the prompt, whose `ids` are `task.prompt_ids`; None if there are none. Each request contains them.

    Raises:
        AttemptError: the engine refused a request, was unreachable, sent an invalid answer, added no token in
            `MAX_STALLS` requests in a row, did not finish within `task.deadline_s`, or expanded the images to other tokens.
        Reject: the answer to a prompt with images has the token of an image.
    """
    progress = AttemptProgress(task, watch, images)
    try:
        async with asyncio.timeout(task.deadline_s):
            return await progress.run(session)
    except TimeoutError as error:
        # A socket may also raise TimeoutError (ETIMEDOUT). The text is right in both cases: no answer arrived.
        reason = f"no answer within {task.deadline_s:.3f} s"
        raise progress.failure(reason) from error
    except (aiohttp.ClientError, OSError, PeerUnreachable, *DECODE_ERRORS) as error:
        raise progress.failure(connection_error(error)) from error


class AttemptProgress:
    """Tokens of a running attempt, and the requests that generate more tokens."""

    def __init__(
        self, task: RolloutTask, watch: Watch | None = None, images: ImagePrompt | None = None
    ) -> None:
        self.task, self._images = task, images
        self.tokens = self._begin = _continued(task.partial, task.sampling)
        self.num_calls = 0
        self._watch = watch
        self._is_kept = task.on_abort is OnAbort.CONTINUE and not task.sampling.needs_whole_answer
        # Tokens of the answer so far, if a caller watches them.
        self._seen: list[GeneratedToken] = []
        if watch is not None:
            known = zip(self.tokens.output_ids, self.tokens.logprobs, strict=True)
            self._seen += [GeneratedToken(*each) for each in known]
        self._num_shown = 0

    def failure(self, reason: str, kind: ErrorKind = ErrorKind.PASSING) -> AttemptError:
        """Return an error that names the engine and contains the tokens generated so far. The caller raises it."""
        engine = self.task.engine
        return AttemptError(f"engine {engine.name} ({engine.url}): {reason}", self.tokens, kind)

    async def run(self, session: aiohttp.ClientSession) -> AttemptResult:
        """Send requests until the answer is complete, and return the answer; raise errors as `generate` does."""
        stalls = 0
        while len(self.tokens.output_ids) < self.task.sampling.max_new_tokens:
            answer = await self._call(session)
            before = len(self.tokens.output_ids)
            added = self.tokens_of(answer)
            reason = answer.meta_info.finish_reason
            if reason is not None and reason.type != ABORT:
                self._show(len(self._seen))
                return AttemptResult(_joined(self.tokens, added), reason.type)
            if self.task.on_abort is OnAbort.CONTINUE:
                self.tokens = _continued(_joined(self.tokens, added), self.task.sampling)
            else:
                self.tokens = self._begin
            del self._seen[len(self.tokens.output_ids) :]
            stalls = 0 if len(self.tokens.output_ids) > before else stalls + 1
            if stalls >= MAX_STALLS:
                why = f": {reason.message}" if reason is not None and reason.message else ""
                raise self.failure(
                    f"the engine aborted {stalls} requests in a row without a new token{why}"
                )
            if stalls:
                await asyncio.sleep(STALL_BACKOFF.after(stalls))
        self._show(len(self._seen))
        return AttemptResult(self.tokens, "length")

    async def _call(self, session: aiohttp.ClientSession) -> GenerateAnswer:
        """Send one request to the engine, and return the engine's answer.

        Raises:
            AttemptError: the HTTP status is not 200.
        """
        task, self.num_calls = self.task, self.num_calls + 1
        async with session.post(
            f"{task.engine.url}/generate",
            data=msgspec.json.encode(self._request()),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status == 200 and response.content_type == "text/event-stream":
                return await self._streamed(response.content)
            body = await response.read()
            if response.status != 200:
                text = body[:200].decode(errors="replace").replace("\n", " ")
                raise self._refused(response.status, text)
        answer = msgspec.json.decode(body, type=GenerateAnswer)
        if answer.output_ids:
            self._check_prompt(answer.prompt_token_ids)
        self._see(answer)
        return answer

    async def _streamed(self, content: aiohttp.StreamReader) -> GenerateAnswer:
        """Read an answer as server-sent events, pass its tokens to the watching caller, and return the whole answer.

        Raises:
            AttemptError: the engine reports an error, or ends the stream before the end of the answer.
        """
        ids, logprobs = list[int](), list[_TokenLogprob]()
        prompt_ids: list[int] | None = None
        async for data in _events(content):
            event = msgspec.json.decode(data, type=_Event)
            prompt_ids = event.prompt_token_ids or prompt_ids
            meta, reason = event.meta_info, event.meta_info.finish_reason
            if event.error is not None:
                code = event.error.code
                raise self._refused(code if isinstance(code, int) else 500, event.error.message)
            if reason is not None and (reason.status_code or 0) >= 400:
                raise self._refused(reason.status_code or 0, reason.message)
            if event.output_ids:
                self._check_prompt(prompt_ids)
            # Some engines repeat the tokens of earlier events in each event. Skip these tokens.
            known = len(ids) if meta.completion_tokens <= len(event.output_ids) else 0
            new = msgspec.structs.replace(
                event,
                output_ids=event.output_ids[known:],
                meta_info=msgspec.structs.replace(
                    meta,
                    output_token_logprobs=meta.output_token_logprobs[known:],
                    output_top_logprobs=meta.output_top_logprobs[known:],
                ),
            )
            ids += new.output_ids
            logprobs += new.meta_info.output_token_logprobs
            self._see(new)
            self._show(_num_kept(len(self._seen), self.task.sampling))
            if reason is not None:
                whole = msgspec.structs.replace(meta, output_token_logprobs=logprobs)
                return GenerateAnswer(whole, ids)
        raise self.failure("the engine ended the stream before the end of the answer")

    def _check_prompt(self, prompt_ids: Sequence[int] | None) -> None:
        """Check the token ids that an engine used for a prompt with images. A trainer computes with these token ids.

        Raises:
            AttemptError: the ids are not those that the worker's processor made, or the engine reports none.
        """
        if self._images is None:
            return
        expected = self._images.ids + self.tokens.output_ids
        if prompt_ids is None or tuple(prompt_ids) != expected:
            got = "none" if prompt_ids is None else f"{len(prompt_ids)} other tokens"
            raise self.failure(
                f"prompt_token_ids must be the {len(expected)} tokens that the model's processor made of the prompt and "
                f"its images, got {got}; the engine must serve a vision-language model, with the same files of its "
                "processor and tokenizer as the rollout worker",
                ErrorKind.REFUSED,
            )

    def _refused(self, status: int, text: str) -> AttemptError:
        """Return the error for an HTTP status that is not 200. The caller raises it."""
        refused = 400 <= status < 500 and status not in PASSING_4XX
        kind = ErrorKind.REFUSED if refused else ErrorKind.PASSING
        return self.failure(f"HTTP {status}: {text}", kind)

    def _see(self, answer: GenerateAnswer) -> None:
        """Store the tokens of a whole or partial answer, so that `_show` can pass them to the watching caller.

        Raises:
            AttemptError: the engine did not return the most probable tokens for each position.
        """
        if self._watch is None:
            return
        ids, meta, most = answer.output_ids, answer.meta_info, self._watch.num_top
        top = meta.output_top_logprobs if most else [None] * len(ids)
        if len(top) != len(ids):
            raise self.failure(
                f"top_logprobs: must be left out for this engine, got {most}; the engine returned "
                f"top_logprobs for {len(top)} of {len(ids)} tokens",
                ErrorKind.REFUSED,
            )
        for entry, others in zip(meta.output_token_logprobs, top, strict=False):
            found = tuple((each.token_id, each.logprob) for each in (others or [])[:most])
            self._seen.append(GeneratedToken(entry.token_id, entry.logprob, found))

    def _show(self, num_tokens: int) -> None:
        """Pass the first `num_tokens` tokens to the watching caller, except tokens that the caller already has."""
        if self._watch is None or num_tokens <= self._num_shown:
            return
        new = self._seen[self._num_shown : num_tokens]
        self._num_shown = num_tokens
        self._watch.on_tokens(new)

    def _request(self) -> dict[str, Any]:
        """Return the body of the next request: the prompt, the tokens so far, and the sampling parameters.

        The request's token limits count only new tokens.
        """
        task, sampling, num_done = self.task, self.task.sampling, len(self.tokens.output_ids)
        given: dict[str, Any] = {
            "stop": sampling.stop,
            "json_schema": sampling.json_schema,
            "regex": sampling.expression,
            "ebnf": sampling.ebnf,
            "logit_bias": sampling.logit_bias,
        }
        # A request that continues an answer must not repeat the random numbers of the earlier requests.
        if (seed := sampling.seeded(num_done).sampling_seed) is not None:
            given["sampling_seed"] = seed
        images = self._images
        prompt_ids = task.prompt_ids if images is None else images.short_ids
        request = {
            "rid": f"{task.task_id}-{task.attempt}-{self.num_calls}",
            "input_ids": prompt_ids + self.tokens.output_ids,
            "return_logprob": True,
            # Send values that equal our defaults too, because a server may use the defaults in the model's folder.
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens - num_done,
                "min_new_tokens": max(sampling.min_new_tokens - num_done, 0),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "presence_penalty": sampling.presence_penalty,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                **{name: value for name, value in given.items() if value not in ("", (), {})},
            },
        }
        named: dict[str, Any] = {"lora_path": sampling.adapter, "priority": sampling.priority}
        if self._watch is not None:
            named["top_logprobs_num"] = self._watch.num_top
            named["stream"] = self._watch.streams and self._is_kept
        if images is not None:
            named |= {"image_data": images.urls, "return_prompt_token_ids": True}
        return {**request, **{name: value for name, value in named.items() if value}}

    def tokens_of(self, answer: GenerateAnswer) -> Partial:
        """Return the tokens of an answer, each with its log-probability and its weight version.

        Raises:
            AttemptError: the engine's lists of tokens, log-probabilities and versions do not match.
            Reject: the prompt has images, and the answer has the token of an image. There is no image for this token. In the
                next request, the engine would put another image in its place, and so would the trainer's model.
        """
        meta, ids = answer.meta_info, tuple(answer.output_ids)
        if self._images is not None and (token_id := self._images.token_id) in ids:
            raise Reject(
                f"answer: must not have the token of an image, got token {token_id} at place {ids.index(token_id)}; to rule "
                f"it out, give SamplingParams(logit_bias={{{token_id}: -100.0}})"
            )
        logprobs = tuple(entry.logprob for entry in meta.output_token_logprobs)
        if tuple(entry.token_id for entry in meta.output_token_logprobs) != ids:
            raise self.failure(
                f"output_token_logprobs must have the same token ids as output_ids, got {len(logprobs)} entries for "
                f"{len(ids)} ids"
            )
        versions = meta.output_token_versions
        if versions is None and meta.weight_versions is not None:
            versions = self._spread(meta.weight_versions, len(ids))
        elif versions is None:
            versions = [self._weight_version(meta.weight_version)] * len(ids) if ids else []
        if len(versions) != len(ids):
            raise self.failure(
                f"output_token_versions must have {len(ids)} entries, got {len(versions)}"
            )
        return Partial(ids, logprobs, tuple(versions))

    def _spread(self, spans: Sequence[_VersionSpan], num_tokens: int) -> list[int]:
        """Return the weight versions of the output tokens, at most `num_tokens`. There are fewer if the spans end earlier.

        Raises:
            AttemptError: the first span does not start at 0; a later span does not start at the end of the previous span
                (at `num_tokens` if the previous span ends after it); or the version of a span with tokens is not an
                integer. A span that starts at `num_tokens` adds nothing.
        """
        versions: list[int] = []
        for span in spans:
            if span.start != len(versions):
                raise self.failure(f"weight_versions must be spans without gaps, got {spans}")
            version = self._weight_version(span.version) if span.end > span.start else 0
            versions += [version] * (min(span.end, num_tokens) - span.start)
        return versions

    def _weight_version(self, value: int | str | None) -> int:
        """Return the version in an engine's answer as an integer; raise `AttemptError` if it is not an integer."""
        try:
            return int(value if value is not None else "")
        except ValueError as error:
            raise self.failure(
                f"weight_version must be an integer, got {value!r}; publish a version first"
            ) from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event except the last event, `[DONE]`."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield line.removeprefix(b"data: ")


def _num_kept(num_tokens: int, sampling: SamplingParams) -> int:
    """Return the number of tokens to keep of an unfinished answer. The next request continues after these tokens.

    An engine applies a structure (such as a JSON schema) and some penalties only to the output of the current request.
    With such settings, the next request must generate the whole answer, so no token is kept. An engine does not find a
    stop text that begins in one request and ends in the next. A stop text may begin in the last tokens of the answer,
    so the next request generates these tokens again.
    """
    if sampling.needs_whole_answer:
        return 0
    # An unfinished stop text of n bytes has at most n - 1 tokens, because each token has at least one byte.
    num_again = max((len(text.encode()) for text in sampling.stop), default=1) - 1
    return max(num_tokens - num_again, 0)


def _continued(tokens: Partial, sampling: SamplingParams) -> Partial:
    """Return the first tokens of an unfinished answer; the next request continues after these tokens."""
    kept = _num_kept(len(tokens.output_ids), sampling)
    return Partial(tokens.output_ids[:kept], tokens.logprobs[:kept], tokens.versions[:kept])


def _joined(first: Partial, second: Partial) -> Partial:
    """Return the tokens of `first`, followed by the tokens of `second`."""
    if not first.output_ids:
        return second
    return Partial(
        first.output_ids + second.output_ids,
        first.logprobs + second.logprobs,
        first.versions + second.versions,
    )
