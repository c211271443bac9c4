"""Workflows: user code that calls an engine any number of times within one rollout.

A workflow is an async function that takes a `WorkflowContext`. Each worker process is started with a mapping
of names to workflows. A task that the controller sends contains the name of a workflow, never code.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from functools import partial
from typing import final

import aiohttp
import msgspec

from windlass.errors import ConfigError, RolloutError, text_of
from windlass.net.logs import TRACEBACK_EVERY_S, LineLimit, log_fields
from windlass.rollout.chat.conversations import Conversations
from windlass.rollout.chat.messages import Message as ChatMessage
from windlass.rollout.chat.messages import Template
from windlass.rollout.chat.server import ChatServer
from windlass.rollout.chat.session import Branch, ChatSession
from windlass.rollout.contained import ENDS_LOOP, contain_tasks, contained
from windlass.rollout.generate import AttemptError, AttemptResult, Reject, Watch, generate
from windlass.rollout.images import ImagePrompt, ImageSet
from windlass.rollout.messages import (
    ErrorKind,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    Turn,
    WorkerHello,
)
from windlass.rollout.tensors import IMAGES, SampleTensor, check_tensors
from windlass.rollout.text import Chat, Message, TextCodec, TextPrompts
from windlass.rollout.trajectories import increments
from windlass.rollout.values import encode_value, plain_integers, plain_numbers
from windlass.sampling import SamplingParams

logger = logging.getLogger(__name__)
SEEDS_PER_CALL = 1_000_003
"""Difference between the seeds of two engine calls of a workflow; a prime number, so that seeds of a group stay distinct."""
NO_TOKENIZER = (
    "text and messages need a worker with a tokenizer; start workers with --tokenizer FOLDER, a job with "
    "rollout.tokenizer, or a local worker with run_here(..., tokenizer=FOLDER)"
)


_KINDS = ("output", Partial), ("finish_reason", str), ("text", str), ("images", tuple)
"""Fields of a `Turn` other than `prompt_ids`, and their types."""


class TooOld(RolloutError):
    """Raised if the versions of a workflow's oldest and newest token differ by more than `max_staleness`."""


class WorkflowContext:
    """Argument of a workflow. The workflow calls the engine through this object, for one attempt of one rollout.

    All calls of an attempt go to the same engine, because that engine's prefix cache contains the attempt's earlier turns.

    Attributes:
        task_id, attempt: identity of the attempt. A tool that stores state outside the workflow must store the
            state under both values, so that two attempts do not share state.
        arguments: the submitter's arguments, as msgpack-plain values.
        sampling: the submitter's sampling parameters, for calls that pass none.
        turns: finished engine calls, in the order in which they ended. A workflow may add turns of its own.
        branches: calls of `chat` after the first one that do not continue an earlier call.
        tensors: named tensors that the workflow adds, such as routed experts; see `Rollout.tensors`. Names must not begin with
            `images.`: the tensors of images in messages have such names.
    """

    __slots__ = (
        *("_chat", "_conversations", "_images", "_made", "_num_calls", "_prompts", "_session"),
        *("_task", "_versions"),
        *("arguments", "attempt", "branches", "sampling", "task_id", "tensors", "turns"),
    )

    def __init__(
        self,
        session: aiohttp.ClientSession,
        task: RolloutTask,
        chat: ChatServer,
        prompts: TextPrompts | None,
    ) -> None:
        self._session, self._prompts = session, prompts
        self._conversations: Conversations | None = None
        self.branches: list[Branch] = []
        self._task = task
        self._chat = chat
        self._num_calls = 0
        # Versions of the oldest and of the newest token.
        self._versions: tuple[int, ...] = ()
        # `id` of a turn's prompt and `id` of its answer -> turn that `generate` made. Such a turn needs no check.
        self._made: dict[tuple[int, int], Turn] = {}
        # Key of a set of images -> the set, for all images in prompts.
        self._images: dict[str, ImageSet] = {}
        self.task_id, self.attempt, self.sampling = task.task_id, task.attempt, task.sampling
        self.arguments: object = msgspec.msgpack.decode(task.arguments)
        self.turns: list[Turn] = []
        self.tensors: dict[str, SampleTensor] = {}

    @property
    def workflow(self) -> str:
        """Name of the workflow."""
        return self._task.workflow

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        watch: Watch | None = None,
        keep_seed: bool = False,
        images: ImagePrompt | None = None,
    ) -> Turn:
        """Generate one answer, append the `Turn` to `turns`, and return it.

        The engine may update its weights during the call; each token has its own version.

        Args:
            prompt_ids: all tokens before the answer, including earlier turns.
            sampling: sampling parameters of this call; by default the submitter's.
            watch: function that gets the tokens while the engine generates them; None if it is not needed.
            keep_seed: whether the engine gets the seed of `sampling` unchanged. By default each call of the workflow gets
                another seed, because equal seeds could give equal answers.
            images: images of the prompt, whose `ids` are `prompt_ids`; `chat` and `chat_endpoint` pass those of messages. None
                if there are none.

        Raises:
            ConfigError: the prompt is empty, or has an element that is not an integer.
            Reject: the prompt has images, and the answer has the token of an image. Do not catch this error.
            RolloutError: the engine failed, or the versions of the rollout's tokens differ by more than the
                `max_staleness` of the `StalenessPolicy`. Do not catch this error in a workflow: the worker
                must report it to the controller.
        """
        tokens = plain_integers(f"workflow {self._task.workflow}: prompt_ids", prompt_ids)
        if not tokens:
            raise ConfigError(f"workflow {self._task.workflow}: prompt_ids must not be empty")
        self._num_calls += 1
        offset = 0 if keep_seed else SEEDS_PER_CALL * (self._num_calls - 1)
        call = msgspec.structs.replace(
            self._task,
            task_id=f"{self._task.task_id}.{self._num_calls}",
            prompt_ids=tokens,
            sampling=(sampling or self.sampling).seeded(offset),
        )
        answer = await generate(self._session, call, watch, images)
        keys = images.keys if images is not None else ()
        if images is not None:
            self._images.update({each.key: each for each in images.sets})
        turn = Turn(call.prompt_ids, answer.tokens, answer.finish_reason, images=keys)
        if answer.tokens.versions:
            log_fields(version=answer.tokens.versions[-1])
            self._check_age(answer.tokens.versions)
        self.turns.append(turn)
        self._made[id(turn.prompt_ids), id(turn.output)] = turn
        return turn

    def _plain_turns(self) -> tuple[Turn, ...]:
        """Return `turns`. Check the turns that the workflow has added, and convert their numbers to Python numbers.

        Raises:
            ConfigError: an entry is not a `Turn`, or has a value of a wrong type.
            ProtocolError: an entry does not have one log-probability and one version per token.
        """
        return tuple([self._plain(number, turn) for number, turn in enumerate(self.turns)])

    def _plain(self, number: int, turn: object) -> Turn:
        """Check one turn and convert its numbers. `number` is the index of the turn.

        Raises:
            ConfigError: `turn` is no `Turn`, or a field of the turn has a wrong type.
        """
        where = f"workflow {self._task.workflow}: turns[{number}]"
        if not isinstance(turn, Turn):
            raise ConfigError(f"{where} must be a Turn, got {type(turn).__name__}")
        for name, kind in _KINDS:
            if not isinstance(found := getattr(turn, name), kind):
                raise ConfigError(f"{where}: {name} must be {kind.__name__}, got {found!r}")
        if (id(turn.prompt_ids), id(turn.output)) in self._made:
            return turn
        output = Partial(
            plain_integers(f"{where}: output_ids", turn.output.output_ids),
            plain_numbers(f"{where}: logprobs", turn.output.logprobs),
            plain_integers(f"{where}: versions", turn.output.versions),
        )
        prompt_ids = plain_integers(f"{where}: prompt_ids", turn.prompt_ids)
        if unknown := [key for key in turn.images if key not in self._images]:
            raise ConfigError(
                f"{where}: images must be those of turns that `chat` has returned, got {unknown[0]!r}"
            )
        return Turn(prompt_ids, output, turn.finish_reason, turn.text, turn.images)

    def _all_tensors(self, turns: Sequence[Turn]) -> dict[str, SampleTensor]:
        """Return the tensors that the workflow has added, and those of the images in `turns`.

        Raises:
            ConfigError: a value is no tensor, or a name begins with `IMAGES`.
        """
        where = f"workflow {self._task.workflow}: "
        found = dict(check_tensors(where, self.tensors))
        if reserved := [name for name in found if name.startswith(IMAGES)]:
            raise ConfigError(
                f"{where}tensors: a name must not begin with {IMAGES!r}, got {reserved[0]!r}: such names belong to the images "
                "in messages"
            )
        for key in dict.fromkeys(key for turn in turns for key in turn.images):
            found |= self._images[key].named()
        return found

    def chat_endpoint(
        self, *, request_sampling: bool = False
    ) -> AbstractAsyncContextManager[ChatSession]:
        """Open an endpoint with OpenAI's API for an agent. The endpoint is open inside the `async with` block.

        Each answer to a request with the session's key is a turn of this attempt. If a request fails in a way that ends
        the attempt, the block is cancelled, and the `async with` raises the error.

        Args:
            request_sampling: whether requests may set seed, temperature, `top_p`, `top_k`, `min_p`, penalties and
                `logit_bias`. By default the submitter's sampling parameters apply, and requests can only shorten
                answers (`max_tokens`), add stop texts, and demand a structure or a tool call.

        Raises:
            ConfigError: this process has no tokenizer, or the endpoint's address cannot be bound.
        """
        return self._chat.session(self, request_sampling=request_sampling)

    async def offer(self, session: ChatSession) -> None:
        """Offer a session of `chat_endpoint` to agents outside this process, and wait until an agent claims it.

        Raises:
            RolloutError: JSON cannot represent the arguments of the rollout.
        """
        await self._chat.offer(session)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
            text: text to encode, for example a tool's answer that the workflow appends to the tokens.
            add_special_tokens: whether to add the tokens that the model expects around a whole text.

        Raises:
            ConfigError: the worker has no tokenizer.
        """
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises:
            ConfigError: the worker has no tokenizer.
        """
        return self._tokenizer().decode(token_ids)

    def render(
        self, messages: Sequence[Message] | Chat, *, tools: Sequence[Mapping[str, object]] = ()
    ) -> tuple[int, ...]:
        """Return the token ids of messages in the model's chat template, up to the place where the answer begins.

        Raises:
            ConfigError: the messages are invalid, the chat template refuses them, or the worker has no tokenizer.
        """
        return self._tokenizer().render(_chat(messages, tools))

    async def chat(
        self,
        messages: Sequence[Message] | Chat,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        sampling: SamplingParams | None = None,
    ) -> Turn:
        """Generate an answer to messages, and return the `Turn` with the answer's `text`.

        If the messages begin with the messages of an earlier call and its answer, the prompt begins with the tokens of
        that call. The call reuses these tokens instead of tokenising their text again, and both calls belong to one
        sample. Otherwise the call begins a branch (the first call never does). A call also begins a branch if the chat
        template now renders the earlier answer differently. `chat_endpoint` has the same rule, see `Conversations`.

        Args:
            messages: the whole conversation.
            tools: JSON schemas of tools, for the chat template.
            sampling: sampling parameters of this call; by default the submitter's.

        Raises:
            ConfigError: the messages are invalid, the chat template refuses them, the processor refuses their images, a text
                next to images has the token of an image, or the worker has no tokenizer.
            Reject, RolloutError: as for `generate`.
        """
        chat, prompts = _chat(messages, tools), self._tokenizer()
        if self._conversations is None:
            self._conversations = Conversations(prompts.codec)
        template = Template(chat.tools, chat.template_arguments)
        prompt = await self._conversations.prompt(
            [ChatMessage.of(message) for message in chat.messages], template
        )
        turn = await self.generate(prompt.ids, sampling, images=prompt.images)
        output_ids = turn.output.output_ids
        text = await asyncio.to_thread(prompts.decode, output_ids)
        with_text = msgspec.structs.replace(turn, text=text)
        # An earlier turn can be equal, so compare identities.
        place = next(n for n, each in enumerate(self.turns) if each is turn)
        self.turns[place] = with_text
        if prompt.branch:
            self.branches.append(Branch(place, prompt.branch))
        if output_ids:
            answer = ChatMessage("assistant", text)
            self._conversations.answered(prompt, template, answer, output_ids)
        return with_text

    def _tokenizer(self) -> TextPrompts:
        """Return the tokenizer of the worker; raise `ConfigError` if it has none."""
        if self._prompts is None:
            raise ConfigError(f"workflow {self._task.workflow}: {NO_TOKENIZER}")
        return self._prompts

    def _check_age(self, versions: Sequence[int]) -> None:
        """Record the versions of new tokens. Raise `TooOld` if the rollout's versions differ by more than `max_staleness`."""
        known, limit = (*self._versions, *versions), self._task.max_staleness
        oldest, newest = min(known), max(known)
        if limit is not None and newest - oldest > limit:
            raise TooOld(
                f"workflow {self._task.workflow}: weight versions of a rollout must differ by at most "
                f"max_staleness={limit}, got {oldest} to {newest}"
            )
        self._versions = oldest, newest


def _chat(messages: Sequence[Message] | Chat, tools: Sequence[Mapping[str, object]]) -> Chat:
    """Return messages and tools as a `Chat`."""
    if not isinstance(messages, Chat):
        return Chat(tuple(messages), tuple(tools))
    return msgspec.structs.replace(messages, tools=tuple(tools)) if tools else messages


Workflow = Callable[[WorkflowContext], Awaitable[object]]
"""Async function that runs one attempt: it generates through its context and returns a msgpack-plain value.

The function raises `Reject` to discard its answer. Any other exception fails the attempt, and the controller
tries the rollout again, see `RolloutConfig.max_same_errors`.
"""


def check_workflows(workflows: Mapping[str, Workflow] | None) -> dict[str, Workflow]:
    """Check the names of workflows; return a copy of the mapping.

    Raises:
        ConfigError: a name is empty.
    """
    checked = dict(workflows or {})
    if "" in checked:
        raise ConfigError("workflows: a name must not be empty, got ''")
    return checked


class _Cause(Enum):
    """Reason for the cancellation of an attempt.

    CONTROLLER: the controller cancelled the attempt, or another controller took over.
    DEADLINE: the attempt's workflow exceeded its deadline.
    SHUTDOWN: the worker is ending.
    """

    CONTROLLER = auto()
    DEADLINE = auto()
    SHUTDOWN = auto()


@final
class Attempts:
    """Attempts of one worker, in the worker's process or in the controller's event loop.

    Args:
        session: HTTP session for requests to engines, with no limit on connections.
        workflows: name -> workflow.
        hello: name of the worker, and the number of attempts that may run at a time.
        ended: called with the outcome of every attempt.
        chat: endpoint for agents.
        codec: tokenizer for text and messages; None if there is none.
        hold: async function that keeps the elements of large tensors in this process, see `TensorStore.hold`.

    Attributes:
        running: (task_id, attempt) -> asyncio task that runs the attempt.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workflows: Mapping[str, Workflow],
        hello: WorkerHello,
        ended: Callable[[RolloutOutcome], None],
        chat: ChatServer,
        codec: TextCodec | None,
        hold: Callable[[Mapping[str, SampleTensor]], Awaitable[dict[str, SampleTensor]]],
    ) -> None:
        self._chat, self._hold = chat, hold
        self.running: dict[tuple[str, int], asyncio.Task[AttemptResult]] = {}
        self._session, self._workflows = session, workflows
        self._prompts = None if codec is None else TextPrompts(codec)
        self._prompt_ids: dict[tuple[str, int], tuple[int, ...]] = {}
        self._worker = hello.name
        self._slots = asyncio.Semaphore(hello.max_concurrent)
        self._on_end = ended
        self._cancelled: dict[tuple[str, int], _Cause] = {}
        self._raised = LineLimit(TRACEBACK_EVERY_S)

    def start(self, task: RolloutTask) -> None:
        """Start an attempt that is not running yet."""
        # `asyncio.create_task` would call the loop's task factory, see `contain_tasks`. It is for tasks of workflows only.
        job = asyncio.Task(self._run(task), name=f"attempt-{task.task_id}")
        self.running[task.task_id, task.attempt] = job
        job.add_done_callback(partial(self._ended, task))

    def cancel(self, task_id: str, attempt: int) -> None:
        """Cancel an attempt if it is running."""
        self._cancel((task_id, attempt), _Cause.CONTROLLER)

    def cancel_all(self) -> None:
        """Cancel all running attempts."""
        for key in self.running:
            self._cancel(key, _Cause.CONTROLLER)

    def _cancel(self, key: tuple[str, int], cause: _Cause) -> None:
        """Cancel an attempt, but only once: a second cancellation would interrupt the workflow's clean-up."""
        if key in self.running and key not in self._cancelled:
            self._cancelled[key] = cause
            self.running[key].cancel()

    async def stop(self, deadline_s: float) -> None:
        """Cancel all running attempts, wait at most `deadline_s` until they have ended, and close the endpoint for agents.

        The outcome of each attempt is an error, so the controller tries the rollout at another worker. If an attempt has
        not ended after `deadline_s`, log its name; it stops when this process exits.
        """
        for key in self.running:
            self._cancel(key, _Cause.SHUTDOWN)
        if self.running:
            _, left = await asyncio.wait(self.running.values(), timeout=deadline_s)
            if left:
                names = ", ".join(sorted(job.get_name() for job in left))
                logger.error(
                    "%d attempts had not ended %g s after their cancellation; the worker does not wait longer: %s",
                    *(len(left), deadline_s, names),
                )
        await self._chat.close()

    async def _run(self, task: RolloutTask) -> AttemptResult:
        """Run one attempt and return its result.

        Raises:
            AttemptError: the engine failed, the deadline passed, or this worker does not know the workflow.
            Reject: the workflow discarded its answer.
            ConfigError, ProtocolError: the workflow's turns, value or tensors are invalid.
            Exception: any other exception of the workflow.
        """
        # Each attempt runs in an asyncio task of its own, so these fields appear only in log lines of this attempt.
        log_fields(task=task.task_id, attempt=task.attempt, engine=task.engine.name)
        async with self._slots:
            if task.prompt:
                return await self._answer_text(task)
            if not task.workflow:
                return await generate(self._session, task)
            workflow = self._workflows.get(task.workflow)
            if workflow is None:
                raise AttemptError(
                    f"workflow must be one of {sorted(self._workflows)}, got {task.workflow!r}",
                    Partial(),
                )
            context = WorkflowContext(self._session, task, self._chat, self._prompts)
            key = task.task_id, task.attempt
            deadline = asyncio.get_running_loop().call_later(
                task.deadline_s, self._cancel, key, _Cause.DEADLINE
            )
            try:
                value = await self._call(workflow, context)
            finally:
                deadline.cancel()
        turns = context._plain_turns()
        tensors = context._all_tensors(turns)
        return AttemptResult(
            turns=increments(turns),
            value=encode_value(f"workflow {task.workflow}: value", value),
            tensors=await self._hold(tensors) if tensors else {},
        )

    async def _answer_text(self, task: RolloutTask) -> AttemptResult:
        """Tokenise text or messages, and generate and decode the answer.

        Raises:
            AttemptError: there is no tokenizer, the tokenizer refuses the messages, or `generate` raised this error.
            Reject: `generate` raised this error.
        """
        prompts = self._prompts
        if prompts is None:
            raise AttemptError(f"prompt: {NO_TOKENIZER}", Partial(), ErrorKind.REFUSED)
        try:
            ids, images = await asyncio.to_thread(prompts.prompt, task.prompt)
        except ConfigError as error:
            raise AttemptError(str(error), Partial(), ErrorKind.REFUSED) from error
        if not task.prompt_ids:
            task = msgspec.structs.replace(task, prompt_ids=ids)
        elif images is not None and task.prompt_ids != ids:
            # The template contains the time, for example. The images belong to the new ids, so start from the prompt.
            task = msgspec.structs.replace(task, prompt_ids=ids, partial=Partial())
        self._prompt_ids[task.task_id, task.attempt] = task.prompt_ids
        answer = await generate(self._session, task, images=images)
        text = await asyncio.to_thread(prompts.decode, answer.tokens.output_ids)
        tensors = {} if images is None else await self._hold(images.sets[0].named())
        return msgspec.structs.replace(answer, text=text, tensors=tensors)

    async def _call(self, workflow: Workflow, context: WorkflowContext) -> object:
        """Run a workflow and return its value.

        Raises:
            RolloutError: the workflow raised SystemExit or KeyboardInterrupt, which would end this process, or
                raised CancelledError although the attempt was not cancelled.
            Exception: any other exception of the workflow.
        """
        contain_tasks()
        try:
            return await workflow(context)
        except ENDS_LOOP as error:
            raise contained(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RolloutError(
                "the workflow raised CancelledError, although the attempt was not cancelled"
            ) from error

    def _ended(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        """Report the outcome of an attempt whose asyncio task has ended."""
        key = task.task_id, task.attempt
        del self.running[key]
        self._on_end(self._outcome_of(task, job, self._cancelled.pop(key, None)))

    def _log_raised(self, task: RolloutTask, failure: BaseException) -> None:
        """Log the traceback of an attempt's exception, but only once per `TRACEBACK_EVERY_S` for equal exceptions."""
        if num_alike := self._raised.count_error(failure):
            more = f" ({num_alike} attempts failed in this way)" if num_alike > 1 else ""
            with log_fields(task=task.task_id, attempt=task.attempt, engine=task.engine.name):
                logger.error("attempt failed in the worker%s", more, exc_info=failure)

    def _outcome_of(
        self, task: RolloutTask, job: asyncio.Task[AttemptResult], cancelled: _Cause | None
    ) -> RolloutOutcome:
        """Return the outcome of an attempt whose asyncio task has ended, and forget its prompt ids. Log an unexpected exception.

        `cancelled` is the reason why the worker cancelled the attempt; None if it did not.
        """
        result, error, kind = AttemptResult(), "", ErrorKind.PASSING
        if job.cancelled():
            status = OutcomeStatus.ERROR
            match cancelled:
                case _Cause.SHUTDOWN:
                    error = f"worker {self._worker} shut down"
                case _Cause.DEADLINE:
                    error = f"workflow {task.workflow}: the attempt did not end within {task.deadline_s:.3f} s"
                case _:
                    status = OutcomeStatus.CANCELLED
        elif (raised := job.exception()) is None:
            status, result = OutcomeStatus.ACCEPTED, job.result()
        else:
            failure = _first(raised)
            status, error = OutcomeStatus.ERROR, text_of(failure)
            if isinstance(failure, Reject):
                status = OutcomeStatus.REJECTED
            elif isinstance(failure, TooOld):
                status = OutcomeStatus.STALE
            elif isinstance(failure, AttemptError):
                result = AttemptResult(Partial() if task.workflow else failure.partial)
                kind = failure.kind
            else:
                self._log_raised(task, raised)
                error = f"worker {self._worker}: {type(failure).__name__}: {error}"
                # If the worker cancelled the attempt, the cancellation may have caused this exception. The next attempt may
                # then succeed.
                kind = ErrorKind.RAISED if cancelled is None else ErrorKind.PASSING
        outcome = RolloutOutcome(
            task_id=task.task_id,
            attempt=task.attempt,
            status=status,
            result=result.tokens,
            engine=task.engine.name,
            worker=self._worker,
            finished_at=time.time(),
            finish_reason=result.finish_reason,
            error=error,
            error_kind=kind,
            turns=result.turns,
            value=result.value,
            prompt_ids=self._prompt_ids.pop((task.task_id, task.attempt), ()),
            text=result.text,
            tensors=result.tensors,
        )
        if logger.isEnabledFor(logging.DEBUG):
            version = max(outcome.versions(), default=None)
            with log_fields(
                task=task.task_id, attempt=task.attempt, version=version, engine=task.engine.name
            ):
                logger.debug("attempt %s %s", status.value, error)
        return outcome


def _first(raised: BaseException) -> BaseException:
    """Return the first exception of an exception group, and any other exception unchanged.

    `asyncio.TaskGroup` raises such groups. The first exception is the cause: it made the group cancel its other tasks.
    """
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    return raised
