"""Controller and worker compare their state after a reconnect. The test plays one side."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest
from aiohttp import web
from fake_engine import FakeEngine, expected_tokens

from windlass.errors import RolloutError
from windlass.layout.dtypes import DType
from windlass.net.messages import PROTOCOL_VERSION, encode
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)
from windlass.rollout.journal import RolloutJournal
from windlass.rollout.messages import (
    CONTROLLER_FRAMES,
    MAX_UNSAID,
    WORKER_FRAMES,
    AttemptKey,
    CompletionBatch,
    EngineTarget,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    WorkerHello,
    WorkerWelcome,
)
from windlass.rollout.pool import WorkerPool
from windlass.rollout.tensors import HeldTensor, SampleTensor
from windlass.rollout.worker import RolloutWorker, WorkerSettings

SAMPLING = SamplingParams(max_new_tokens=3)
TOKEN = "a-token"
WITHIN_S = 20.0


def accepted(task_id: str, attempt: int, *, token: int) -> RolloutOutcome:
    return RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        status=OutcomeStatus.ACCEPTED,
        result=Partial((token,), (-0.5,), (0,)),
        engine="a",
        worker="played",
        finished_at=0.0,
    )


class PlayedWorker:
    """Worker that takes tasks and otherwise does only as the test tells it."""

    def __init__(self, stack: AsyncExitStack, url: str) -> None:
        self.stack, self.url = stack, url
        self.tasks: asyncio.Queue[RolloutTask] = asyncio.Queue()
        self.cancelled: asyncio.Queue[AttemptKey] = asyncio.Queue()
        self.acknowledged: asyncio.Queue[int] = asyncio.Queue()
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self.released: asyncio.Queue[str] = asyncio.Queue()
        self.received = 0

    async def connect(self, *attempts: AttemptKey, incarnation: str = "i") -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        session = await self.stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        self.socket = await session.ws_connect(f"{self.url}/v1/workers")
        self.stack.push_async_callback(self.socket.close)
        hello = WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name="played",
            incarnation=incarnation,
            max_concurrent=16,
            attempts=attempts,
            received=self.received,
        )
        await self.socket.send_bytes(encode(hello))
        welcome = CONTROLLER_FRAMES.decode(await self.socket.receive_bytes(timeout=WITHIN_S))
        assert isinstance(welcome, WorkerWelcome)
        self.reader = asyncio.create_task(self.read(self.socket))
        self.stack.callback(self.reader.cancel)

    async def read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            match CONTROLLER_FRAMES.decode(message.data):
                case TaskBatch() as batch:
                    self.received = batch.number
                    if batch.acknowledged:
                        self.acknowledged.put_nowait(batch.acknowledged)
                    self.numbers.put_nowait(batch.number)
                    for task in batch.tasks:
                        self.tasks.put_nowait(task)
                    for key in batch.cancelled:
                        self.cancelled.put_nowait(key)
                    for released in batch.released:
                        self.released.put_nowait(released)
                case frame:
                    raise AssertionError(frame)

    async def task(self) -> RolloutTask:
        return await asyncio.wait_for(self.tasks.get(), WITHIN_S)

    async def deliver(self, last: int, *outcomes: RolloutOutcome) -> int:
        """Deliver outcomes and return the number that the controller acknowledges."""
        batch = CompletionBatch(last, tuple(encode(outcome) for outcome in outcomes))
        await self.socket.send_bytes(encode(batch))
        return await asyncio.wait_for(self.acknowledged.get(), WITHIN_S)


@pytest.fixture
async def played() -> AsyncIterator[tuple[RolloutController, PlayedWorker]]:
    async with AsyncExitStack() as stack:
        engines = StaticEngines([("a", "http://127.0.0.1:9", 0)])
        controller = await stack.enter_async_context(
            RolloutController(
                engines,
                StalenessPolicy.unbounded(100),
                token=TOKEN,
                config=RolloutConfig(retry_backoff_s=0.001),
            )
        )
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        stack.push_async_callback(server.close)
        worker = PlayedWorker(stack, server.url)
        await worker.connect()
        yield controller, worker


async def test_an_outcome_repeated_after_a_reconnect_is_acknowledged_and_ignored(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await worker.task()
    await worker.socket.close()
    await worker.connect(AttemptKey(task.task_id, task.attempt))
    outcome = accepted(task.task_id, task.attempt, token=42)
    assert await worker.deliver(1, outcome) == 1
    assert (await handle).output_ids == (42,)
    assert await worker.deliver(1, outcome) == 1
    stats = controller.stats()
    assert (stats.completed, stats.ignored, stats.retried, stats.lost) == (1, 1, 0, 0)


async def test_an_outcome_after_a_gap_is_not_acknowledged(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handles = [controller.submit((1,), SAMPLING) for _ in range(2)]
    tasks = [await worker.task() for _ in handles]
    first, second = (accepted(task.task_id, task.attempt, token=42) for task in tasks)
    await worker.socket.send_bytes(encode(CompletionBatch(2, (encode(second),))))
    assert await worker.deliver(1, first) == 1, "or the worker would drop the second"
    assert [handle.done() for handle in handles] == [True, False]
    assert await worker.deliver(2, second) == 2
    assert (await handles[1]).output_ids == (42,)


async def test_an_acknowledgement_that_is_sent_again_leaves_no_gap(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handles = [controller.submit((1,), SAMPLING) for _ in range(2)]
    tasks = [await worker.task() for _ in handles]
    received = worker.received
    first, second = (accepted(task.task_id, task.attempt, token=42) for task in tasks)
    assert await worker.deliver(1, first) == 1
    # The connection broke before this acknowledgement arrived, so the worker still has the first outcome.
    worker.received = received
    await worker.socket.close()
    await worker.connect(*(AttemptKey(task.task_id, task.attempt) for task in tasks))
    assert await asyncio.wait_for(worker.acknowledged.get(), WITHIN_S) == 1
    # The worker has dropped the first outcome now.
    assert await worker.deliver(2, second) == 2
    assert (await handles[1]).output_ids == (42,)


async def test_tasks_that_were_not_received_are_sent_again_over_the_next_connection(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    controller.submit((1,), SAMPLING)
    task, number = await worker.task(), await worker.numbers.get()
    worker.received = 0
    await worker.socket.close()
    await worker.connect()
    assert await worker.task() == task, "the same attempt"
    assert await worker.numbers.get() == number, "under the same number"
    assert controller.stats().retried == 0


async def test_a_worker_that_acknowledges_no_tasks_gets_no_more(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    for number in range(2 * MAX_UNSAID):
        controller.submit((number,), SAMPLING)
        await worker.task()
    controller.submit((9,), SAMPLING)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.tasks.get(), 0.3)
    said = CompletionBatch(0, (), worker.received)
    await worker.socket.send_bytes(encode(said))
    assert (await worker.task()).prompt_ids == (9,)
    assert controller.stats().running == 2 * MAX_UNSAID + 1


async def test_replaced_worker_gets_its_last_acknowledgement_and_no_task(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    """Its successor gets the task that waits. The old process would run the task a second time."""
    controller, worker = played
    handle = controller.submit((0,), SAMPLING)
    task = await worker.task()
    for number in range(1, 2 * MAX_UNSAID):
        controller.submit((number,), SAMPLING)
        await worker.task()
    waiting = controller.submit((9,), SAMPLING)
    outcome = accepted(task.task_id, task.attempt, token=42)
    await worker.socket.send_bytes(encode(CompletionBatch(1, (encode(outcome),))))
    assert (await handle).output_ids == (42,)
    successor = PlayedWorker(worker.stack, worker.url)
    await successor.connect(incarnation="j")
    await asyncio.wait_for(worker.reader, WITHIN_S)
    assert worker.acknowledged.get_nowait() == 1
    assert worker.tasks.empty()
    resent = [await successor.task() for _ in range(2 * MAX_UNSAID)]
    assert (9,) in {task.prompt_ids for task in resent}
    assert not waiting.done()


async def test_only_tasks_that_a_worker_lost_are_sent_again(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    handles = [controller.submit((index,), SAMPLING) for index in range(2)]
    kept, forgotten = await worker.task(), await worker.task()
    await worker.socket.close()
    await worker.connect(AttemptKey(kept.task_id, kept.attempt))
    again = await worker.task()
    assert (again.task_id, again.attempt) == (forgotten.task_id, 2)
    await worker.deliver(1, accepted(forgotten.task_id, 1, token=13))
    assert not any(handle.done() for handle in handles), "an attempt that was replaced is not used"
    outcomes = (accepted(kept.task_id, 1, token=14), accepted(again.task_id, 2, token=15))
    assert await worker.deliver(3, *outcomes) == 3
    assert sorted([(await handle).output_ids for handle in handles]) == [(14,), (15,)]
    assert worker.tasks.empty()


async def test_an_attempt_that_the_controller_does_not_know_is_cancelled(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    """This happens after a restart, if the process died before it sent the cancellation."""
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await worker.task()
    wanted, unknown = AttemptKey(task.task_id, task.attempt), AttemptKey("of-long-ago", 3)
    await worker.socket.close()
    await worker.connect(wanted, unknown)
    assert await asyncio.wait_for(worker.cancelled.get(), WITHIN_S) == unknown
    assert worker.cancelled.empty()
    await worker.deliver(1, accepted(task.task_id, task.attempt, token=7))
    assert (await handle).output_ids == (7,)


async def test_a_worker_that_replaces_another_gets_its_work_again(
    played: tuple[RolloutController, PlayedWorker],
) -> None:
    controller, worker = played
    controller.submit((1,), SAMPLING)
    first = await worker.task()
    await worker.connect(incarnation="j")
    again = await worker.task()
    assert (again.task_id, again.attempt) == (first.task_id, 2)
    stats = controller.stats()
    assert (stats.workers, stats.running, stats.outstanding, stats.lost) == (1, 1, 1, 0)


async def test_outcomes_that_cannot_be_used_now_are_not_acknowledged(
    played: tuple[RolloutController, PlayedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await worker.task()

    def refuse(_: RolloutJournal) -> None:
        raise RolloutError("the disk is full")

    outcome = accepted(task.task_id, task.attempt, token=7)
    with monkeypatch.context() as patch:
        patch.setattr(RolloutJournal, "check", refuse)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.deliver(1, outcome), 0.3)
    assert not handle.done()
    assert await worker.deliver(1, outcome) == 1
    assert (await handle).output_ids == (7,)


async def test_tensors_of_outcomes_that_could_not_be_written_at_once_are_kept(
    played: tuple[RolloutController, PlayedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, worker = played
    handle = controller.submit((1,), SAMPLING)
    task = await worker.task()
    held = HeldTensor("played", "i", "key", "digest")
    tensor = SampleTensor(dtype=DType.FLOAT32, shape=(1, 9), held=held)
    outcome = msgspec.structs.replace(
        accepted(task.task_id, task.attempt, token=7), tensors={"experts": tensor}
    )

    def fail(_: RolloutJournal) -> None:
        raise RolloutError("the disk is full")

    with monkeypatch.context() as patch:
        # The journal counts as usable until this write.
        patch.setattr(RolloutJournal, "flush", fail)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.deliver(1, outcome), 0.3)
    assert (await handle).tensors["experts"].held == held
    # The worker sends the outcome again. The controller ignores it, and still refers to the tensor.
    assert await worker.deliver(1, outcome) == 1
    del tensor, outcome
    gc.collect()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.released.get(), 0.3)
    del handle
    gc.collect()
    assert await asyncio.wait_for(worker.released.get(), WITHIN_S) == "key"


class PlayedController:
    """Controller that welcomes one worker and otherwise does only as the test tells it."""

    def __init__(self) -> None:
        self.connected: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.completed: asyncio.Queue[CompletionBatch] = asyncio.Queue()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert isinstance(WORKER_FRAMES.decode(await socket.receive_bytes()), WorkerHello)
        await socket.send_bytes(encode(WorkerWelcome("played")))
        self.connected.put_nowait(socket)
        async for message in socket:
            frame = WORKER_FRAMES.decode(message.data)
            assert isinstance(frame, CompletionBatch)
            self.completed.put_nowait(frame)
        return socket


async def test_a_worker_runs_a_repeated_attempt_once() -> None:
    server, controller = ControlServer(host="127.0.0.1", port=0, token=TOKEN), PlayedController()
    server.add_routes([web.get("/v1/workers", controller.serve)])
    await server.start()
    async with (
        asyncio.timeout(WITHIN_S),
        AsyncExitStack() as stack,
        FakeEngine("a") as engine,
        aiohttp.ClientSession() as engine_session,
    ):
        stack.push_async_callback(server.close)
        worker = RolloutWorker(
            WorkerSettings(controller=server.url, name="w"), TOKEN, engine_session
        )
        running = asyncio.create_task(worker.run())
        socket = await controller.connected.get()
        task = RolloutTask(
            task_id="t",
            attempt=1,
            prompt_ids=(3,),
            sampling=SAMPLING,
            engine=EngineTarget("a", engine.url),
            deadline_s=10.0,
        )

        async def hand_over() -> None:
            await socket.send_bytes(encode(TaskBatch(1, (task,))))

        engine.hold(1)
        await hand_over()
        await hand_over()
        await engine.until_held(1)
        assert worker.hello().attempts == (AttemptKey("t", 1),)
        await engine.release()
        batch = await controller.completed.get()
        (outcome,) = (msgspec.msgpack.decode(o, type=RolloutOutcome) for o in batch.outcomes)
        assert outcome.result.output_ids == expected_tokens((3,), 3)
        # The outcome is not acknowledged yet.
        assert worker.hello().attempts == (AttemptKey("t", 1),)
        await hand_over()
        await socket.send_bytes(encode(TaskBatch(2, (), (), batch.last)))
        # A second run of the attempt would stay in this list, because its outcome is not acknowledged.
        while worker.hello().attempts:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        assert engine.num_requests == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_timer_of_a_replaced_worker_does_not_remove_its_successor() -> None:
    lost: list[str] = []
    pool = WorkerPool(
        RolloutConfig(worker_grace_s=0.01),
        on_outcomes=lambda _: True,
        on_lost=lambda _, reason: lost.append(reason),
        on_change=lambda: None,
        max_running=8,
        on_gone=lambda *_: None,
    )
    pool.open("controller", (), ())
    first, second = (
        WorkerHello(protocol_version=PROTOCOL_VERSION, name="w", incarnation=each, max_concurrent=4)
        for each in ("first", "second")
    )
    await pool.lost(pool.register(first), "connection closed", ended=True)
    # The loop is busy until the timer of the first process is due. It then runs this call and the timer at once.
    asyncio.get_running_loop().call_soon(pool.register, second)
    time.sleep(0.05)  # noqa: ASYNC251
    await asyncio.sleep(0.05)
    assert [worker.hello for worker in pool.workers.values()] == [second]
    assert "worker w: connection closed" not in lost
    await pool.close()
