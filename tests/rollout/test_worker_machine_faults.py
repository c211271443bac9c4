"""Rollout workers with a jumping clock, or killed by the kernel for lack of memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from machine_faults import DAY_S, clock_environment, needs_faketime, no_memory_left
from test_rollout_loop import TOKEN, Rig, assert_right, finished

from windlass.rollout import RolloutConfig, SamplingParams

WITHIN_S = 60.0


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


@needs_faketime
async def test_a_worker_whose_clock_jumps_keeps_its_rollouts_and_repeats_none(
    rig: Rig, tmp_path: Path
) -> None:
    """The clock jumps by days and years during rollouts. `finished_at` uses that clock."""
    rig.config = RolloutConfig(worker_lease_s=1.0, worker_grace_s=1.0)
    await rig.start()
    engine = await rig.engine("a")
    rig.route(engine)
    clock = tmp_path / "clock"
    clock.write_text("+0")
    await rig.worker("w", tokens={"WINDLASS_TOKEN": TOKEN, **clock_environment(clock)})
    num_completed = 0
    for days in (1, -2, 3650, 0):
        engine.hold(2)
        tasks = rig.submit(20)
        await engine.until_held(20)
        clock.write_text(f"{days:+d}d")
        await engine.release()
        rollouts = await finished(tasks)
        assert_right(rollouts)
        days_off = {round((r.finished_at - time.time()) / DAY_S) for r in rollouts}
        assert days_off == {days}, "the clock was not set"
        num_completed += 20
        assert rig.controller.stats().retried == 0
        rig.assert_balanced(completed=num_completed)
    assert engine.num_requests == num_completed


async def test_rollouts_of_a_worker_killed_for_memory_are_retried_elsewhere(
    rig: Rig,
) -> None:
    await rig.start()
    engine = await rig.engine("a")
    engine.hold(4)
    rig.route(engine)
    victim = await rig.worker("worker-0", "--max-concurrent", "100")
    tasks = rig.submit(50)
    await engine.until_held(50)
    with no_memory_left(victim.pid):
        # The tasks exceed the free memory, so the kernel kills the worker while it receives them.
        long = [
            rig.controller.submit((7,) * 100_000, SamplingParams(max_new_tokens=1))
            for _ in range(40)
        ]
        assert await victim.wait() == -9
    await rig.worker("worker-1")
    await engine.release()
    rollouts = await finished(tasks)
    assert_right(rollouts)
    assert {rollout.worker for rollout in rollouts} == {"worker-1"}
    others = await rig.controller.wait(long, deadline_s=WITHIN_S)
    assert {len(rollout.output_ids) for rollout in others} == {1}
    rig.assert_balanced(completed=90)
