"""Threads score several groups at a time, before a step takes these groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest
from fake_engine import FakeEngine

from windlass.errors import ConfigError, PeerTimeout, RolloutError
from windlass.jobs import Recipe, Task
from windlass.jobs.config import RolloutSection
from windlass.jobs.scoring import Scoring
from windlass.rollout import (
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
)

DEADLINE_S = 20.0
SAMPLING = SamplingParams(max_new_tokens=2)
CONFIG = RolloutSection(sampling=SAMPLING, groups_per_step=4, samples_per_group=2)


class Scored(Recipe):
    """A recipe with rewards from a function of the test."""

    def __init__(self, reward: Callable[[RolloutGroup], float]) -> None:
        self.reward = reward

    def tasks(self) -> Iterator[Task]:
        return iter(())

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        return [self.reward(group)] * len(group.rollouts)


class Rig:
    """Rollouts of a fake engine, with their scoring."""

    def __init__(self, rollouts: RolloutController, scoring: Scoring) -> None:
        self.rollouts, self.scoring = rollouts, scoring

    def submit(self, num_groups: int) -> None:
        for number in range(num_groups):
            self.rollouts.submit_group((1, number + 2), 2, SAMPLING)

    async def next_batch(self, *, is_over: bool = False) -> list[list[float]] | None:
        forever = asyncio.Event()
        if is_over:
            forever.set()
        producer: asyncio.Task[None] = asyncio.create_task(finish(forever))
        try:
            async with asyncio.timeout(DEADLINE_S):
                found = await self.scoring.next_batch(producer)
        finally:
            producer.cancel()
        if found is None:
            return None
        return [[sample.reward for sample in group] for group in found]


async def finish(when: asyncio.Event) -> None:
    await when.wait()


@asynccontextmanager
async def started(reward: Callable[[RolloutGroup], float], config: RolloutSection = CONFIG):  # type: ignore[no-untyped-def]
    policy = StalenessPolicy(max_staleness=9, batch_size=8, max_concurrent=64)
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy) as rollouts,
    ):
        rollouts.run_here({})
        scoring = Scoring(rollouts, Scored(reward), config)
        try:
            yield Rig(rollouts, scoring)
        finally:
            scoring.close()


@contextmanager
def joined_threads() -> Iterator[threading.Event]:
    """Release hanging threads of recipes after the block, and wait for their end."""
    release = threading.Event()
    yield release
    release.set()
    for thread in threading.enumerate():
        if thread.name == "recipe":
            thread.join(DEADLINE_S)


async def test_groups_are_scored_concurrently_and_ahead_of_their_step() -> None:
    all_there = threading.Barrier(8)

    def reward(_: RolloutGroup) -> float:
        # Rewards that are computed one after another would break the barrier.
        all_there.wait(DEADLINE_S)
        return 1.0

    async with started(reward) as rig:
        rig.submit(8)
        for _ in range(2):
            assert await rig.next_batch() == [[1.0, 1.0]] * 4
        assert await rig.next_batch(is_over=True) is None


async def test_only_as_many_groups_as_allowed_are_scored_at_a_time() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def reward(_: RolloutGroup) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return 1.0

    config = RolloutSection(
        sampling=SAMPLING, groups_per_step=4, samples_per_group=2, rewards_at_once=2
    )
    async with started(reward, config) as rig:
        rig.submit(8)
        await rig.next_batch()
        await rig.next_batch()
    assert most == 2


async def test_a_recipe_that_hangs_in_scoring_fails_the_step_by_its_deadline() -> None:
    config = RolloutSection(
        sampling=SAMPLING, groups_per_step=1, samples_per_group=2, batch_deadline_s=0.3
    )
    with joined_threads() as release:
        async with started(lambda _: float(release.wait(DEADLINE_S)), config) as rig:
            rig.submit(1)
            with pytest.raises(PeerTimeout, match=r"group 0 was not scored within 0\.3 s"):
                await rig.next_batch()


async def test_a_reward_that_raises_names_its_group() -> None:
    def reward(_: RolloutGroup) -> float:
        return float("nan")

    async with started(reward) as rig:
        rig.submit(1)
        with pytest.raises(ConfigError, match="group 0"):
            await rig.next_batch()


async def test_scoring_time_does_not_count_for_the_batch_deadline() -> None:
    config = RolloutSection(
        sampling=SAMPLING, groups_per_step=1, samples_per_group=2, batch_deadline_s=1.0
    )

    def reward(_: RolloutGroup) -> float:
        time.sleep(0.7)
        return 1.0

    async with started(reward, config) as rig:
        rig.submit(1)
        assert await rig.next_batch() == [[1.0, 1.0]]
        # Each of the two waits is shorter than the deadline. Together they are longer.
        rig.submit(1)
        assert await rig.next_batch() == [[1.0, 1.0]]


async def test_a_batch_that_times_out_names_the_missing_groups() -> None:
    config = RolloutSection(
        sampling=SAMPLING, groups_per_step=2, samples_per_group=2, batch_deadline_s=0.3
    )
    async with started(lambda _: 1.0, config) as rig:
        rig.submit(1)
        with pytest.raises(PeerTimeout, match=r"needs 2 groups; scored: 1, being scored: 0"):
            await rig.next_batch()


async def test_repeated_equal_failures_of_rollouts_end_the_job() -> None:
    async def raises(_: object) -> None:
        raise KeyError("score")

    policy = StalenessPolicy(max_staleness=9, batch_size=8, max_concurrent=64)
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy) as rollouts,
    ):
        rollouts.run_here({"raises": raises})
        rig = Rig(rollouts, Scoring(rollouts, Scored(lambda _: 1.0), CONFIG))
        for _ in range(8):
            rollouts.submit_workflow_group("raises", None, 2, SAMPLING)
        with pytest.raises(
            RolloutError, match=r"8 rollouts in a row failed without a retry, .*KeyError: 'score'"
        ):
            await rig.next_batch()
