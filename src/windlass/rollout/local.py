"""A worker without a process: attempts run in the controller's own event loop.

For workflows that hold what cannot be moved into another process. Code that blocks here
delays completions; a worker process keeps that apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import aiohttp

from windlass.net.access import Access, role_token
from windlass.rollout._http import authorization
from windlass.rollout.attempts import outcome_of
from windlass.rollout.links import Link, LinkOwner
from windlass.rollout.messages import RolloutOutcome, RolloutTask, WorkerHello
from windlass.rollout.workflows import AttemptResult, Workflow, run_attempt

__all__ = ["LocalLink"]

logger = logging.getLogger(__name__)
STOP_DEADLINE_S = 5.0


class LocalLink(Link):
    """Runs attempts as tasks of this loop; its outcomes need no transport.

    Args:
        hello: identity and limit; its url is empty.
        workflows: user code by name.
        owner: gets the outcomes.
        token: the owner's secret; engines are shown the one that it gives rollout clients.
    """

    def __init__(
        self, hello: WorkerHello, workflows: Mapping[str, Workflow], owner: LinkOwner, token: str
    ) -> None:
        super().__init__(hello)
        self._workflows = workflows
        self._owner = owner
        self._session = aiohttp.ClientSession(
            headers=authorization(role_token(token, Access.CLIENT) if token else ""),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._jobs: dict[tuple[str, int], asyncio.Task[AttemptResult]] = {}

    def enqueue(self, task: RolloutTask) -> None:
        """Start the attempt."""
        self.assigned[task.task_id] = task.attempt
        job = asyncio.create_task(
            run_attempt(self._session, task, self._workflows), name=f"attempt-{task.task_id}"
        )
        self._jobs[task.task_id, task.attempt] = job
        job.add_done_callback(partial(self._ended, task))

    def cancel(self, task_id: str, attempt: int) -> None:
        """Take an attempt back."""
        if self.release(task_id, attempt):
            self._jobs[task_id, attempt].cancel()

    def seen(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """Nothing is kept here, so nothing can be asked for again."""

    def stop(self) -> asyncio.Future[list[object]]:
        """Cancel what runs; the future is done when it has ended."""
        self._closed = True
        return asyncio.ensure_future(self._stop())

    async def _stop(self) -> list[object]:
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        if jobs:
            _, left = await asyncio.wait(jobs, timeout=STOP_DEADLINE_S)
            for job in left:
                logger.error("%s does not heed its cancellation", job.get_name())
        await self._session.close()
        return []

    def _ended(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        del self._jobs[task.task_id, task.attempt]
        if self._closed:
            return
        outcome = outcome_of(task, job, self.hello.name, stopping=False)
        self._owner.outcomes_arrived(self, (outcome,))
