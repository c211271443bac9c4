"""Workflows: user code that calls an engine as often as it likes within one rollout.

A workflow is an async function of one `WorkflowContext`. Whoever starts a worker process
names the functions in a mapping; a task from the network only picks a key of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import final

import aiohttp
import msgspec

from windlass.errors import ConfigError, ProtocolError, RolloutError
from windlass.net.logs import LineLimit, log_fields
from windlass.rollout.generate import AttemptError, AttemptResult, generate
from windlass.rollout.messages import (
    ArrayLike,
    ErrorKind,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    SamplingParams,
    Turn,
    WorkerHello,
    check_value,
    plain_integers,
)

logger = logging.getLogger(__name__)
TRACEBACK_EVERY_S = 10.0


class Reject(RolloutError):
    """Raised by a workflow whose trajectory must not be used; the rollout is tried again."""


class TooOld(RolloutError):
    """The tokens of a workflow's turns are too many versions apart to be trained on."""


class WorkflowContext:
    """What a workflow holds while one attempt of it runs.

    All calls go to the one engine of the attempt, so that each turn finds the prefix of the
    turns before it in that engine's cache.

    Attributes:
        task_id, attempt: identity; state that tools keep outside must be keyed by both.
        arguments: what the submitter gave, as msgpack-plain values.
        sampling: the submitter's; used when a call names no other.
        turns: calls that have ended, in order of their end.
    """

    __slots__ = (
        *("_num_calls", "_session", "_task", "_versions"),
        *("arguments", "attempt", "sampling", "task_id", "turns"),
    )

    def __init__(self, session: aiohttp.ClientSession, task: RolloutTask) -> None:
        self._session = session
        self._task = task
        self._num_calls = 0
        self._versions: tuple[int, ...] = ()  # of the oldest and of the newest token
        self.task_id, self.attempt, self.sampling = task.task_id, task.attempt, task.sampling
        self.arguments: object = msgspec.msgpack.decode(task.arguments)
        self.turns: list[Turn] = []

    @property
    def workflow(self) -> str:
        """Name of the workflow."""
        return self._task.workflow

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None
    ) -> Turn:
        """One answer of the engine, across weight updates; it becomes a turn of the rollout.

        Args:
            prompt_ids: everything before the answer, earlier turns included.
            sampling: of this call; the submitter's when omitted.

        Raises:
            ConfigError: a prompt that is empty, or no integers.
            RolloutError: the engine failed, or the turns are too many versions apart for
                `StalenessPolicy`. Let it pass, and the rollout is tried again, or given up.
        """
        tokens = plain_integers(f"workflow {self._task.workflow}: prompt_ids", prompt_ids)
        if not tokens:
            raise ConfigError(f"workflow {self._task.workflow}: prompt_ids must not be empty")
        self._num_calls += 1
        call = msgspec.structs.replace(
            self._task,
            task_id=f"{self._task.task_id}.{self._num_calls}",
            prompt_ids=tokens,
            sampling=sampling or self.sampling,
        )
        answer = await generate(self._session, call)
        turn = Turn(call.prompt_ids, answer.tokens, answer.finish_reason)
        self.turns.append(turn)
        if answer.tokens.versions:
            log_fields(version=answer.tokens.versions[-1])
            self._check_age(answer.tokens.versions)
        return turn

    def _check_age(self, versions: Sequence[int]) -> None:
        known, limit = (*self._versions, *versions), self._task.max_staleness
        oldest, newest = self._versions = min(known), max(known)
        if limit is not None and newest - oldest > limit:
            raise TooOld(
                f"workflow {self._task.workflow}: versions {oldest} to {newest} in one rollout "
                f"(max_staleness={limit})"
            )


Workflow = Callable[[WorkflowContext], Awaitable[object]]
"""One attempt of one rollout: generates through its context and returns a msgpack-plain value.

It raises `Reject` for an attempt that must not count; any other error fails the attempt, which is tried again.
"""


def check_workflows(workflows: Mapping[str, Workflow] | None) -> dict[str, Workflow]:
    """A copy of the mapping.

    Raises:
        ConfigError: a name is empty.
    """
    checked = dict(workflows or {})
    if "" in checked:
        raise ConfigError("workflows: a name must not be empty, got ''")
    return checked


def encode_value(what: str, value: object) -> bytes:
    """Return a msgpack-plain value as bytes; arrays and tensors become lists, and their scalars numbers.

    Raises:
        ConfigError: not such a value, or too large for a message.
    """
    try:
        encoded = msgspec.msgpack.encode(value, enc_hook=_plain_value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{what}: must be msgpack-plain, got {type(value).__name__}: {error}"
        ) from error
    try:
        check_value(what, encoded)
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    return encoded


def _plain_value(value: object) -> object:
    """Return a value of numpy or torch as Python's; msgspec asks for what it cannot encode."""
    if isinstance(value, ArrayLike):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of numbers, text, bytes, lists, maps and None")


class _Cause(Enum):
    """Why an attempt was cancelled."""

    CONTROLLER = auto()
    DEADLINE = auto()
    SHUTDOWN = auto()


@final
class Attempts:
    """Attempts of one worker, a process of its own or the controller's event loop.

    `session` has no limit on connections; `ended` is called with the outcome of every attempt, however it
    ended.

    Attributes:
        running: (task_id, attempt) -> the task that runs it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workflows: Mapping[str, Workflow],
        hello: WorkerHello,
        ended: Callable[[RolloutOutcome], None],
    ) -> None:
        self.running: dict[tuple[str, int], asyncio.Task[AttemptResult]] = {}
        self._session, self._workflows = session, workflows
        self._worker = hello.name
        self._slots = asyncio.Semaphore(hello.max_concurrent)
        self._on_end = ended
        self._cancelled: dict[tuple[str, int], _Cause] = {}
        self._raised = LineLimit(TRACEBACK_EVERY_S)

    def start(self, task: RolloutTask) -> None:
        """Run an attempt that does not run yet."""
        job = asyncio.create_task(self._run(task), name=f"attempt-{task.task_id}")
        self.running[task.task_id, task.attempt] = job
        job.add_done_callback(partial(self._ended, task))

    def cancel(self, task_id: str, attempt: int) -> None:
        """Cancel an attempt, if it runs."""
        self._cancel((task_id, attempt), _Cause.CONTROLLER)

    def cancel_all(self) -> None:
        """Cancel whatever runs."""
        for key in self.running:
            self._cancel(key, _Cause.CONTROLLER)

    def _cancel(self, key: tuple[str, int], cause: _Cause) -> None:
        """Cancel an attempt once: a second time would cut off the clean-up that the first one began."""
        if key in self.running and key not in self._cancelled:
            self._cancelled[key] = cause
            self.running[key].cancel()

    async def stop(self, deadline_s: float) -> None:
        """Cancel whatever runs, as errors that are to be tried again; return once all have ended.

        What has not ended after `deadline_s` (it cleans up, or does not heed its cancellation) is cut off
        with the process, and logged.
        """
        for key in self.running:
            self._cancel(key, _Cause.SHUTDOWN)
        if self.running:
            _, left = await asyncio.wait(self.running.values(), timeout=deadline_s)
            if left:
                names = ", ".join(sorted(job.get_name() for job in left))
                logger.error(
                    "%d attempts had not ended %g s after their cancellation and are cut off: %s",
                    *(len(left), deadline_s, names),
                )

    async def _run(self, task: RolloutTask) -> AttemptResult:
        """Run one attempt to its end.

        Raises:
            AttemptError: the engine failed, the deadline passed, or the workflow is unknown here.
            Reject: the workflow does not want its trajectory used.
            Exception: whatever the workflow raises.
        """
        # An attempt is a task of its own, so that the fields are of nobody else's lines.
        log_fields(task=task.task_id, attempt=task.attempt, engine=task.engine.name)
        async with self._slots:
            if not task.workflow:
                return await generate(self._session, task)
            workflow = self._workflows.get(task.workflow)
            if workflow is None:
                raise AttemptError(
                    f"workflow must be one of {sorted(self._workflows)}, got {task.workflow!r}",
                    Partial(),
                )
            context = WorkflowContext(self._session, task)
            key = task.task_id, task.attempt
            deadline = asyncio.get_running_loop().call_later(
                task.deadline_s, self._cancel, key, _Cause.DEADLINE
            )
            try:
                value = await self._call(workflow, context)
            finally:
                deadline.cancel()
        return AttemptResult(
            turns=tuple(context.turns),
            value=encode_value(f"workflow {task.workflow}: value", value),
        )

    async def _call(self, workflow: Workflow, context: WorkflowContext) -> object:
        """Run a workflow; what would end this process, or look like a cancellation by the controller, is its error.

        Raises:
            RolloutError: the workflow raised SystemExit, KeyboardInterrupt or CancelledError by itself.
        """
        try:
            return await workflow(context)
        except (SystemExit, KeyboardInterrupt) as error:
            raised = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raised = "CancelledError, and nothing had cancelled it"
        raise RolloutError(f"the workflow raised {raised}")

    def _ended(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        key = task.task_id, task.attempt
        del self.running[key]
        self._on_end(self._outcome_of(task, job, self._cancelled.pop(key, None)))

    def _log_raised(self, task: RolloutTask, failure: BaseException) -> None:
        """Write the traceback of what an attempt raised, unless one like it was written just now."""
        frames = traceback.extract_tb(failure.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if num_alike := self._raised.count(f"{type(failure).__name__} {where}"):
            more = f" ({num_alike} attempts failed so)" if num_alike > 1 else ""
            with log_fields(task=task.task_id, attempt=task.attempt, engine=task.engine.name):
                logger.error("attempt failed in the worker%s", more, exc_info=failure)

    def _outcome_of(
        self, task: RolloutTask, job: asyncio.Task[AttemptResult], cancelled: _Cause | None
    ) -> RolloutOutcome:
        result, error, kind = AttemptResult(), "", ErrorKind.PASSING
        if job.cancelled():
            status = OutcomeStatus.ERROR
            match cancelled:
                case _Cause.SHUTDOWN:
                    error = f"worker {self._worker} shut down"
                case _Cause.DEADLINE:
                    error = f"workflow {task.workflow}: no end within {task.deadline_s:.3f} s"
                case _:
                    status = OutcomeStatus.CANCELLED
        elif (failure := job.exception()) is None:
            status, result = OutcomeStatus.ACCEPTED, job.result()
        elif isinstance(failure, Reject):
            status, error = OutcomeStatus.REJECTED, str(failure)
        elif isinstance(failure, TooOld):
            status, error = OutcomeStatus.STALE, str(failure)
        else:
            status, error = OutcomeStatus.ERROR, str(failure)
            if isinstance(failure, AttemptError):
                result = AttemptResult(Partial() if task.workflow else failure.partial)
                kind = failure.kind
            else:
                self._log_raised(task, failure)
                error = f"worker {self._worker}: {type(failure).__name__}: {failure}"
                # What a workflow raises while it is cancelled says nothing of another attempt.
                kind = ErrorKind.RAISED if cancelled is None else ErrorKind.PASSING
        # Half a surrogate pair cannot be sent.
        error = error.encode("utf-8", "replace").decode()
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
        )
        if logger.isEnabledFor(logging.DEBUG):
            version = max(outcome.versions(), default=None)
            with log_fields(
                task=task.task_id, attempt=task.attempt, version=version, engine=task.engine.name
            ):
                logger.debug("attempt %s %s", status.value, error)
        return outcome
