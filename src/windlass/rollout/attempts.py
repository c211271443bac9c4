"""From the end of an attempt to its outcome; shared by worker processes and the local worker."""

from __future__ import annotations

import asyncio
import logging
import time

from windlass.net.logs import log_fields
from windlass.rollout.generate import AttemptError
from windlass.rollout.messages import OutcomeStatus, Partial, RolloutOutcome, RolloutTask
from windlass.rollout.workflows import AttemptResult, Reject, TooOld

__all__ = ["outcome_of"]

logger = logging.getLogger(__name__)


def outcome_of(
    task: RolloutTask, job: asyncio.Task[AttemptResult], worker: str, *, stopping: bool
) -> RolloutOutcome:
    """The outcome of a job that is done, however it ended; its `seq` is 0.

    Args:
        task: what ran.
        job: done.
        worker: name of the worker.
        stopping: the worker shuts down: a cancelled attempt is an error, to be tried elsewhere.
    """
    result, error = AttemptResult(), ""
    if job.cancelled():
        status = OutcomeStatus.ERROR if stopping else OutcomeStatus.CANCELLED
        error = f"worker {worker} shut down" if stopping else ""
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
            error = f"worker {worker}: {type(failure).__name__}: {failure}"
    outcome = RolloutOutcome(
        task_id=task.task_id,
        attempt=task.attempt,
        seq=0,
        status=status,
        result=result.tokens,
        engine=task.engine.name,
        worker=worker,
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
