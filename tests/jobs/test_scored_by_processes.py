"""A rollout whose reward fails is replaced, and the other answers of its group and their rewards stay."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from fake_engine import FakeEngine
from small_job import launch, write_job

from windlass.errors import RolloutError
from windlass.jobs import Recipe, Task, rewards_differ
from windlass.jobs.config import RolloutSection
from windlass.jobs.scoring import Scoring
from windlass.rollout import (
    ProcessRewards,
    RewardPool,
    Rollout,
    RolloutConfig,
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    TrainingSample,
)

SAMPLING = SamplingParams(max_new_tokens=2)
DEADLINE_S = 60.0
FAILS_AT_FIRST = """
    import os, time
    from pathlib import Path

    def reward(rollout):
        folder, kind = rollout.metadata
        calls = Path(folder, rollout.task_id)
        with calls.open("a") as file:
            file.write("x")
        if kind == "never":
            raise ValueError("no such answer")
        is_victim = rollout.task_id.endswith(("-2", "-5"))
        if is_victim and (kind == "always" or len(calls.read_text()) == 1):
            match kind:
                case "hang":
                    time.sleep(600)
                case "kill":
                    os._exit(1)
                case _:
                    raise ValueError("cannot parse the answer")
        return float(rollout.task_id.rpartition("-")[2])
"""


class Unscored(Recipe):
    def tasks(self) -> Iterator[Task]:
        return iter(())


@asynccontextmanager
async def scoring(
    folder: Path, limits: RolloutConfig
) -> AsyncIterator[tuple[RolloutController, Scoring]]:
    function = folder / "reward.py"
    function.write_text(textwrap.dedent(FAILS_AT_FIRST))
    section = RolloutSection(sampling=SAMPLING, groups_per_step=2, samples_per_group=3)
    policy = StalenessPolicy(max_staleness=99, batch_size=6, max_concurrent=64)
    async with (
        FakeEngine("engine") as engine,
        RewardPool(ProcessRewards(file=str(function), num_processes=3, deadline_s=1.0)) as pool,
        RolloutController(StaticEngines([engine.entry]), policy, config=limits) as rollouts,
    ):
        rollouts.run_here({})
        made = Scoring(rollouts, Unscored(), section, pool)
        try:
            yield rollouts, made
        finally:
            made.close()


async def next_batch(made: Scoring) -> list[list[float]]:
    producer = asyncio.create_task(asyncio.Event().wait())
    try:
        async with asyncio.timeout(DEADLINE_S):
            batch = await made.next_batch(producer)  # type: ignore[arg-type]
    finally:
        producer.cancel()
    assert batch is not None
    return [[sample.reward for sample in group] for group in batch.values()]


@pytest.mark.parametrize("kind", ["raise", "hang", "kill"])
async def test_failed_reward_replaces_one_rollout_of_its_group(kind: str, tmp_path: Path) -> None:
    async with scoring(tmp_path, RolloutConfig()) as (rollouts, made):
        for number in range(2):
            rollouts.submit_group((1, number + 2), 3, SAMPLING, metadata=[str(tmp_path), kind])
        batch = await next_batch(made)
        stats = rollouts.stats()
    assert sorted(batch) == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert (stats.completed, stats.rejected, stats.lost, stats.outstanding) == (6, 2, 0, 0)
    # Only the replaced rollouts were scored twice.
    assert calls_in(tmp_path) == {"-1": 1, "-2": 2, "-3": 1, "-4": 1, "-5": 2, "-6": 1}


def calls_in(folder: Path) -> dict[str, int]:
    return {file.name[-2:]: len(file.read_text()) for file in folder.glob("*-*")}


async def test_rollout_that_can_never_be_scored_ends_its_group(tmp_path: Path) -> None:
    async with scoring(tmp_path, RolloutConfig(max_rejections=3)) as (rollouts, made):
        handles = [
            rollouts.submit_group((1, number + 2), 3, SAMPLING, metadata=[str(tmp_path), kind])
            for number, kind in enumerate(["always", "fine", "fine"])
        ]
        assert sorted(await next_batch(made)) == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
        with pytest.raises(RolloutError, match=r"-2: rejected 3 times .*cannot parse the answer"):
            await handles[0]
        stats = rollouts.stats()
    assert (stats.completed, stats.failed, stats.cancelled, stats.lost) == (6, 1, 2, 0)


async def test_step_fails_with_the_reason_if_no_rollout_can_be_scored(tmp_path: Path) -> None:
    async with scoring(tmp_path, RolloutConfig()) as (rollouts, made):
        (tmp_path / "reward.py").write_text("raise OSError('the disk is gone')")
        for number in range(9):
            rollouts.submit_group((1, number + 2), 3, SAMPLING, metadata=["/nowhere", "fine"])
        with pytest.raises(
            RolloutError,
            match=r"reward of .*reward.py failed for (\d+) of the last \1 rollouts .*FileNotFoundError",
        ):
            await next_batch(made)


async def test_job_ends_early_if_most_rewards_fail(tmp_path: Path) -> None:
    """The answers of 30 of 32 rows cannot be scored, and are replaced; two rows can be scored in between."""
    limits = RolloutConfig(max_rejections=10_000)
    async with scoring(tmp_path, limits) as (rollouts, made):
        for number in range(32):
            kind = "never" if number % 16 else "fine"
            rollouts.submit_group((1, number + 2), 3, SAMPLING, metadata=[str(tmp_path), kind])
        with pytest.raises(
            RolloutError,
            match=r"reward of .*reward.py failed for \d+ of the last 64 rollouts \(\d\d%\), more than "
            r"rollout.max_failed_rewards = 0.5 allows; newest failure: .*no such answer",
        ):
            await next_batch(made)
    assert sum(calls_in(tmp_path).values()) < 400


async def test_rows_that_cannot_be_scored_count_once_each(tmp_path: Path) -> None:
    """One row in eight fails, in each of 20 scores. These are more than half of all scores, and the job goes on."""
    async with scoring(tmp_path, RolloutConfig(max_rejections=20)) as (rollouts, made):
        handles = [
            rollouts.submit_group(
                (1, number + 2),
                3,
                SAMPLING,
                metadata=[str(tmp_path), "fine" if number % 8 else "never"],
            )
            for number in range(32)
        ]
        for _ in range(14):
            await next_batch(made)
        async with asyncio.timeout(DEADLINE_S):
            for handle in handles[::8]:
                with pytest.raises(RolloutError, match="rejected 20 times"):
                    await handle


def test_job_with_rewards_in_processes_names_the_failures_in_its_summary(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        """
        from windlass.jobs import Recipe, Task

        class R(Recipe):
            def tasks(self):
                for number in range(100):
                    yield Task(prompt_ids=(1, number + 2), metadata=number)

            def evaluation_tasks(self):
                return [Task(prompt_ids=(1, 2), metadata=7)]

        def reward(rollout):
            if rollout.metadata % 3 == 0 and rollout.attempts == 1:
                raise ValueError("no number")
            return rollout.metadata
        """,
        top="steps = 2",
    )
    job.write_text(
        job.read_text()
        + '\n[rewards]\nkind = "processes"\nnum_processes = 2\n[evaluation]\nevery = 2\n'
    )
    status, printed = launch(job)
    assert status == 0, printed
    name = f"reward of {tmp_path}/recipe.py"
    said = f"starting the scheduler, the controller and the processes of {name}"
    assert printed.count(f"{said} took ") == 1
    assert printed.index(f"{said}\n") < printed.index("controller http://")
    summary = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes())
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert summary["rewards"]["reasons"] == {"raised ValueError": summary["rewards"]["failed"]}
    assert summary["rewards"]["failed"] >= 4
    assert re.search(r"the reward function raised line \d+: ValueError: no number", printed)
    evaluation = (tmp_path / "out" / "evaluations.jsonl").read_text()
    assert msgspec.json.decode(evaluation)["reward"] == 7.0


class Filtering(Recipe):
    """Accepts every second answer at first, and groups with different rewards."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tasks(self) -> Iterator[Task]:
        return iter(())

    def accepts_group(self, group: RolloutGroup) -> bool:
        return group.metadata != "declined before"

    def accepts(self, rollout: Rollout) -> bool:
        return not (rollout.task_id.endswith("-2") and rollout.attempts < 3)

    def rewards(self, group: RolloutGroup) -> list[float]:
        self.asked.append(str(group.metadata))
        equal = group.metadata == "equal"
        return [0.0 if equal else float(n) for n, _ in enumerate(group.rollouts)]

    def accepts_scored(self, group: RolloutGroup, samples: Sequence[TrainingSample]) -> bool:
        return rewards_differ(samples)


async def test_filters_decline_groups_and_replace_answers_before_and_after_rewards() -> None:
    section = RolloutSection(sampling=SAMPLING, groups_per_step=1, samples_per_group=3)
    policy = StalenessPolicy(max_staleness=9, batch_size=3, max_concurrent=64)
    recipe, declined = Filtering(), list[int]()
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy) as rollouts,
    ):
        rollouts.run_here({})
        made = Scoring(rollouts, recipe, section, declined=declined.append)
        for number, name in enumerate(["fine", "declined before", "equal", "fine too"]):
            rollouts.submit_group((1, number + 2), 3, SAMPLING, metadata=name)
        batches = [await next_batch(made) for _ in range(2)]
        made.close()
        stats = rollouts.stats()
    assert batches == [[[0.0, 1.0, 2.0]]] * 2
    assert sorted(recipe.asked) == ["equal", "fine", "fine too"]
    assert sorted(declined) == [1, 2]
    assert (stats.rejected, stats.declined, stats.completed, stats.lost) == (2, 6, 12, 0)
