"""Session of one agent: the requests with one key are the turns of one attempt."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import msgspec

from windlass.errors import ConfigError, RolloutError
from windlass.net.logs import log_fields
from windlass.rollout.chat.conversations import Conversations, Prompt
from windlass.rollout.chat.deltas import Choice, Delta, Showing
from windlass.rollout.chat.errors import ApiError
from windlass.rollout.chat.messages import Message, ToolCall
from windlass.rollout.chat.requests import Call, Policy
from windlass.rollout.chat.tool_calls import (
    MARKS,
    THINK,
    THOUGHT,
    parse_hermes,
    parser_of,
    split_reasoning,
)
from windlass.rollout.generate import AttemptError, GeneratedToken, Watch
from windlass.rollout.images import ImagePrompt
from windlass.rollout.messages import ErrorKind, Partial, Turn
from windlass.rollout.text import TextCodec
from windlass.sampling import SamplingParams

MAX_REQUESTS = 32
"""Largest number of requests of one session that are answered at a time."""
MAX_WAITING_REQUESTS = 1024
"""Largest number of waiting requests of one session. A request waits while `Limits.max_requests` others are answered."""
MAX_SESSION_TOKENS = 8 << 20
"""Largest number of tokens of all prompts and answers of a session. A worker can deliver the outcome of an attempt with
this number of tokens, see `worker.MAX_OUTCOME_NBYTES`."""
NUM_LAST_TOKENS = 16
"""Number of last tokens of a prompt that the session searches for the beginning of the model's reasoning."""
KEPT_ANSWERS = 64
"""Number of newest answers that a session keeps, so that a client that repeats a request gets the same answer."""


class Generator(Protocol):
    """Attempt of a rollout, see `WorkflowContext`."""

    @property
    def task_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def arguments(self) -> object: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def turns(self) -> list[Turn]: ...

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        watch: Watch | None = None,
        keep_seed: bool = False,
        images: ImagePrompt | None = None,
    ) -> Turn:
        """Generate one answer; see `WorkflowContext.generate`."""
        ...


class Reply(Protocol):
    """Answer in the form of one of the APIs."""

    def body(self) -> Mapping[str, Any]:
        """Return the answer as one object."""
        ...

    def events(self) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        ...


@final
class _Watched:
    """Tokens of one answer while the engine generates it."""

    def __init__(self, showing: Showing) -> None:
        self.showing = showing
        self.tokens: list[GeneratedToken] = []
        self._has_new = asyncio.Event()

    def watch(self, call: Call, *, streams: bool) -> Watch | None:
        """Return the `Watch` for the engine call; None if the agent needs neither a stream nor log-probabilities."""
        if not streams and not call.logprobs:
            return None
        return Watch(self._add, streams, call.num_top)

    def _add(self, new: Sequence[GeneratedToken]) -> None:
        """Keep new tokens, and wake `show`."""
        self.tokens += new
        self._has_new.set()

    async def show(self, generating: asyncio.Task[Turn], on_delta: Callable[[Delta], None]) -> None:
        """Call `on_delta` with each new part until the generation has ended."""
        generating.add_done_callback(lambda _: self._has_new.set())
        num_shown = 0
        while not generating.done():
            await self._has_new.wait()
            self._has_new.clear()
            if new := self.tokens[num_shown:]:
                num_shown += len(new)
                # Decode in a thread: another thread may hold the tokenizer's lock for a long prompt.
                if (delta := await asyncio.to_thread(self.showing.more, new)) is not None:
                    on_delta(delta)


@dataclass(frozen=True, slots=True)
class Branch:
    """Turn that does not continue an earlier turn of the session.

    Attributes:
        turn: index of the turn in the turns of the attempt.
        reason: reason why the turn does not continue an earlier turn.
    """

    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a session.

    Attributes:
        max_context: number of tokens of prompt and answer together that the engine accepts; 0 if unknown.
        max_requests: largest number of requests that are answered at a time; further requests wait.
    """

    max_context: int = 0
    max_requests: int = MAX_REQUESTS


@final
@dataclass(eq=False, slots=True)
class Making:
    """Reply that a task makes for one request, and for repetitions of this request.

    Attributes:
        job: the task.
        num_waiting: number of requests that wait for the task now.
    """

    job: asyncio.Task[Reply]
    num_waiting: int = 0


@final
class ChatSession:
    """Session of one attempt. A workflow gets it from `WorkflowContext.chat_endpoint`.

    Attributes:
        base_url: base URL of the endpoint, for `OPENAI_BASE_URL`.
        api_key: key of this session, for `OPENAI_API_KEY`. The endpoint refuses it after the session.
        session_id: public part of the key.
        reward: number that the agent or `set_reward` has set; None before.
        metadata: value that came with the reward.
        task_id, attempt, arguments: see `WorkflowContext`.
    """

    def __init__(
        self,
        context: Generator,
        base_url: str,
        text: TextCodec,
        tool_format: str,
        *,
        request_sampling: bool,
        limits: Limits,
    ) -> None:
        self.session_id = secrets.token_hex(8)
        self.api_key = f"sk-windlass-{self.session_id}-{secrets.token_hex(32)}"
        self.base_url = base_url
        self.task_id, self.attempt = context.task_id, context.attempt
        self.arguments = context.arguments
        self.reward: float | None = None
        self.metadata: object = None
        self.policy = Policy(context.sampling, request_sampling)
        self.responses: dict[str, tuple[Message, ...]] = {}
        self._replies: OrderedDict[bytes, Making] = OrderedDict()
        self._making: dict[bytes, list[Making]] = {}
        self._num_unanswered: Counter[bytes] = Counter()
        self._context, self._text, self._limits = context, text, limits
        self._parser, self._marks = parser_of(tool_format), MARKS[tool_format]
        self._conversations = Conversations(text)
        self._num_tokens = 0
        self._branches: list[tuple[Turn, str]] = []
        """Turns that begin a branch, with the reason."""
        self._num_requests = 0
        self._slots = asyncio.Semaphore(limits.max_requests)
        self._jobs: set[asyncio.Task[list[Choice]]] = set()
        self._rewarded = asyncio.Event()
        self._guard = asyncio.timeout(None)
        self._idle: asyncio.Timeout | None = None
        self._idle_s = 0.0
        self._failure: RolloutError | None = None
        self.is_open = False

    @property
    def branches(self) -> list[Branch]:
        """Turns of the attempt that do not continue an earlier turn, in the order of the turns."""
        # Look the places up now: requests can overlap, and a request that fails removes its turns.
        reasons = {id(turn): reason for turn, reason in self._branches}
        turns = enumerate(self._context.turns)
        return [Branch(place, reasons[id(turn)]) for place, turn in turns if id(turn) in reasons]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that clients of OpenAI read, for a process that the workflow starts."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    def is_key(self, key: str) -> bool:
        """Return whether `key` is the key of this session, in constant time."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self.api_key.encode())

    def set_reward(self, reward: float, metadata: object = None) -> None:
        """Set the reward and close the session: running requests are cancelled, and later requests are refused.

        Wake the workflow that waits in `wait_for_reward`.

        Raises:
            ConfigError: the session already has another reward or other metadata.
        """
        if self.reward is not None and (self.reward, self.metadata) != (reward, metadata):
            other = "other metadata" if reward == self.reward else f"reward {reward}"
            raise ConfigError(
                f"reward: must not change after it is set, got {other} after reward {self.reward}"
            )
        self.reward, self.metadata = reward, metadata
        self._close()
        self._rewarded.set()

    async def wait_for_reward(self, *, idle_s: float) -> float:
        """Wait until the agent sets the reward, and return the reward.

        Args:
            idle_s: seconds without a request after which the agent counts as lost.

        Raises:
            AttemptError: the agent sent no request for `idle_s`.
            RolloutError: the session ended without a reward.
        """
        self._idle_s = idle_s
        try:
            async with asyncio.timeout(None if self._num_requests else idle_s) as self._idle:
                await self._rewarded.wait()
        except TimeoutError as error:
            raise AttemptError(f"agent lost: no request within {idle_s:g} s", Partial()) from error
        finally:
            self._idle = None
        if self.reward is None:
            raise RolloutError("wait_for_reward: the session ended without a reward")
        return self.reward

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ChatSession]:
        """Keep the session open during a `with` block of the workflow.

        Raises:
            RolloutError: a request failed in a way that ends the attempt. The block is cancelled. The `with` statement then
                raises this error, even if the block ends before the cancellation reaches it, or if its clean-up raises
                another error.
        """
        self.is_open = True
        try:
            async with self._guard:
                yield self
        except Exception:
            if self._failure is None:
                raise
        finally:
            self._close()
            if self._jobs:
                await asyncio.wait(self._jobs)
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        """Refuse later requests, and cancel running requests."""
        self.is_open = False
        for job in self._jobs:
            _cancel(job)

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Count a request of the agent during a `with` block. Log lines of the block have the task id and the attempt.

        The block begins when fewer than `Limits.max_requests` other requests are being answered. The end of the last
        running request starts the time after which the agent counts as lost (`idle_s` of `wait_for_reward`).

        Raises:
            ApiError: too many requests wait, the session has ended, or the agent counts as lost.
        """
        if self._idle is not None and self._idle.expired():
            raise session_ended(f"the agent sent no request within {self._idle_s:g} s")
        most = self._limits.max_requests + MAX_WAITING_REQUESTS
        if self._num_requests >= most:
            text = f"a session may have at most {most} concurrent requests"
            raise ApiError(429, text, "rate_limit_exceeded")
        self._num_requests += 1
        if self._idle is not None:
            self._idle.reschedule(None)
        try:
            with log_fields(task=self.task_id, attempt=self.attempt):
                async with self._slots:
                    self.check_open()
                    yield
        finally:
            self._num_requests -= 1
            if self._idle is not None and not self._num_requests and not self._idle.expired():
                self._idle.reschedule(asyncio.get_running_loop().time() + self._idle_s)

    async def answer(
        self, call: Call, on_delta: Callable[[Delta], None] | None = None
    ) -> list[Choice]:
        """Generate the answers of a request, and return them in order. Each answer is a turn of the attempt.

        Record the answers, so that later prompts can continue them, and count their tokens.
        A cancelled request leaves no turn, because the agent has not seen its whole answer.

        Args:
            call: request.
            on_delta: function that gets the parts of the answers while the engine generates them, and the last part of
                each answer after its turn is recorded; None if the agent wants whole answers.

        Raises:
            ApiError: the engine refuses the request; the attempt has failed; the session has ended; this request would
                exceed the session's limit of tokens; or the prompt is longer than the engine's context.
            ConfigError: the chat template refuses the messages.
        """
        job = asyncio.create_task(self._answer(call, on_delta))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            await asyncio.wait({job})
            if job.cancelled():
                raise session_ended()
            return job.result()
        finally:
            _cancel(job)

    async def _answer(self, call: Call, on_delta: Callable[[Delta], None] | None) -> list[Choice]:
        """Generate and record the answers. If an answer fails, remove the turns of all answers.

        If the engine refuses the request, the attempt continues. Every other `RolloutError` ends the attempt. For the
        errors, see `answer`.
        """
        prompt = await self._prompt(call)
        sampling = self._within_context(call.sampling, len(prompt.ids))
        num_new = call.num_choices * (len(prompt.ids) + sampling.max_new_tokens)
        if self._num_tokens + num_new > MAX_SESSION_TOKENS:
            text = (
                f"a session may have at most {MAX_SESSION_TOKENS} tokens in all prompts and answers; it has "
                f"{self._num_tokens} (with those of running requests), and this request may add {num_new}"
            )
            raise ApiError(400, text, "session_full")
        # Count the tokens that this request may add, because other requests may begin before it ends.
        self._num_tokens += num_new
        try:
            return await self._answer_prompt(call, prompt, sampling, on_delta)
        finally:
            self._num_tokens -= num_new

    async def _answer_prompt(
        self,
        call: Call,
        prompt: Prompt,
        sampling: SamplingParams,
        on_delta: Callable[[Delta], None] | None,
    ) -> list[Choice]:
        """Generate and record the answers to a prompt, and count their tokens. For the errors, see `answer`."""
        is_open = await asyncio.to_thread(self._opens_reasoning, prompt)
        watched = [
            _Watched(Showing(self._text, call, index, self._marks, is_open=is_open))
            for index in range(call.num_choices)
        ]
        jobs = [
            asyncio.create_task(
                self._context.generate(
                    prompt.ids,
                    sampling.seeded(index) if call.keep_seed else sampling,
                    watch=each.watch(call, streams=on_delta is not None),
                    keep_seed=call.keep_seed,
                    images=prompt.images,
                )
            )
            for index, each in enumerate(watched)
        ]
        shows = [
            asyncio.create_task(each.show(job, on_delta))
            for each, job in zip(watched, jobs, strict=True)
            if on_delta is not None
        ]
        try:
            turns = await asyncio.gather(*jobs)
            await asyncio.gather(*shows)
            # Decode in a thread: another thread may hold the tokenizer's lock for a long prompt.
            found = [
                await asyncio.to_thread(self._choice, call, turn, each, is_open=is_open)
                for turn, each in zip(turns, watched, strict=True)
            ]
            self.check_open()
        except BaseException as error:
            for job in (*jobs, *shows):
                job.cancel()
            for ended in await asyncio.gather(*jobs, *shows, return_exceptions=True):
                if isinstance(ended, Turn):
                    # No agent has seen this answer.
                    self._replace(ended)
            if isinstance(error, AttemptError) and error.kind is ErrorKind.REFUSED:
                raise ApiError(400, str(error), "engine_refused") from error
            if isinstance(error, RolloutError):
                raise self._failed(error) from error
            raise
        self._num_tokens += sum(len(t.prompt_ids) + len(t.output.output_ids) for t in turns)
        for choice, each in zip(found, watched, strict=True):
            self._record(call, prompt, choice)
            if on_delta is not None:
                on_delta(each.showing.rest(choice))
        return found

    def _opens_reasoning(self, prompt: Prompt) -> bool:
        """Return whether a prompt ends with the beginning of the model's reasoning."""
        return self._text.decode(prompt.ids[-NUM_LAST_TOKENS:]).rstrip().endswith(THINK)

    def _record(self, call: Call, prompt: Prompt, choice: Choice) -> None:
        """Add the text of an answer to its turn, and record the answer, so that later prompts can continue it."""
        ids, text = choice.turn.output.output_ids, choice.whole_text
        with_text = msgspec.structs.replace(choice.turn, text=text)
        self._replace(choice.turn, with_text)
        if prompt.branch:
            self._branches.append((with_text, prompt.branch))
        if isinstance(call.prompt, str):
            # `text` includes the stop text, because the engine generated it. A later prompt continues the answer only
            # if the agent keeps the stop text in it. Do not record an answer that has only special tokens: its text is
            # empty, so a repetition of the same prompt would seem to continue the answer.
            if text:
                self._conversations.text_answered(call.prompt + text, prompt, ids)
        elif call.prompt is None:
            self._conversations.answered(prompt, call.template, choice.message, ids)

    def check_open(self) -> None:
        """Raise `ApiError` if the session has ended."""
        if not self.is_open:
            raise session_ended()

    def _replace(self, turn: Turn, *new: Turn) -> None:
        """Replace a turn of the attempt by `new`; without `new`, remove the turn."""
        turns = self._context.turns
        for index, known in enumerate(turns):
            if known is turn:
                turns[index : index + 1] = new
                return

    async def _prompt(self, call: Call) -> Prompt:
        """Return the prompt of a request that has token ids, text or messages."""
        if isinstance(call.prompt, tuple):
            return Prompt(call.prompt)
        if isinstance(call.prompt, str):
            return await self._conversations.text_prompt(
                call.prompt, add_special_tokens=call.add_special_tokens
            )
        return await self._conversations.prompt(call.messages, call.template)

    def _within_context(self, sampling: SamplingParams, num_tokens: int) -> SamplingParams:
        """Return `sampling`, and reduce its limit of new tokens if the engine's context has room for fewer.

        Raise `ApiError` if the context has no room for a new token after a prompt of `num_tokens`.
        """
        limit = self._limits.max_context
        if not limit:
            return sampling
        room = limit - num_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the engine's context has {limit} tokens, and the prompt has {num_tokens}",
                "context_length_exceeded",
            )
        most = min(sampling.max_new_tokens, room)
        least = min(sampling.min_new_tokens, most)
        return msgspec.structs.replace(sampling, max_new_tokens=most, min_new_tokens=least)

    def _failed(self, error: RolloutError) -> ApiError:
        """End the attempt: `running` then raises `error` in the workflow. Return an HTTP error for the agent.

        If the session has ended already, the error does not end the attempt.
        """
        if self._failure is None:
            if not self.is_open:
                return session_ended()
            self._failure = error
            self.is_open = False
            self._guard.reschedule(asyncio.get_running_loop().time())
        return ApiError(503, f"the rollout's attempt has failed: {error}", "attempt_failed")

    def _choice(self, call: Call, turn: Turn, watched: _Watched, *, is_open: bool) -> Choice:
        """Decode an answer, cut it before the first stop text, and separate its reasoning and its tool calls."""
        ids = turn.output.output_ids
        text = whole = self._text.decode(ids)
        if turn.finish_reason == "stop":
            at = [text.find(stop) for stop in call.sampling.stop if stop in text]
            text = text[: min(at, default=len(text))]
        tokens = watched.showing.tokens_of(watched.tokens) if call.logprobs else ()
        finish = "length" if turn.finish_reason == "length" else "stop"
        if call.prompt is not None:
            return Choice(turn, whole, text, Message("assistant", text), finish, tokens)
        if call.sampling.has_structure and THOUGHT not in text:
            # With guided decoding, the engine generates no reasoning, even if the prompt ends with `<think>`.
            is_open = False
        reasoning, content = split_reasoning(text, is_open=is_open)
        calls: list[ToolCall] = []
        if call.forced:
            content, calls = parse_hermes(f"<tool_call>{content}</tool_call>")
        elif call.parses_tools:
            content, calls = self._parser(content)
        if not call.parallel_calls:
            del calls[1:]
        message = Message("assistant", content.strip(), reasoning, tuple(calls))
        if calls and finish == "stop":
            finish = "tool_calls"
        return Choice(turn, whole, text, message, finish, tokens)

    def make_reply(self, key: bytes, reply: Coroutine[None, None, Reply]) -> Making:
        """Start a task that makes the reply to a request. Every request for this reply then calls `wait_for_reply`."""
        making = Making(asyncio.create_task(reply))
        self._making.setdefault(key, []).append(making)
        making.job.add_done_callback(partial(self._made, key, making))
        return making

    def _made(self, key: bytes, making: Making, job: asyncio.Task[Reply]) -> None:
        """Keep the newest `KEPT_ANSWERS` replies, so that a client that repeats a request gets the same reply."""
        self._forget(key, making)
        if job.cancelled() or job.exception() is not None:
            return
        self._replies[key] = making
        if len(self._replies) > KEPT_ANSWERS:
            self._replies.popitem(last=False)

    def _forget(self, key: bytes, making: Making) -> None:
        """Let later requests not join `making`. Idempotent."""
        if making in (running := self._making.get(key, [])):
            running.remove(making)
            if not running:
                del self._making[key]

    async def wait_for_reply(self, key: bytes, making: Making) -> Reply:
        """Wait for a reply that the session makes or has made.

        If this call is cancelled and no other request waits for the reply, cancel the task that makes the reply.

        Raises:
            ApiError, ConfigError: see `answer`.
        """
        making.num_waiting += 1
        try:
            await asyncio.wait({making.job})
        except asyncio.CancelledError:
            if making.num_waiting == 1 and making.job.cancel():
                self._forget(key, making)
                self._num_unanswered[key] += 1
            raise
        finally:
            making.num_waiting -= 1
        if making.job.cancelled():
            raise session_ended()
        return making.job.result()

    def find_reply(self, key: bytes) -> Making | None:
        """Return the reply to an earlier request with this key, also if it is still being made; None if there is none.

        A client repeats a request with the same key if it did not get the reply, for example after its own timeout. The
        connection of the earlier request may then still seem to be open.

        If several requests with this key are running, return the oldest of those for which the fewest clients wait. For
        each cancelled request with this key, return no kept reply once: equal requests have equal keys, so a kept reply
        may belong to another request.
        """
        if running := self._making.get(key):
            return min(running, key=lambda making: making.num_waiting)
        if self._num_unanswered[key]:
            self._num_unanswered[key] -= 1
            return None
        return self._replies.get(key)

    def result(self) -> Mapping[str, object]:
        """Return reward, metadata and branches as a msgpack-plain value, for a workflow to return."""
        branches = [{"turn": each.turn, "reason": each.reason} for each in self.branches]
        return {"reward": self.reward, "metadata": self.metadata, "branches": branches}


def _cancel(job: asyncio.Task[list[Choice]]) -> None:
    """Cancel the job of a request, but only once: a second cancellation would interrupt the removal of its turns."""
    if not job.cancelling():
        job.cancel()


def session_ended(reason: str = "") -> ApiError:
    """Return the error for a request to a session that has ended, with the reason if it is known."""
    text = f"the session has ended: {reason}" if reason else ""
    return ApiError(401, text or "the key is unknown, or its session has ended", "invalid_api_key")
