"""`kill -9` of the controller in the middle of a thousand rollouts: the next one continues them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from durable_controller import GROUP_SIZE, TOKEN, stored
from fake_engine import FakeEngine, expected_tokens
from kept_port import free_port

SUPPORT = Path(__file__).resolve().parents[1] / "support"
NUM_GROUPS = 250
DEADLINE_S = 60.0


class Rig:
    """Engine in the test's loop, with workers and controllers in their own processes."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.port = 0
        self.url = ""

    async def start(self) -> None:
        self.engine = await self.stack.enter_async_context(FakeEngine("engine"))
        self.port = free_port()

    async def spawn(self, *command: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, "WINDLASS_TOKEN": TOKEN}
        environment["PYTHONPATH"] = str(SUPPORT.parents[1] / "src")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command), env=environment, stdout=asyncio.subprocess.PIPE
        )
        self.stack.push_async_callback(reap, process)
        return process

    async def controller(self) -> tuple[asyncio.subprocess.Process, int, int]:
        """Return the process, the number of stored groups, and the number of recovered groups."""
        process = await self.spawn(
            str(SUPPORT / "durable_controller.py"),
            *(str(self.port), str(self.folder / "journal"), str(self.folder / "store")),
            *(self.engine.url, str(NUM_GROUPS), "2"),
        )
        self.url, have, recovered = (await line_of(process)).split()
        return process, int(have), int(recovered)

    async def worker(self, name: str) -> asyncio.subprocess.Process:
        return await self.spawn(
            *("-m", "windlass.rollout.worker", "--name", name, "--controller", self.url)
        )


async def reap(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stdout.readline()).decode()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        made = Rig(stack, tmp_path)
        await made.start()
        yield made


def assert_delivered_once(folder: Path) -> None:
    lines = stored(folder / "store")
    assert sorted(line["prompt"] for line in lines) == list(range(NUM_GROUPS))
    tasks = [task for line in lines for task in line["tasks"]]
    assert len(tasks) == len(set(tasks)) == NUM_GROUPS * GROUP_SIZE
    for line in lines:
        answer = list(expected_tokens((line["prompt"] + 1, 5), 6))
        assert line["answers"] == [answer] * GROUP_SIZE


async def test_a_controller_killed_among_a_thousand_rollouts_repeats_none(
    rig: Rig,
) -> None:
    """All rollouts are at the engine. Workers keep them and report them to the next controller."""
    rig.engine.hold(2)
    first, have, recovered = await rig.controller()
    assert (have, recovered) == (0, 0)
    workers = [await rig.worker(f"worker-{index}") for index in range(2)]
    await rig.engine.until(
        lambda: rig.engine.num_active == NUM_GROUPS * GROUP_SIZE, deadline_s=DEADLINE_S
    )
    await kill(first)
    second, have, recovered = await rig.controller()
    assert (have, recovered) == (0, NUM_GROUPS)
    await rig.engine.release()
    assert await line_of(second) == "done 0 0 0\n"
    assert rig.engine.num_requests == NUM_GROUPS * GROUP_SIZE, "no attempt was run again"
    assert_delivered_once(rig.folder)
    assert all(worker.returncode is None for worker in workers)


async def test_repeated_kills_of_a_delivering_controller_lose_and_repeat_no_rollout(
    rig: Rig,
) -> None:
    """Kill the controller again and again while it dispatches, stores and acknowledges.

    Once, a worker dies with it, and other workers retry its unfinished and undelivered rollouts.
    """
    process, _, _ = await rig.controller()
    workers = [await rig.worker(f"worker-{index}") for index in range(2)]
    progress = 0
    for number in range(1, 4):
        # Requests arrive while results leave.
        target = number * NUM_GROUPS * GROUP_SIZE // 5
        await rig.engine.until(
            lambda: rig.engine.num_requests >= target,  # noqa: B023
            deadline_s=DEADLINE_S,
        )
        await kill(process)
        if number == 2:
            await kill(workers[0])
        process, have, recovered = await rig.controller()
        if number == 2:
            await rig.worker("worker-0")
        assert have >= progress
        assert have + recovered >= 1
        progress = have
    assert await line_of(process) == "done 0 0 0\n"
    assert_delivered_once(rig.folder)
