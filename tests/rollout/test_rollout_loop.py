"""The rollout loop over real HTTP, with real worker processes that are really killed."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from fake_engine import FakeEngine, expected_tokens

from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    RolloutError,
    StaleMessage,
)
from windlass.net.access import Access, role_environment, role_token
from windlass.net.messages import PROTOCOL_VERSION, Refused, encode
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchClient,
    BatchQueue,
    GroupHandle,
    OnAbort,
    OnStale,
    Rollout,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
    training_samples,
)
from windlass.rollout.batches import MAX_ASKED_STEPS
from windlass.rollout.messages import (
    CONTROLLER_FRAMES,
    CompletionBatch,
    TrainingSample,
    WorkerHello,
)

TOKEN = "a-token"
SAMPLING = SamplingParams(max_new_tokens=6)
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


class Rig:
    """A controller on a real port, with the engines and workers that a test starts."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.engines = StaticEngines()
        self.batches = BatchQueue()
        self.policy = StalenessPolicy.unbounded(20_000)
        self.config = RolloutConfig(retry_backoff_s=0.01)
        self.workers: dict[str, asyncio.subprocess.Process] = {}
        self.extra_routes: list[web.RouteDef] = []
        self.long: list[GroupHandle] = []
        self.controller: RolloutController
        self.server: ControlServer

    async def start(self) -> None:
        self.controller = await self.stack.enter_async_context(
            RolloutController(self.engines, self.policy, token=TOKEN, config=self.config)
        )
        await self.serve(0)

    async def serve(self, port: int) -> None:
        self.server = ControlServer(host="127.0.0.1", port=port, token=TOKEN)
        mount_rollout_routes(self.server, self.controller, self.batches)
        self.server.add_routes(self.extra_routes)
        await self.server.start()
        self.stack.push_async_callback(self.server.close)

    async def engine(self, name: str, **options: int | float | bool) -> FakeEngine:
        engine = FakeEngine(
            name,
            version=int(options.get("version", 0)),
            token_versions=bool(options.get("token_versions", True)),
            token_s=float(options.get("token_s", 0.0)),
        )
        await self.stack.enter_async_context(engine)
        return engine

    async def up(self, hold: int | None = None, **options: int | bool) -> FakeEngine:
        """Start a controller, engine `a` that stops after `hold` tokens, and worker `worker-0`."""
        await self.start()
        engine = await self.engine("a", **options)
        if hold is not None:
            engine.hold(hold)
        self.route(engine)
        await self.worker("worker-0")
        return engine

    def route(self, *engines: FakeEngine) -> None:
        self.engines.set(engine.entry for engine in engines)

    async def worker(
        self, name: str, *options: str, url: str = "", tokens: dict[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "windlass.rollout.worker", "--name", name]
        command += ["--controller", url or self.server.url, *options]
        tokens = tokens or {"WINDLASS_TOKEN": TOKEN}
        environment = {**os.environ, "PYTHONPATH": SOURCE, **tokens}
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        self.workers[name] = process
        self.stack.push_async_callback(self.reap, process)
        return process

    @staticmethod
    async def reap(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()
            await process.wait()

    def submit(self, count: int, *, deadline_s: float | None = None) -> list[asyncio.Task[Rollout]]:
        async def result(index: int) -> Rollout:
            return await self.controller.submit(
                (index + 1, 5), SAMPLING, metadata=index, deadline_s=deadline_s
            )

        return [asyncio.ensure_future(result(index)) for index in range(count)]

    def assert_balanced(self, *, completed: int) -> None:
        stats = self.controller.stats()
        assert (stats.completed, stats.lost, stats.outstanding, stats.failed) == (
            completed,
            0,
            0,
            0,
        )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


async def finished(tasks: Sequence[asyncio.Task[Rollout]], deadline_s: float = 60) -> list[Rollout]:
    async with asyncio.timeout(deadline_s):
        return list(await asyncio.gather(*tasks))


def assert_right(rollouts: Sequence[Rollout]) -> None:
    """Check that every prompt has exactly its own answer."""
    for index, rollout in enumerate(rollouts):
        assert rollout.metadata == index
        assert rollout.prompt_ids == (index + 1, 5)
        assert rollout.output_ids == expected_tokens(rollout.prompt_ids, 6)
        assert rollout.logprobs == tuple(-token / 1e6 for token in rollout.output_ids)


async def test_a_thousand_rollouts_each_get_their_own_answer(rig: Rig) -> None:
    engine = await rig.up(version=3)
    rollouts = await finished(rig.submit(1000))
    assert_right(rollouts)
    assert {version for rollout in rollouts for version in rollout.versions} == {3}
    assert engine.num_requests == 1000
    rig.assert_balanced(completed=1000)


async def test_a_killed_worker_loses_and_repeats_no_rollout(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(4)
    rig.route(engine)
    await rig.worker("worker-0", "--max-concurrent", "100")
    await rig.worker("worker-1", "--max-concurrent", "100")
    tasks = rig.submit(200)
    await engine.until_held(200)
    rig.workers["worker-0"].send_signal(signal.SIGKILL)
    await rig.workers["worker-0"].wait()
    await engine.release()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert rig.controller.stats().retried == 100
    assert {rollout.worker for rollout in rollouts} == {"worker-1"}
    rig.assert_balanced(completed=200)


async def test_a_worker_that_returns_under_its_name_gets_the_work_again(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(2)
    rig.route(engine)
    first = await rig.worker("worker-0")
    tasks = rig.submit(50)
    await engine.until_held(50)
    first.kill()
    await first.wait()
    await engine.release()
    await rig.worker("worker-0")
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert all(rollout.attempts == 2 for rollout in rollouts)
    rig.assert_balanced(completed=50)


async def test_a_worker_asked_to_end_hands_its_work_over(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(2)
    rig.route(engine)
    first = await rig.worker("worker-0")
    tasks = rig.submit(30)
    await engine.until_held(30)
    first.terminate()
    assert await asyncio.wait_for(first.wait(), 10) == 0
    await engine.release()
    await rig.worker("worker-1")
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.worker for rollout in rollouts} == {"worker-1"}
    rig.assert_balanced(completed=30)


async def test_a_worker_that_hangs_loses_its_work_and_may_come_back(rig: Rig) -> None:
    rig.config = RolloutConfig(
        retry_backoff_s=0.01, worker_lease_s=0.4, worker_grace_s=0.5, on_abort=OnAbort.RETRY
    )
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(1)
    rig.route(engine)
    hanging = await rig.worker("worker-0")
    tasks = rig.submit(25)
    await engine.until_held(25)
    hanging.send_signal(signal.SIGSTOP)
    await rig.worker("worker-1")
    await engine.until_held(50)
    await engine.release()
    assert_right(await finished(tasks))
    assert rig.controller.stats().workers == 1
    hanging.send_signal(signal.SIGCONT)
    await rig.reap(rig.workers["worker-1"])
    more = await finished(rig.submit(10))
    assert {rollout.worker for rollout in more} == {"worker-0"}
    # A snapshot may show an answer before the controller has handled its callback.
    assert rig.controller.stats().ignored >= 25
    rig.assert_balanced(completed=35)


async def test_the_older_of_two_workers_with_one_name_ends(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(1)
    rig.route(engine)
    older = await rig.worker("worker-0")
    tasks = rig.submit(10)
    await engine.until_held(10)
    await rig.worker("worker-0")
    assert await asyncio.wait_for(older.wait(), 15) == 2
    await engine.release()
    assert_right(await finished(tasks))
    rig.assert_balanced(completed=10)


async def test_a_worker_with_a_wrong_token_ends_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start()
    monkeypatch.setattr(sys.modules[__name__], "TOKEN", "another-token")
    worker = await rig.worker("worker-0")
    assert await asyncio.wait_for(worker.wait(), 15) == 2


async def test_outcomes_wait_for_a_controller_that_is_away(rig: Rig) -> None:
    engine = await rig.up(hold=3)
    tasks = rig.submit(40)
    await engine.until_held(40)
    port = int(rig.server.url.rsplit(":", 1)[1])
    await rig.server.close()
    await engine.release()
    await engine.until(lambda: engine.num_active == 0)
    await rig.serve(port)
    assert_right(await finished(tasks))
    assert engine.num_requests == 40
    rig.assert_balanced(completed=40)


async def test_a_worker_ends_when_its_controller_stays_away(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    rig.route(engine)
    worker = await rig.worker("worker-0", "--controller-gone-s", "0.5")
    assert_right(await finished(rig.submit(1)))
    await rig.controller.close()
    await rig.server.close()
    assert await asyncio.wait_for(worker.wait(), 15) == 1


async def test_another_engine_runs_the_rollouts_of_a_dead_engine(rig: Rig) -> None:
    await rig.start()
    first, second = await rig.engine("a"), await rig.engine("b", version=1)
    first.hold(2)
    rig.route(first)
    await rig.worker("worker-0")
    tasks = rig.submit(60)
    await first.until_held(60)
    rig.route(first, second)
    await first.die()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.engine for rollout in rollouts} == {"b"}
    assert {version for rollout in rollouts for version in rollout.versions} == {1}
    rig.assert_balanced(completed=60)


async def test_rollouts_leave_an_engine_that_stays_unroutable(rig: Rig) -> None:
    rig.config = RolloutConfig(retry_backoff_s=0.01, engine_grace_s=0.2)
    await rig.start()
    hung, other = await rig.engine("a"), await rig.engine("b")
    hung.hold(0)
    rig.route(hung)
    await rig.worker("worker-0")
    tasks = rig.submit(20)
    await hung.until_held(20)
    rig.route(other)
    rollouts = await finished(tasks)
    assert {rollout.engine for rollout in rollouts} == {"b"}
    rig.assert_balanced(completed=20)


async def test_an_engine_that_refuses_is_avoided_and_attempts_are_counted(rig: Rig) -> None:
    rig.config = RolloutConfig(retry_backoff_s=0.001, max_attempts=3)
    await rig.start()
    broken, sound = await rig.engine("a"), await rig.engine("b")
    broken.failing = True
    rig.route(broken, sound)
    await rig.worker("worker-0")
    rollouts = await finished(rig.submit(40))
    assert {rollout.engine for rollout in rollouts} == {"b"}
    rig.route(broken)
    with pytest.raises(RolloutError, match=r"failed 3 times .* HTTP 500: .*out of order"):
        await rig.controller.submit((1, 5), SAMPLING)
    stats = rig.controller.stats()
    assert (stats.failed, stats.lost, stats.outstanding) == (1, 0, 0)


async def test_an_engine_that_is_not_routable_gets_no_traffic(rig: Rig) -> None:
    await rig.start()
    first, second = await rig.engine("a"), await rig.engine("b")
    rig.route(first)
    await rig.worker("worker-0")
    await finished(rig.submit(50))
    assert (first.num_requests, second.num_requests) == (50, 0)
    rig.route(second)
    await finished(rig.submit(50))
    assert (first.num_requests, second.num_requests) == (50, 50)
    rig.route()
    waiting = rig.submit(5)
    rig.route(first, second)
    await finished(waiting)


async def test_load_is_spread_over_routable_engines(rig: Rig) -> None:
    await rig.start()
    engines = [await rig.engine(name) for name in "abc"]
    for engine in engines:
        engine.hold(1)
    rig.route(*engines)
    await rig.worker("worker-0")
    tasks = rig.submit(90)
    for engine in engines:
        await engine.until_held(30)
        await engine.release()
    assert_right(await finished(tasks))
    assert [engine.num_requests for engine in engines] == [30, 30, 30]


async def test_an_aborted_generation_continues_and_labels_each_token(rig: Rig) -> None:
    engine = await rig.up(hold=2, version=4)
    tasks = rig.submit(10)
    await engine.until_held(10)
    engine.version = 5
    await engine.abort()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.versions for rollout in rollouts} == {(4, 4, 5, 5, 5, 5)}
    assert all(rollout.attempts == 1 for rollout in rollouts)
    assert engine.num_requests == 20


async def test_tokens_of_an_engine_that_labels_none_carry_its_weight_version(rig: Rig) -> None:
    await rig.up(version=9, token_versions=False)
    assert {rollout.versions for rollout in await finished(rig.submit(5))} == {(9,) * 6}


async def test_an_abort_can_start_over_so_that_one_version_made_every_token(rig: Rig) -> None:
    rig.config = RolloutConfig(on_abort=OnAbort.RETRY)
    engine = await rig.up(hold=3, version=4)
    tasks = rig.submit(10)
    await engine.until_held(10)
    engine.version = 5
    await engine.abort()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.versions for rollout in rollouts} == {(5,) * 6}


async def test_a_retry_on_another_engine_can_continue_from_partial_tokens(rig: Rig) -> None:
    rig.config = RolloutConfig(retry_backoff_s=0.01, carry_partial=True)
    await rig.start()
    first, second = await rig.engine("a"), await rig.engine("b", version=1)
    first.hold(2)
    rig.route(first)
    await rig.worker("worker-0")
    tasks = rig.submit(10)
    await first.until_held(10)
    rig.engines.set([first.entry, ("b", second.url, 0)])
    first.failing = True
    await first.abort()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.versions for rollout in rollouts} == {(0, 0, 1, 1, 1, 1)}
    rig.assert_balanced(completed=10)


async def test_an_answer_that_became_too_old_while_running_is_made_again(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=1, batch_size=64, max_concurrent=64)
    engine = await rig.up(hold=2)
    tasks = rig.submit(8)
    await engine.until_held(8)
    engine.version = 2
    rig.route(engine)
    await engine.release()
    rollouts = await finished(tasks)
    assert {rollout.versions for rollout in rollouts} == {(2,) * 6}
    stats = rig.controller.stats()
    assert (stats.stopped_early, stats.too_old, stats.rejected) == (8, 0, 0)
    rig.assert_balanced(completed=8)


async def test_a_group_that_became_too_old_while_waiting_is_made_again(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=0, batch_size=8, max_concurrent=64)
    engine = await rig.up()
    handles = [rig.controller.submit_group((index + 1, 5), 4, SAMPLING) for index in range(4)]
    first = await rig.controller.next_batch(2, deadline_s=10)
    assert {v for group in first for r in group.rollouts for v in r.versions} == {0}
    rig.controller.set_version(1)
    engine.version = 1
    second = await rig.controller.next_batch(2, deadline_s=10)
    assert {group.group_id for group in first + second} == {0, 1, 2, 3}
    assert {v for group in second for r in group.rollouts for v in r.versions} == {1}
    for group in first + second:
        assert len({rollout.task_id for rollout in group.rollouts}) == 4
        assert {rollout.prompt_ids for rollout in group.rollouts} == {group.prompt_ids}
    assert all(handle.done() for handle in handles)
    rig.assert_balanced(completed=16)


async def train_beside_long_groups(rig: Rig, num_steps: int) -> tuple[FakeEngine, list[Rollout]]:
    """Train each step on two groups of short answers. Two long groups need three versions."""
    engine = await rig.up()
    engine.hold(1, per_version=True)
    long, short = SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=1)
    for number in (900, 901):
        rig.long.append(rig.controller.submit_group((number, 5), 4, long))
    await engine.until_held(8)
    trained: list[Rollout] = []
    for step in range(num_steps):
        for number in (2 * step, 2 * step + 1):
            rig.controller.submit_group((number + 1, 5), 4, short)
        for group in await rig.controller.next_batch(2, deadline_s=20):
            trained += group.rollouts
        await engine.serve(step + 1)
        rig.route(engine)
    return engine, trained


async def test_rollouts_that_last_longer_than_the_bound_end_and_are_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.policy = StalenessPolicy(max_staleness=1, batch_size=8, max_concurrent=64)
    engine, trained = await train_beside_long_groups(rig, 20)
    assert len(trained) == 160
    assert all(handle.done() for handle in rig.long), rig.controller.stats()
    for handle in rig.long:
        with pytest.raises(RolloutError, match=r"max_staleness=1\) after 3 resubmissions"):
            await handle
    stats = rig.controller.stats()
    assert (stats.completed, stats.dropped, stats.lost, stats.outstanding) == (160, 8, 0, 0)
    # There are 8 samples with 4 attempts each. The end of a group stops its other samples.
    assert 3 * 8 + 2 <= stats.stopped_early + stats.too_old <= 4 * 8
    assert "too old for version 2 (max_staleness=1, on_stale=resubmit" in caplog.text
    await engine.until(lambda: engine.num_active == 0)


async def test_rollouts_longer_than_the_bound_are_trained_on_if_configured(
    rig: Rig,
) -> None:
    rig.policy = StalenessPolicy(
        max_staleness=1, batch_size=8, max_concurrent=64, on_stale=OnStale.TRAIN
    )
    _, trained = await train_beside_long_groups(rig, 5)
    long = [rollout for rollout in trained if rollout.prompt_ids[0] >= 900]
    assert sorted((r.prompt_ids[0], r.versions) for r in long) == [
        (number, (0, 1, 2)) for number in (900, 901) for _ in range(4)
    ]
    assert all(handle.done() for handle in rig.long)
    stats = rig.controller.stats()
    assert (stats.stopped_early, stats.too_old, stats.wasted_tokens, stats.lost) == (0, 0, 0, 0)


async def test_the_controller_stops_rollouts_that_will_be_too_old_at_the_engine(
    rig: Rig,
) -> None:
    rig.policy = StalenessPolicy(
        max_staleness=1, batch_size=8, max_concurrent=8, on_stale=OnStale.DROP
    )
    engine = await rig.up()
    engine.hold(1, per_version=True)
    sampling = SamplingParams(max_new_tokens=9)
    group = rig.controller.submit_group((1, 5), 4, sampling)
    single = rig.controller.submit((2, 5), sampling)
    await engine.until_held(5)
    for version in (1, 2):
        assert engine.num_active == 5
        await engine.serve(version)
        rig.route(engine)
    await engine.until(lambda: engine.num_active == 0)
    for handle in (group, single):
        with pytest.raises(RolloutError, match="dropped because it is too old for version 2"):
            await handle
    stats = rig.controller.stats()
    # One sample of the group was too old, so the whole group is dropped.
    assert (stats.stopped_early, stats.dropped, stats.capacity, stats.lost) == (2, 5, 8, 0)
    with pytest.raises(
        PeerTimeout, match=r"0 of 1 groups .*\(.*dropped 5, too old 0, stopped early 2,"
    ):
        await rig.controller.next_batch(1, deadline_s=0.05)


async def test_admission_stops_at_the_bound_and_opens_with_the_next_version(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=1, batch_size=4, max_concurrent=100)
    engine = await rig.up(hold=1)
    for index in range(5):
        rig.controller.submit_group((index + 1, 5), 4, SAMPLING)
    await engine.until_held(8)
    stats = rig.controller.stats()
    assert (stats.running, stats.waiting, stats.capacity) == (8, 12, 0)
    await engine.release()
    await rig.controller.next_batch(2, deadline_s=10)
    with pytest.raises(PeerTimeout, match="0 of 1 groups were complete within"):
        await rig.controller.next_batch(1, deadline_s=0.1)
    rig.controller.set_version(1)
    engine.version = 1
    assert len(await rig.controller.next_batch(1, deadline_s=10)) == 1
    assert engine.num_requests == 12


async def test_a_producer_that_waits_for_room_never_gets_ahead_of_the_bound(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=1, batch_size=6, max_concurrent=100)
    engine = await rig.up()

    async def produce() -> None:
        for index in range(1000):
            await rig.controller.wait_for_room(deadline_s=10)
            rig.controller.submit_group((index + 1, 5), 3, SAMPLING)

    producer = asyncio.create_task(produce())
    seen = []
    for version in range(5):
        engine.version = version
        rig.controller.set_version(version)
        groups = await rig.controller.next_batch(2, deadline_s=10)
        seen += [group.group_id for group in groups]
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert version - min(rollout.versions) <= 1
        stats = rig.controller.stats()
        assert stats.submitted - stats.completed <= 2 * 6
    producer.cancel()
    await asyncio.gather(producer, return_exceptions=True)
    assert len(set(seen)) == 10


async def test_a_wait_for_room_that_times_out_names_what_takes_the_room(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=0, batch_size=2, max_concurrent=100)
    await rig.up()
    handles = [rig.controller.submit((index + 1, 5), SAMPLING) for index in range(2)]
    await rig.controller.wait(handles, deadline_s=10)
    with pytest.raises(
        PeerTimeout,
        match=r"wait_for_room: no room within 0.05 s \(.*accepted 2.*\); \(running 0.*workers 1,",
    ):
        await rig.controller.wait_for_room(deadline_s=0.05)


async def test_closing_ends_every_wait_with_an_error_and_without_cancellation(rig: Rig) -> None:
    rig.policy = StalenessPolicy(max_staleness=0, batch_size=2, max_concurrent=100)
    await rig.up(hold=0)
    for index in range(2):
        rig.controller.submit((index + 1, 5), SAMPLING)
    waits = [
        asyncio.create_task(rig.controller.wait_for_room(deadline_s=60)),
        asyncio.create_task(rig.controller.wait_for_workers(9, deadline_s=60)),
    ]
    # Let both calls wait.
    await asyncio.sleep(0)
    await rig.controller.close()
    for wait in waits:
        with pytest.raises(ConfigError, match="the controller is closed"):
            await wait


async def test_a_step_that_no_rank_asks_for_is_a_named_error(rig: Rig) -> None:
    await rig.up()
    with pytest.raises(PeerTimeout, match=r"requested step 3 within 0\.05 s; .*: none"):
        await rig.batches.requested(3, deadline_s=0.05)


async def test_a_deadline_ends_a_rollout_on_an_engine_that_never_answers(rig: Rig) -> None:
    await rig.up(hold=0)
    handle = rig.controller.submit((1, 5), SAMPLING, deadline_s=0.4)
    with pytest.raises(PeerTimeout, match=r"deadline_s=0.4 passed in attempt 1 on engine a"):
        await handle
    stats = rig.controller.stats()
    assert (stats.failed, stats.outstanding, stats.lost) == (1, 0, 0)


async def test_a_deadline_between_two_attempts_names_the_attempt_that_has_ended(rig: Rig) -> None:
    rig.config = RolloutConfig(retry_backoff_s=2.0)
    engine = await rig.up()
    engine.failing = True
    handle = rig.controller.submit((1, 5), SAMPLING, deadline_s=0.4)
    with pytest.raises(
        PeerTimeout,
        match=r"deadline_s=0.4 passed between two attempts, after attempt 1 on engine a; newest error: .*engine a ",
    ):
        await handle


async def test_cancelling_frees_the_engine(rig: Rig) -> None:
    engine = await rig.up(hold=0)
    handles = [rig.controller.submit((index + 1, 5), SAMPLING) for index in range(10)]
    group = rig.controller.submit_group((99, 5), 4, SAMPLING)
    await engine.until_held(14)
    handles[3].cancel()
    group.cancel()
    await engine.release()
    for index, handle in enumerate(handles):
        if index == 3:
            with pytest.raises(asyncio.CancelledError):
                await handle
        else:
            assert (await handle).output_ids == expected_tokens((index + 1, 5), 6)
    stats = rig.controller.stats()
    assert (stats.completed, stats.cancelled, stats.outstanding, stats.lost) == (9, 5, 0, 0)


async def test_an_update_that_takes_long_does_not_delay_completions(rig: Rig) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def update(_: web.Request) -> web.Response:
        began.set()
        await may_end.wait()
        return web.Response()

    rig.extra_routes = [web.post("/v1/update", update)]
    await rig.up()
    await finished(rig.submit(1))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        updating = asyncio.ensure_future(session.post(f"{rig.server.url}/v1/update"))
        await began.wait()
        await finished(rig.submit(100))
        assert not updating.done()
        may_end.set()
        (await updating).release()


async def test_ranks_get_disjoint_shards_and_the_same_answer_again(rig: Rig) -> None:
    await rig.up()
    for index in range(6):
        rig.controller.submit_group((index + 1, 5), 3, SAMPLING)

    def ask(rank: int, step: int = 0) -> list[tuple[int, ...]]:
        with BatchClient(rig.server.url, TOKEN) as client:
            batch = client.next_batch(step, rank, 2, deadline_s=10)
            assert client.next_batch(step, rank, 2, deadline_s=10) == batch
        assert all(s.reward == sum(s.output_ids) for s in batch.samples)
        return [(s.group_id, *s.prompt_ids) for s in batch.samples]

    asking = [asyncio.create_task(asyncio.to_thread(ask, rank)) for rank in (0, 1)]
    await rig.batches.requested(0, deadline_s=10)
    groups = await rig.controller.next_batch(6, deadline_s=10)
    await rig.batches.put(
        0, [training_samples(g, [sum(r.output_ids) for r in g.rollouts]) for g in groups]
    )
    shards = await asyncio.gather(*asking)
    assert [len(shard) for shard in shards] == [9, 9]
    assert not set(shards[0]) & set(shards[1])
    assert {prompt for shard in shards for _, prompt, _ in shard} == {1, 2, 3, 4, 5, 6}


async def test_a_batch_that_cannot_be_had_is_a_named_error(rig: Rig) -> None:
    await rig.start()

    def ask(
        step: int,
        world_size: int = 1,
        token: str = TOKEN,
        rank: int = 0,
        deadline_s: float = 20.0,
    ) -> None:
        with BatchClient(rig.server.url, token) as client:
            client.next_batch(step, rank, world_size, deadline_s=deadline_s)

    with pytest.raises(AuthenticationError, match="token"):
        await asyncio.to_thread(ask, 0, token="wrong")
    with pytest.raises(PeerTimeout, match=r"step 0 .* within 0.3 s"):
        await asyncio.to_thread(ask, 0, deadline_s=0.3)
    with pytest.raises(ConfigError, match=r"rank must be in \[0, world_size=1\), got 1"):
        await asyncio.to_thread(ask, 0, rank=1)
    for step in range(3):
        await rig.batches.put(step, [()])
    with pytest.raises(StaleMessage, match=r"step must be one of \[1, 2\], got 0"):
        await asyncio.to_thread(ask, 0)
    await asyncio.to_thread(ask, 2)


async def test_a_request_for_a_shard_does_not_change_the_shards_of_other_ranks() -> None:
    """The first question for a step set its world size. One for a later step drew batches early."""
    num_ranks = 0
    queue = BatchQueue(lambda: num_ranks)
    strangers = [
        asyncio.create_task(queue.shard(0, 0, 1, deadline_s=20)),
        asyncio.create_task(queue.shard(1 << 52, 0, 1, deadline_s=20)),
    ]
    await asyncio.sleep(0)
    with pytest.raises(PeerTimeout, match="requested step 1 within"):
        await queue.requested(1, deadline_s=0.05)
    num_ranks = 4
    ranks = [asyncio.create_task(queue.shard(0, rank, 2, deadline_s=20)) for rank in (0, 1)]
    await queue.requested(0, deadline_s=20)
    with pytest.raises(ConfigError, match="must divide the number of trainer ranks, 4, got 3"):
        await queue.shard(0, 0, 3, deadline_s=20)
    await queue.put(0, [[sample(index)] for index in range(4)])
    answers = [[s.group_id for s in (await rank).samples] for rank in ranks]
    assert answers == [[0, 2], [1, 3]]
    # Step 0 was put, so this call returns.
    await queue.requested(0, deadline_s=0.05)
    for stranger in strangers:
        stranger.cancel()


async def test_a_queue_remembers_few_requested_steps() -> None:
    queue = BatchQueue()
    asked = [
        asyncio.create_task(queue.shard(step, 0, 1, deadline_s=20))
        for step in range(MAX_ASKED_STEPS + 1)
    ]
    await asyncio.sleep(0)
    await queue.requested(MAX_ASKED_STEPS, deadline_s=0.05)
    with pytest.raises(PeerTimeout):
        await queue.requested(0, deadline_s=0.05)
    for question in asked:
        question.cancel()


def sample(group_id: int) -> TrainingSample:
    return TrainingSample(
        prompt_ids=(1,), output_ids=(2,), logprobs=(0.0,), versions=(0,), reward=0.0,
        group_id=group_id, engine="a",
    )  # fmt: skip


async def first_answer(rig: Rig, frame: msgspec.Struct) -> object:
    """Return the controller's answer to the first frame of a connection."""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.ws_connect(f"{rig.server.url}/v1/workers") as socket,
    ):
        await socket.send_bytes(encode(frame))
        return CONTROLLER_FRAMES.decode(await socket.receive_bytes(timeout=20))


def hello(name: str = "w", *, version: int = PROTOCOL_VERSION) -> WorkerHello:
    return WorkerHello(protocol_version=version, name=name, incarnation="i", max_concurrent=1)


@pytest.mark.parametrize(("deadline_s", "num_done"), [(600.0, 184), (1.0, 200)])
async def test_a_silent_worker_takes_only_its_share_of_attempts(
    rig: Rig, deadline_s: float, num_done: int
) -> None:
    """It used to take 255 of 256 attempts, and all of them again after each deadline."""
    rig.policy = StalenessPolicy.unbounded(32)
    rig.config = RolloutConfig(
        attempt_deadline_s=deadline_s, max_attempts=100, retry_backoff_s=0.01
    )
    await rig.up()
    greedy = WorkerHello(
        protocol_version=PROTOCOL_VERSION, name="greedy", incarnation="i", max_concurrent=1 << 18
    )
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.ws_connect(f"{rig.server.url}/v1/workers") as socket,
    ):
        await socket.send_bytes(encode(greedy))
        await rig.controller.wait_for_workers(2, deadline_s=20)
        waiting = set(rig.submit(200))
        async with asyncio.timeout(40):
            while len(waiting) > 200 - num_done:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_closed_controller_makes_workers_reconnect_and_not_end(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.start()
    await rig.controller.close()
    refused = await first_answer(rig, hello())
    assert isinstance(refused, Refused)
    assert not refused.final
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not warned, "the end of a job is no reason for a warning"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (hello("controller"), "name must not be controller, which the controller uses"),
        (hello("a\x1b[2Jb"), "1 to 255 bytes of printable characters, got 'a\\\\x1b\\[2Jb'"),
        (hello(version=1), f"protocol_version must be {PROTOCOL_VERSION}, got 1"),
        (CompletionBatch(1, ()), "the first frame must be Hello, got CompletionBatch"),
    ],
)
async def test_a_worker_with_a_wrong_hello_is_refused_for_good(
    rig: Rig, frame: msgspec.Struct, reason: str
) -> None:
    await rig.start()
    refused = await first_answer(rig, frame)
    assert isinstance(refused, Refused)
    assert refused.final
    assert re.search(reason, refused.message), refused.message
    assert not rig.controller.stats().workers


async def test_a_worker_needs_only_its_roles_tokens_and_opens_no_port(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    rig.route(engine)
    process = await rig.worker("w", tokens=role_environment(TOKEN, Access.WORKER))
    await asyncio.gather(*rig.submit(4))
    assert engine.authorizations == {f"Bearer {role_token(TOKEN, Access.CLIENT)}"}
    assert listening_sockets(process.pid) == []


def listening_sockets(pid: int) -> list[str]:
    """Return the inodes of the TCP sockets on which a process listens."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[9] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


async def test_strangers_and_nonsense_are_refused(rig: Rig) -> None:
    await rig.start()
    url = f"{rig.server.url}/v1/workers"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 401
    with pytest.raises(ConfigError, match="prompt_ids must not be empty"):
        rig.controller.submit((), SAMPLING)
    with pytest.raises(ConfigError, match="n must be an integer >= 1, got 0"):
        rig.controller.submit_group((1,), 0, SAMPLING)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((1, 5), "4", SAMPLING), "n must be an integer >= 1, got '4'"),
        (((1, 5), 2.0, SAMPLING), "n must be an integer >= 1, got 2.0"),
        (((1, 5), True, SAMPLING), "n must be an integer >= 1, got True"),
        (((1, 5), SAMPLING, 4), "sampling must be SamplingParams, got 4|n must be an integer"),
        (((1, 5), 4, {"max_new_tokens": 1}), "sampling must be SamplingParams, got {'max_new"),
        (((1, 5), 4, None), "sampling must be SamplingParams, got None"),
        ((5, 4, SAMPLING), "prompt_ids must be integers"),
        ((["ab"], 4, SAMPLING), "prompt_ids must be integers"),
        ((None, 4, SAMPLING), "prompt_ids must be integers"),
    ],
)
async def test_an_argument_of_a_wrong_type_is_named(
    rig: Rig, arguments: tuple[Any, ...], says: str
) -> None:
    await rig.up()
    with pytest.raises(ConfigError, match=says):
        rig.controller.submit_group(*arguments)
    with pytest.raises(ConfigError, match="deadline_s must be a number of seconds, got '5'"):
        rig.controller.submit_group((1, 5), 4, SAMPLING, deadline_s="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workflow must be text and not empty, got 3"):
        rig.controller.submit_workflow(3, None, SAMPLING)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_groups must be an integer >= 1, got '1'"):
        await rig.controller.next_batch("1", deadline_s=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"next_batch: deadline_s must be .* got None"):
        await rig.controller.next_batch(1, deadline_s=None)  # type: ignore[arg-type]


async def test_occasional_repeated_answers_are_counted_without_a_warning(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.policy = StalenessPolicy(max_staleness=1, batch_size=8, max_concurrent=64)
    engine = await rig.up()
    engine.hold(1, per_version=True)
    sampling = SamplingParams(max_new_tokens=3)
    handle = rig.controller.submit_group((900, 5), 1, sampling)
    await engine.until_held(1)
    for step in range(2):
        for number in (1, 2):
            rig.controller.submit_group((number, 5), 4, SamplingParams(max_new_tokens=1))
        await rig.controller.next_batch(2, deadline_s=20)
        await engine.serve(step + 1)
        rig.route(engine)
    stats = rig.controller.stats()
    assert stats.stopped_early + stats.too_old == 1
    assert "too old" not in caplog.text
    handle.cancel()
