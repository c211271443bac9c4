"""A rollout worker without its process: runs attempts, keeps outcomes, answers routes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial

import aiohttp
from aiohttp import web

from windlass.errors import AuthenticationError, ConfigError, ProtocolError
from windlass.rollout._http import post, read_body, reply
from windlass.rollout.attempts import outcome_of
from windlass.rollout.connections import Lane, LaneRoutes
from windlass.rollout.messages import (
    AttemptKey,
    CancelBatch,
    CompletionAck,
    CompletionBatch,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    TasksAccepted,
    WorkerHello,
    WorkerSnapshot,
    WorkerWelcome,
)
from windlass.rollout.outbox import Outbox
from windlass.rollout.workflows import AttemptResult, Workflow, check_workflows, run_attempt

__all__ = ["WorkerRunner"]

logger = logging.getLogger(__name__)
REMEMBERED_ATTEMPTS = 1 << 16
CALL_DEADLINE_S = 10.0
MAX_BACKOFF_S = 1.0


class WorkerRunner:
    """Runs attempts of one worker incarnation; call everything in one event loop.

    Args:
        hello: identity; the controller never has more than `max_concurrent` attempts here.
        controller_url: where completions and registrations go.
        controller_session: carries the control token.
        engine_session: carries no token; no limit on connections.
        heartbeat_s: between heartbeats on the watch connection.
        controller_gone_s: `run` returns when the controller could not be reached this long.
        call_deadline_s: of a delivery; what was not acknowledged by then is sent again.
        workflows: user code by name; `hello.workflows` are its keys.
    """

    def __init__(
        self,
        hello: WorkerHello,
        controller_url: str,
        controller_session: aiohttp.ClientSession,
        engine_session: aiohttp.ClientSession,
        *,
        heartbeat_s: float = 5.0,
        controller_gone_s: float = 60.0,
        call_deadline_s: float = CALL_DEADLINE_S,
        workflows: Mapping[str, Workflow] | None = None,
    ) -> None:
        self._call_deadline_s = call_deadline_s
        self.hello = hello
        self._controller_url = controller_url
        self._controller_session = controller_session
        self._engine_session = engine_session
        self._heartbeat_s = heartbeat_s
        self._controller_gone_s = controller_gone_s
        self._workflows = check_workflows(workflows)
        self._controller = ""
        self._register_due = asyncio.Event()
        self._lane = Lane(controller_session, f"{controller_url}/v1/completions", CompletionAck)
        self._outbox = Outbox(self._deliver, self._register_due.set)
        self._running: dict[tuple[str, int], asyncio.Task[AttemptResult]] = {}
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._slots = asyncio.Semaphore(hello.max_concurrent)
        self._num_watchers = 0
        self._watch_opened = asyncio.Event()
        self._stopping = False

    # --- attempts --------------------------------------------------------------------------

    def accept(self, tasks: Iterable[RolloutTask]) -> int:
        """Start attempts that were never seen before; returns how many."""
        num_new = 0
        for task in tasks:
            key = (task.task_id, task.attempt)
            if key in self._running or key in self._ended:
                continue
            num_new += 1
            job = asyncio.create_task(self._attempt(task), name=f"attempt-{task.task_id}")
            job.add_done_callback(partial(self._ended_with, task))
            self._running[key] = job
        return num_new

    def cancel(self, keys: Iterable[AttemptKey]) -> int:
        """Cancel attempts; unknown ones are ignored. Returns how many were running."""
        jobs = [self._running.get((key.task_id, key.attempt)) for key in keys]
        return sum(job.cancel() for job in jobs if job is not None)

    def snapshot(self, since: int) -> WorkerSnapshot:
        """What is kept after `since`, and what runs."""
        return WorkerSnapshot(
            worker=self.hello.name,
            incarnation=self.hello.incarnation,
            outcomes=self._outbox.since(since),
            running=tuple(AttemptKey(*key) for key in self._running),
        )

    async def _attempt(self, task: RolloutTask) -> AttemptResult:
        async with self._slots:
            return await run_attempt(self._engine_session, task, self._workflows)

    def _ended_with(self, task: RolloutTask, job: asyncio.Task[AttemptResult]) -> None:
        """However the attempt ended, the controller hears of it, or it would wait in vain."""
        key = (task.task_id, task.attempt)
        del self._running[key]
        self._ended[key] = None
        if len(self._ended) > REMEMBERED_ATTEMPTS:
            self._ended.popitem(last=False)
        self._outbox.add(outcome_of(task, job, self.hello.name, stopping=self._stopping))

    # --- towards the controller ------------------------------------------------------------

    async def run(self) -> None:
        """Register, deliver, and register again whenever nobody watches.

        Returns when the controller could not be reached for `controller_gone_s`.

        Raises:
            AuthenticationError: the controller refuses the token.
            ConfigError: the controller refuses this worker.
        """
        delivery = asyncio.create_task(self._outbox.run(), name="rollout-outbox")
        try:
            while await self._register():
                await self._register_due.wait()
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            await self._lane.close()

    async def shut_down(self, deadline_s: float) -> None:
        """End running attempts with an error that makes the controller try them elsewhere.

        Returns once the controller has acknowledged all outcomes, or after `deadline_s`.
        """
        self._stopping = True
        jobs = list(self._running.values())
        for job in jobs:
            job.cancel()
        try:
            async with asyncio.timeout(deadline_s):
                if jobs:
                    await asyncio.wait(jobs)  # a workflow may not heed its cancellation
                await self._outbox.drained()
        except TimeoutError:
            return

    async def _register(self) -> bool:
        self._register_due.clear()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._controller_gone_s
        backoff, last_error = 0.02, "no try"
        while loop.time() < give_up_at:
            try:
                welcome = await post(
                    self._controller_session,
                    f"{self._controller_url}/v1/workers",
                    self.hello,
                    WorkerWelcome,
                    deadline_s=CALL_DEADLINE_S,
                )
                self._serve_controller(welcome.controller)
                # The controller opens the watch connection now; if it does not, it is asked again.
                async with asyncio.timeout(CALL_DEADLINE_S):
                    await self._watch_opened.wait()
            except (aiohttp.ClientError, TimeoutError, OSError, ProtocolError) as error:
                self._raise_refusal(error)
                last_error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
            else:
                return True
        logger.error("controller %s cannot be reached: %s", self._controller_url, last_error)
        return False

    def _serve_controller(self, incarnation: str) -> None:
        """Attempts of a controller process that is gone would only hold engines."""
        if self._controller not in {"", incarnation}:
            for job in self._running.values():
                job.cancel()
        self._controller = incarnation

    def _raise_refusal(self, error: Exception) -> None:
        """Answers that asking again will not change."""
        if not isinstance(error, aiohttp.ClientResponseError):
            return
        if error.status in {401, 403}:
            raise AuthenticationError(
                f"worker {self.hello.name}: {self._controller_url} refuses the token"
            ) from error
        if error.status in {400, 409}:
            raise ConfigError(
                f"worker {self.hello.name}: {self._controller_url} refuses this worker "
                f"(HTTP {error.status}; 409: another process has its name)"
            ) from error

    async def _deliver(self, outcomes: tuple[RolloutOutcome, ...]) -> CompletionAck:
        batch = CompletionBatch(self.hello.name, self.hello.incarnation, outcomes)
        return await self._lane.call(batch, deadline_s=self._call_deadline_s)

    # --- routes ----------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        """The worker's HTTP routes."""
        return [
            *LaneRoutes("/rollouts", TaskBatch, self._take_tasks, status=202).routes(),
            web.post("/cancel", self._post_cancel),
            web.get("/completions", self._get_completions),
            web.get("/health", self._get_health),
            web.get("/watch", self._get_watch),
        ]

    def _take_tasks(self, batch: TaskBatch) -> TasksAccepted:
        if self._stopping:
            raise web.HTTPServiceUnavailable(text="worker is shutting down")
        return TasksAccepted(self.hello.incarnation, self.accept(batch.tasks))

    async def _post_cancel(self, request: web.Request) -> web.Response:
        batch = await read_body(request, CancelBatch)
        return reply(TasksAccepted(self.hello.incarnation, self.cancel(batch.keys)))

    async def _get_completions(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdecimal():
            raise web.HTTPBadRequest(text=f"since must be an integer >= 0, got {since!r}")
        return reply(self.snapshot(int(since)))

    async def _get_health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "name": self.hello.name,
                "incarnation": self.hello.incarnation,
                "running": len(self._running),
                "unacknowledged": len(self._outbox.since(0)),
                "watched": self._num_watchers > 0,
            }
        )

    async def _get_watch(self, request: web.Request) -> web.StreamResponse:
        """A response that ends when this process does; a heartbeat tells a hang from a pause."""
        stream = web.StreamResponse(headers={"X-Incarnation": self.hello.incarnation})
        await stream.prepare(request)
        self._num_watchers += 1
        self._watch_opened.set()
        try:
            while True:
                await stream.write(b"\n")
                await asyncio.sleep(self._heartbeat_s)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._watch_opened.clear()
                self._register_due.set()
