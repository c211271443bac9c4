"""What controller and worker make of each other's memory, with one side played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeEngine, expected_tokens

from windlass.rollout import (
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
)
from windlass.rollout.messages import (
    AttemptKey,
    CancelBatch,
    CompletionBatch,
    EngineTarget,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    TasksAccepted,
    WorkerHello,
    WorkerSnapshot,
    decode,
    encode,
)
from windlass.rollout.runner import WorkerRunner, WorkerSettings

SAMPLING = SamplingParams(max_new_tokens=3)


def accepted(task_id: str, attempt: int, *, seq: int, token: int) -> RolloutOutcome:
    return RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        seq=seq,
        status=OutcomeStatus.ACCEPTED,
        result=Partial((token,), (-0.5,), (0,)),
        engine="a",
        worker="played",
        finished_at=0.0,
    )


class PlayedWorker:
    """Takes work and does nothing, except what the test says."""

    def __init__(self) -> None:
        self.tasks: asyncio.Queue[RolloutTask] = asyncio.Queue()
        self.outcomes: tuple[RolloutOutcome, ...] = ()
        self.running: tuple[AttemptKey, ...] = ()
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[AttemptKey] = asyncio.Queue()
        self.end_watch = asyncio.Event()
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/rollouts", self.post_rollouts),
                web.post("/cancel", self.post_cancel),
                web.get("/completions", self.get_completions),
                web.get("/watch", self.get_watch),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    @property
    def hello(self) -> WorkerHello:
        return WorkerHello(name="played", url=self.url, incarnation="i", max_concurrent=8)

    async def post_rollouts(self, request: web.Request) -> web.Response:
        for task in decode(await request.read(), TaskBatch).tasks:
            self.tasks.put_nowait(task)
        return web.Response(body=encode(TasksAccepted("i", 1)), status=202)

    async def post_cancel(self, request: web.Request) -> web.Response:
        for key in decode(await request.read(), CancelBatch).keys:
            self.cancelled.put_nowait(key)
        return web.Response(body=encode(TasksAccepted("i", 1)))

    async def get_completions(self, request: web.Request) -> web.Response:
        self.asked.put_nowait(request.query["since"])
        return web.Response(body=encode(WorkerSnapshot("played", "i", self.outcomes, self.running)))

    async def get_watch(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await self.end_watch.wait()
        self.end_watch.clear()
        return stream


@pytest.fixture
async def played() -> AsyncIterator[tuple[RolloutController, PlayedWorker]]:
    async with AsyncExitStack() as stack:
        worker = PlayedWorker()
        await worker.start(stack)
        engines = StaticEngines([("a", "http://127.0.0.1:9", 0)])
        controller = await stack.enter_async_context(
            RolloutController(
                engines,
                StalenessPolicy.unbounded(100),
                config=RolloutConfig(retry_backoff_s=0.001),
            )
        )
        controller.register_worker(worker.hello)
        assert await asyncio.wait_for(worker.asked.get(), 10) == "0"
        yield controller, worker


async def test_an_answer_whose_callback_never_came_is_fetched_after_a_reconnect(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await asyncio.wait_for(worker.tasks.get(), 10)
    worker.outcomes = (accepted(task.task_id, task.attempt, seq=1, token=42),)
    worker.end_watch.set()
    async with asyncio.timeout(10):
        assert (await handle).output_ids == (42,)
    assert controller.complete(CompletionBatch("played", "i", worker.outcomes)).seqs == (1,)
    stats = controller.stats()
    assert (stats.completed, stats.ignored, stats.lost) == (1, 1, 0)
    worker.asked = asyncio.Queue()
    worker.end_watch.set()
    assert await asyncio.wait_for(worker.asked.get(), 10) == "1", "only what is new is asked for"


async def test_work_that_a_worker_forgot_is_sent_again_and_work_that_it_runs_is_not(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handles = [controller.submit((index,), SAMPLING) for index in range(2)]
    kept = await asyncio.wait_for(worker.tasks.get(), 10)
    forgotten = await asyncio.wait_for(worker.tasks.get(), 10)
    worker.running = (AttemptKey(kept.task_id, kept.attempt),)
    worker.end_watch.set()
    again = await asyncio.wait_for(worker.tasks.get(), 10)
    assert (again.task_id, again.attempt) == (forgotten.task_id, 2)
    late = accepted(forgotten.task_id, 1, seq=1, token=13)
    controller.complete(CompletionBatch("played", "i", (late,)))
    assert not any(handle.done() for handle in handles), "an attempt that was replaced is not used"
    outcomes = (
        accepted(kept.task_id, 1, seq=2, token=14),
        accepted(again.task_id, 2, seq=3, token=15),
    )
    ack = controller.complete(CompletionBatch("played", "i", outcomes))
    assert (ack.seqs, ack.registered) == ((2, 3), True)
    assert sorted([(await handle).output_ids for handle in handles]) == [(14,), (15,)]
    assert worker.tasks.empty()


async def test_work_that_a_worker_forgot_is_not_counted_there_while_it_waits_for_another(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    controller.submit((1,), SAMPLING)
    task = await asyncio.wait_for(worker.tasks.get(), 10)
    controller.attempts_unknown(controller._workers["played"], [AttemptKey(task.task_id, 1)])
    stats = controller.stats()
    assert (stats.running, stats.outstanding, stats.lost) == (0, 1, 0)


async def test_what_a_worker_runs_and_nobody_wants_is_cancelled(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    """As after a restart, when the cancellation was lost with the process that asked for it."""
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await asyncio.wait_for(worker.tasks.get(), 10)
    wanted, unknown = AttemptKey(task.task_id, task.attempt), AttemptKey("of-long-ago", 3)
    worker.running = (wanted, unknown)
    worker.end_watch.set()
    assert await asyncio.wait_for(worker.cancelled.get(), 10) == unknown
    assert worker.cancelled.empty()
    outcome = accepted(task.task_id, task.attempt, seq=1, token=7)
    controller.complete(CompletionBatch("played", "i", (outcome,)))
    assert (await handle).output_ids == (7,)


async def test_completions_of_an_unknown_worker_are_acknowledged_and_it_is_told_to_register(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, _ = played
    batch = CompletionBatch("stranger", "j", (accepted("old-1", 1, seq=5, token=1),))
    ack = controller.complete(batch)
    assert (ack.seqs, ack.registered) == ((5,), False)


async def test_a_worker_runs_an_attempt_once_however_often_it_is_handed_over() -> None:
    async with (
        FakeEngine("a") as engine,
        aiohttp.ClientSession() as controller_session,
        aiohttp.ClientSession() as engine_session,
    ):
        hello = WorkerHello(name="w", url="http://w", incarnation="i", max_concurrent=4)
        settings = WorkerSettings(controller="http://127.0.0.1:9", name="w")
        runner = WorkerRunner(settings, hello, controller_session, engine_session)
        task = RolloutTask(
            task_id="t",
            attempt=1,
            prompt_ids=(3,),
            sampling=SAMPLING,
            engine=EngineTarget("a", engine.url),
            deadline_s=10.0,
        )
        engine.hold(1)
        assert (runner.accept([task]), runner.accept([task, task])) == (1, 0)
        await engine.until_held(1)
        assert runner.snapshot(0).running == (AttemptKey("t", 1),)
        await engine.release()
        job = runner._attempts.running["t", 1]
        await asyncio.wait_for(asyncio.wait({job}), 10)
        await asyncio.sleep(0)
        assert runner.accept([task]) == 0, "after its end neither"
        (outcome,) = runner.snapshot(0).outcomes
        assert outcome.result.output_ids == expected_tokens((3,), 3)
        assert runner.snapshot(1).outcomes == ()
        assert engine.num_requests == 1
