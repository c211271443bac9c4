"""Outcomes are dropped, doubled, repeated late and delayed past their deadline, for real.

The proxy is a real server on a real port, between real worker processes and a real controller. It
runs in the test's loop, because a separate process would only take more time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web
from test_rollout_loop import TOKEN, Rig, assert_right, finished

from windlass.net.messages import encode
from windlass.rollout.messages import (
    CONTROLLER_FRAMES,
    WORKER_FRAMES,
    CompletionBatch,
    TaskBatch,
    WorkerHello,
    decode_outcome,
)

CALL_DEADLINE_S = 0.6
LATE_S = 1.5
NUM_ROLLOUTS = 300
FAULTS = ("lost", "cut", "lost answer", "doubled", "old again", "late", "", "", "")


class Proxy:
    """Proxy that forwards frames of workers and applies `FAULTS` to completions."""

    def __init__(self, target: str, *, seed: int) -> None:
        self.target = target
        self.random = random.Random(seed)
        self.num = dict.fromkeys(FAULTS, 0)
        self.old: dict[str, list[bytes]] = {}
        """Old frames per worker.

        Workers number their frames, and no network mixes the frames of two workers.
        """
        self.sent: set[tuple[str, int]] = set()
        self.late: set[asyncio.Task[None]] = set()
        self.hellos: list[WorkerHello] = []
        self.num_answers_to_lose = 0

    async def start(self, stack: AsyncExitStack) -> str:
        self.session = await stack.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        )
        app = web.Application()
        app.add_routes([web.get("/v1/workers", self.serve)])
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        stack.push_async_callback(self.stop, runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop(self, runner: web.AppRunner) -> None:
        await asyncio.gather(*self.late, return_exceptions=True)
        await runner.cleanup()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        near = web.WebSocketResponse(max_msg_size=1 << 26)
        await near.prepare(request)
        async with self.session.ws_connect(f"{self.target}/v1/workers") as far:
            back = asyncio.create_task(self.backwards(far, near))
            old: list[bytes] = []
            async for message in near:
                assert message.type is WSMsgType.BINARY
                frame = WORKER_FRAMES.decode(message.data)
                if isinstance(frame, WorkerHello):
                    self.hellos.append(frame)
                    old = self.old.setdefault(frame.incarnation, [])
                if not isinstance(frame, CompletionBatch):
                    await far.send_bytes(message.data)
                    continue
                outcomes = map(decode_outcome, frame.outcomes)
                self.sent.update((o.task_id, o.attempt) for o in outcomes)
                if not await self.treat(far, message.data, old):
                    break
            back.cancel()
            await near.close()
        return near

    async def treat(
        self, far: aiohttp.ClientWebSocketResponse, frame: bytes, old: list[bytes]
    ) -> bool:
        """Forward a frame or lose it. Return false if the connection must be cut."""
        fault = self.random.choice(FAULTS)
        self.num[fault] += 1
        if fault in {"lost", "cut"}:
            return fault == "lost"
        if fault == "late":
            # Forward it long after the worker gave the call up and sent everything again.
            self.late.add(asyncio.create_task(self.forward_late(far, frame)))
            return True
        if fault == "lost answer":
            self.num_answers_to_lose += 1
        if fault == "doubled":
            await far.send_bytes(frame)
        if fault == "old again" and old:
            await far.send_bytes(self.random.choice(old))
        old.append(frame)
        await far.send_bytes(frame)
        return True

    @staticmethod
    async def forward_late(far: aiohttp.ClientWebSocketResponse, frame: bytes) -> None:
        await asyncio.sleep(LATE_S)
        if not far.closed:
            await far.send_bytes(frame)

    async def backwards(
        self, far: aiohttp.ClientWebSocketResponse, near: web.WebSocketResponse
    ) -> None:
        async for message in far:
            data, frame = message.data, CONTROLLER_FRAMES.decode(message.data)
            if self.num_answers_to_lose and isinstance(frame, TaskBatch) and frame.acknowledged:
                self.num_answers_to_lose -= 1
                data = encode(msgspec.structs.replace(frame, acknowledged=0))
            await near.send_bytes(data)
        await near.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


async def test_lost_doubled_reordered_and_delayed_callbacks_count_once(
    rig: Rig,
) -> None:
    await rig.start()
    engine = await rig.engine("a", token_s=0.001)
    rig.route(engine)
    proxy = Proxy(rig.server.url, seed=11)
    url = await proxy.start(rig.stack)
    options = ("--max-concurrent", "8", "--call-deadline-s", str(CALL_DEADLINE_S))
    for index in range(2):
        await rig.worker(f"worker-{index}", *options, url=url)
    num_rollouts = 0
    # Batches grow with the delay, so the number of callbacks is not known beforehand.
    while num_rollouts < NUM_ROLLOUTS or min(proxy.num.values()) == 0:
        rollouts = await finished(rig.submit(NUM_ROLLOUTS), deadline_s=60)
        assert_right(rollouts)
        assert all(rollout.attempts == 1 for rollout in rollouts)
        num_rollouts += NUM_ROLLOUTS
    await asyncio.gather(*proxy.late)
    assert engine.num_requests == num_rollouts
    assert len(proxy.sent) == num_rollouts
    stats = rig.controller.stats()
    assert stats.ignored > 0, "repeated outcomes must be ignored"
    assert (stats.retried, stats.rejected) == (0, 0)
    assert len({hello.incarnation for hello in proxy.hellos}) == 2 < len(proxy.hellos)
    rig.assert_balanced(completed=num_rollouts)


async def test_a_result_of_an_abandoned_rollout_is_ignored(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    rig.route(engine)
    proxy = Proxy(rig.server.url, seed=0)
    url = await proxy.start(rig.stack)
    held, go = asyncio.Event(), asyncio.Event()

    async def hold(
        far: aiohttp.ClientWebSocketResponse,
        frame: bytes,
        old: list[bytes],
    ) -> bool:
        held.set()
        await go.wait()
        await far.send_bytes(frame)
        return True

    proxy.treat = hold  # type: ignore[method-assign]
    await rig.worker("worker-0", url=url)
    (task,) = rig.submit(1)
    await asyncio.wait_for(held.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go.set()
    again = await finished(rig.submit(1), deadline_s=60)
    assert_right(again)
    stats = rig.controller.stats()
    assert (stats.completed, stats.cancelled, stats.lost, stats.ignored) == (1, 1, 0, 1)
