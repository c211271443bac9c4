"""Workflows: user code that calls an engine any number of times within one rollout.

A workflow is an async function that takes a `WorkflowContext`. Each worker process is started with a mapping
of names to workflows. A task from the network contains only a name, never code.
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
    Turn,
    WorkerHello,
    check_value,
    plain_integers,
)
from windlass.sampling import SamplingParams

logger = logging.getLogger(__name__)
TRACEBACK_EVERY_S = 10.0


class Reject(RolloutError):
    """Raised by a workflow to discard its trajectory; the rollout is tried again."""


class TooOld(RolloutError):
    """Raised if the oldest and newest token of a workflow are too many versions apart for training."""


class WorkflowContext:
    """Object through which a workflow generates, in one attempt of one rollout.

    All its calls go to the same engine, so that each turn finds the prefix of earlier turns in that engine's
    cache.

    Attributes:
        task_id, attempt: identity of the attempt. Tools that keep state outside the workflow must use both as
            its key.
        arguments: the submitter's arguments, as msgpack-plain values.
        sampling: the submitter's sampling parameters, for calls that set none.
        turns: finished calls, in the order in which they ended.
    """

    __slots__ = (
        *("_num_calls", "_session", "_task", "_versions"),
        *("arguments", "attempt", "sampling", "task_id", "turns"),
    )

    def __init__(self, session: aiohttp.ClientSession, task: RolloutTask) -> None:
        self._session = session
        self._task = task
        self._num_calls = 0
        # Versions of the oldest and of the newest token.
        self._versions: tuple[int, ...] = ()
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
        """Return one answer of the engine, and add it to the rollout's turns. It may span weight updates.

        Args:
            prompt_ids: all tokens before the answer, including earlier turns.
            sampling: sampling parameters of this call; the submitter's if omitted.

        Raises:
            ConfigError: the prompt is empty, or not integers.
            RolloutError: the engine failed, or the versions of the tokens differ by more than the
                `max_staleness` of the `StalenessPolicy`. Do not catch it: the controller then tries the
                rollout again, or gives it up.
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
"""Async function that runs one attempt: it generates through its context and returns a msgpack-plain value.

It raises `Reject` to discard the attempt. After any other error the attempt has failed, and the controller
tries the rollout again.
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


def encode_value(what: str, value: object) -> bytes:
    """Encode a msgpack-plain value; arrays and tensors become lists, and numpy or torch scalars become numbers.

    Raises:
        ConfigError: the value is not msgpack-plain, or too large for a message.
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
    """Return a numpy or torch value as a Python value; msgspec calls this for each type that it cannot encode."""
    if isinstance(value, ArrayLike):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a number, text, bytes, a list, a map or None")


class _Cause(Enum):
    """Reason for the cancellation of an attempt."""

    CONTROLLER = auto()
    DEADLINE = auto()
    SHUTDOWN = auto()


@final
class Attempts:
    """Runs the attempts of one worker, in the worker's process or in the controller's event loop.

    `session` sends requests to engines and has no limit on connections. `ended` is called with the outcome of
    every attempt.

    Attributes:
        running: (task_id, attempt) -> the asyncio task that runs it.
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
        """Start an attempt that is not running yet."""
        job = asyncio.create_task(self._run(task), name=f"attempt-{task.task_id}")
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
        """Cancel all running attempts, and wait for their end.

        Their outcomes are errors, after which the controller tries the rollouts at other workers. An attempt
        that has not ended after `deadline_s`, because its clean-up is slow or it ignores the cancellation, is
        logged and ends with the process.
        """
        for key in self.running:
            self._cancel(key, _Cause.SHUTDOWN)
        if self.running:
            _, left = await asyncio.wait(self.running.values(), timeout=deadline_s)
            if left:
                names = ", ".join(sorted(job.get_name() for job in left))
                logger.error(
                    "%d attempts had not ended %g s after their cancellation; they are abandoned: %s",
                    *(len(left), deadline_s, names),
                )

    async def _run(self, task: RolloutTask) -> AttemptResult:
        """Run one attempt to its end.

        Raises:
            AttemptError: the engine failed, the deadline passed, or this worker does not know the workflow.
            Reject: the workflow discarded its trajectory.
            Exception: any error of the workflow.
        """
        # An attempt runs in its own task, so these log fields apply to its lines only.
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
        """Run a workflow; turn SystemExit, KeyboardInterrupt and a CancelledError that it raised into RolloutError.

        SystemExit and KeyboardInterrupt would end this process, and the CancelledError would look like a
        cancellation by the controller.

        Raises:
            RolloutError: the workflow raised one of the three, and nobody cancelled it.
        """
        try:
            return await workflow(context)
        except (SystemExit, KeyboardInterrupt) as error:
            raised = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raised = "CancelledError without being cancelled"
        raise RolloutError(f"the workflow raised {raised}")

    def _ended(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        key = task.task_id, task.attempt
        del self.running[key]
        self._on_end(self._outcome_of(task, job, self._cancelled.pop(key, None)))

    def _log_raised(self, task: RolloutTask, failure: BaseException) -> None:
        """Log the traceback of an attempt's error, but the same error only once per `TRACEBACK_EVERY_S`."""
        frames = traceback.extract_tb(failure.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if num_alike := self._raised.count(f"{type(failure).__name__} {where}"):
            more = f" ({num_alike} attempts failed in this way)" if num_alike > 1 else ""
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
                    error = f"workflow {task.workflow}: not ended within {task.deadline_s:.3f} s"
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
                # An error during a cancellation may come from the cancellation: it does not show that the
                # next attempt would fail too.
                kind = ErrorKind.RAISED if cancelled is None else ErrorKind.PASSING
        # A lone surrogate in the text cannot be encoded as UTF-8.
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
