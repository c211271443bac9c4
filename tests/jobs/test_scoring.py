"""Threads score several groups at a time, before a step takes these groups."""

from __future__ import annotations

import asyncio
import itertools
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
    GroupHandle,
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
    """Rollouts of a fake engine, with their scoring.

    Attributes:
        taken: ids of the groups of all batches.
    """

    def __init__(self, rollouts: RolloutController, scoring: Scoring) -> None:
        self.rollouts, self.scoring = rollouts, scoring
        self.taken: list[int] = []

    def submit(self, num_groups: int) -> dict[int, GroupHandle]:
        handles = [
            self.rollouts.submit_group((1, number + 2), 2, SAMPLING) for number in range(num_groups)
        ]
        return {handle.group_id: handle for handle in handles}

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
        self.taken += found
        return [[sample.reward for sample in group] for group in found.values()]


async def finish(when: asyncio.Event) -> None:
    await when.wait()


@asynccontextmanager
async def started(  # type: ignore[no-untyped-def]
    reward: Callable[[RolloutGroup], float],
    config: RolloutSection = CONFIG,
    *,
    keeps_groups: bool = False,
):
    policy = StalenessPolicy(max_staleness=9, batch_size=8, max_concurrent=64)
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy) as rollouts,
    ):
        rollouts.run_here({})
        scoring = Scoring(rollouts, Scored(reward), config, keeps_groups=keeps_groups)
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


async def test_returned_groups_keep_their_order_and_rewards() -> None:
    rewards = itertools.count(1)
    config = RolloutSection(sampling=SAMPLING, groups_per_step=2, samples_per_group=2)
    async with started(lambda _: float(next(rewards)), config, keeps_groups=True) as rig:
        submitted = rig.submit(8)
        batches = [await rig.next_batch() for _ in range(3)]
        # A checkpoint contains the first step.
        saved, later = rig.taken[:2], rig.taken[2:]
        rig.rollouts.acknowledge([submitted[group_id].task_ids[0] for group_id in saved])
        rig.scoring.forget_taken(saved)
        assert [handle.group_id for handle in rig.scoring.return_groups()] == later
        assert [await rig.next_batch() for _ in range(2)] == batches[1:]
        assert rig.taken[6:] == later
        batches.append(await rig.next_batch())
        rewarded = [group for batch in batches if batch is not None for group in batch]
        assert sorted(rewarded) == [[float(n), float(n)] for n in range(1, 9)]
        assert await rig.next_batch(is_over=True) is None


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
