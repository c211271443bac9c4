"""Attempts that run in this event loop, from their start to their outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import final

import aiohttp

from windlass.net.logs import log_fields
from windlass.rollout.generate import AttemptError
from windlass.rollout.messages import (
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    WorkerHello,
)
from windlass.rollout.workflows import AttemptResult, Reject, TooOld, Workflow, run_attempt

__all__ = ["Attempts"]

logger = logging.getLogger(__name__)


@final
class Attempts:
    """Those of one worker, a process of its own or the controller's event loop.

    Args:
        session: towards engines; without a limit on connections.
        workflows: user code by name.
        hello: of the worker; at most `max_concurrent` attempts run at a time.
        ended: called with the outcome of every attempt, however it ended; its `seq` is 0.

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
        self._stopping = False

    def start(self, task: RolloutTask) -> None:
        """Run an attempt that does not run yet."""
        job = asyncio.create_task(self._run(task), name=f"attempt-{task.task_id}")
        self.running[task.task_id, task.attempt] = job
        job.add_done_callback(partial(self._ended, task))

    def cancel(self, task_id: str, attempt: int) -> bool:
        """Cancel an attempt; returns whether it was running."""
        job = self.running.get((task_id, attempt))
        return job is not None and job.cancel()

    def cancel_all(self) -> None:
        """Cancel whatever runs."""
        for job in self.running.values():
            job.cancel()

    async def stop(self, deadline_s: float) -> None:
        """Cancel whatever runs, as errors that are to be tried elsewhere; return once all have ended.

        What has not ended after `deadline_s` (a workflow may not heed its cancellation) is logged.
        """
        self._stopping = True
        self.cancel_all()
        if self.running:
            _, left = await asyncio.wait(self.running.values(), timeout=deadline_s)
            for job in left:
                logger.error("%s does not heed its cancellation", job.get_name())

    async def _run(self, task: RolloutTask) -> AttemptResult:
        async with self._slots:
            return await run_attempt(self._session, task, self._workflows)

    def _ended(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        del self.running[task.task_id, task.attempt]
        self._on_end(self._outcome_of(task, job))

    def _outcome_of(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> RolloutOutcome:
        result, error = AttemptResult(), ""
        if job.cancelled():
            status = OutcomeStatus.ERROR if self._stopping else OutcomeStatus.CANCELLED
            error = f"worker {self._worker} shut down" if self._stopping else ""
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
            else:
                with log_fields(task=task.task_id, attempt=task.attempt, engine=task.engine.name):
                    logger.error("attempt failed in the worker", exc_info=failure)
                error = f"worker {self._worker}: {type(failure).__name__}: {failure}"
        outcome = RolloutOutcome(
            task_id=task.task_id,
            attempt=task.attempt,
            seq=0,
            status=status,
            result=result.tokens,
            engine=task.engine.name,
            worker=self._worker,
            finished_at=time.time(),
            finish_reason=result.finish_reason,
            error=error,
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
