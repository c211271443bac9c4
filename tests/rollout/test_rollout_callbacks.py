"""Callbacks that are dropped, doubled, repeated late and delayed past their deadline, for real.

A proxy process would add nothing but time: this one is a real server on a real port, in the
test's loop, between real worker processes and a real controller. It speaks both ways in which
completions travel: POSTs, and the connection that stays open.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from test_rollout_loop import TOKEN, Rig, assert_right, finished

from windlass.rollout.messages import CompletionBatch, decode

CALL_DEADLINE_S = 0.6
LATE_S = 1.5
NUM_ROLLOUTS = 300
FAULTS = ("lost request", "lost answer", "doubled", "old again", "late", "", "", "")


class Proxy:
    """Forwards the rollout lane's calls, and does to completions what `FAULTS` says."""

    def __init__(self, target: str, *, lanes: bool, seed: int) -> None:
        self.target, self.lanes = target, lanes
        self.random = random.Random(seed)
        self.num = dict.fromkeys(FAULTS, 0)
        self.old: list[bytes] = []
        self.sent: set[tuple[str, int]] = set()
        self.late: set[asyncio.Task[None]] = set()

    async def start(self, stack: AsyncExitStack) -> str:
        self.session = await stack.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        )
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/workers", self.workers)])
        app.add_routes([web.post("/v1/completions", self.posted)])
        if self.lanes:
            app.add_routes([web.get("/v1/completions", self.upgraded)])
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

    async def workers(self, request: web.Request) -> web.Response:
        return await self.send("workers", await request.read())

    async def posted(self, request: web.Request) -> web.Response:
        answer = await self.treat(await request.read())
        return web.Response(status=503) if answer is None else web.Response(body=answer)

    async def upgraded(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=1 << 26)
        await socket.prepare(request)
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            answer = await self.treat(message.data)
            if answer is None:
                break
            await socket.send_bytes(answer)
        await socket.close()
        return socket

    async def treat(self, body: bytes) -> bytes | None:
        """The answer of the controller, or None for a connection that breaks."""
        fault = self.random.choice(FAULTS)
        self.num[fault] += 1
        if fault == "lost request":
            return None
        if fault == "late":
            # Forwarded long after the worker has given the call up and sent everything again.
            task = asyncio.create_task(self.forward_late(body))
            self.late.add(task)
            await asyncio.sleep(2 * LATE_S)
            return None
        if fault == "doubled":
            await self.completions(body)
        if fault == "old again" and self.old:
            await self.completions(self.random.choice(self.old))
        self.old.append(body)
        answer = await self.completions(body)
        return None if fault == "lost answer" else answer

    async def forward_late(self, body: bytes) -> None:
        await asyncio.sleep(LATE_S)
        await self.completions(body)

    async def completions(self, body: bytes) -> bytes:
        self.sent.update((o.task_id, o.attempt) for o in decode(body, CompletionBatch).outcomes)
        answer = await self.send("completions", body)
        assert answer.status == 200
        assert isinstance(answer.body, bytes)
        return answer.body

    async def send(self, lane: str, body: bytes) -> web.Response:
        async with self.session.post(f"{self.target}/v1/{lane}", data=body) as response:
            return web.Response(status=response.status, body=await response.read())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lanes", [False, True], ids=["posts", "open-connection"])
async def test_callbacks_lost_doubled_reordered_and_delayed_past_the_deadline_count_once(
    rig: Rig, lanes: bool
) -> None:
    await rig.start()
    engine = await rig.engine("a", token_s=0.001)
    rig.route(engine)
    proxy = Proxy(rig.server.url, lanes=lanes, seed=11)
    url = await proxy.start(rig.stack)
    options = ("--max-concurrent", "8", "--call-deadline-s", str(CALL_DEADLINE_S))
    for index in range(2):
        await rig.worker(f"worker-{index}", *options, url=url)
    num_rollouts = 0
    # Batches grow with the delay, so how many callbacks there are is not known beforehand.
    while num_rollouts < NUM_ROLLOUTS or min(proxy.num.values()) == 0:
        rollouts = await finished(rig.submit(NUM_ROLLOUTS), deadline_s=60)
        assert_right(rollouts)
        assert all(rollout.attempts == 1 for rollout in rollouts)
        num_rollouts += NUM_ROLLOUTS
    await asyncio.gather(*proxy.late)
    assert engine.num_requests == num_rollouts
    assert len(proxy.sent) == num_rollouts
    stats = rig.controller.stats()
    assert stats.ignored > 0, "what came again was not used"
    assert (stats.retried, stats.rejected) == (0, 0)
    rig.assert_balanced(completed=num_rollouts)


async def test_a_result_that_comes_after_its_rollout_was_given_up_is_ignored(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a")
    rig.route(engine)
    proxy = Proxy(rig.server.url, lanes=True, seed=0)
    url = await proxy.start(rig.stack)
    held, go = asyncio.Event(), asyncio.Event()

    async def hold(body: bytes) -> bytes | None:
        held.set()
        await go.wait()
        return await proxy.completions(body)

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
