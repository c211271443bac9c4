"""Groups with rollouts to spare, groups that may end with fewer samples, replaced answers, and returned groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from windlass.errors import ConfigError, RolloutError
from windlass.net.journal_file import read_entries
from windlass.rollout import (
    Recovered,
    Reject,
    RolloutConfig,
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
)
from windlass.rollout.journal import Entry, PersistedState
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import ErrorKind, Partial, Work
from windlass.rollout.table import GroupSize

SAMPLING = SamplingParams(max_new_tokens=2)
DEADLINE_S = 20.0


class Rig:
    """A controller with a workflow; the test ends its rollouts.

    Attributes:
        started: task ids of started attempts, in the order of their starts.
        cancelled: task ids of attempts that were cancelled.
    """

    def __init__(self, rollouts: RolloutController, engine: FakeEngine) -> None:
        self.rollouts, self.engine = rollouts, engine
        self._rollouts_changed = asyncio.Event()
        rollouts.on_change(self._rollouts_changed.set)
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._changed = asyncio.Condition()

    async def workflow(self, context: WorkflowContext) -> str:
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends[context.task_id] = end
        async with self._changed:
            self.started.append(context.task_id)
            self._changed.notify_all()
        try:
            result = await end
        except asyncio.CancelledError:
            async with self._changed:
                self.cancelled.append(context.task_id)
                self._changed.notify_all()
            raise
        if result == "reject":
            raise Reject("no answer")
        await context.generate((1, 2))
        return result

    async def wait_for_starts(self, num_starts: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.started) >= num_starts)

    async def wait_for_cancels(self, num_cancels: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.cancelled) >= num_cancels)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._rollouts_changed.clear()
                await self._rollouts_changed.wait()

    def end(self, *task_ids: str, result: str = "done") -> None:
        for task_id in task_ids:
            self._ends[task_id].set_result(result)

    async def next_group(self) -> RolloutGroup:
        (group,) = await self.rollouts.next_batch(1, deadline_s=DEADLINE_S)
        return group


@asynccontextmanager
async def rig(
    *,
    journal: Path | None = None,
    acknowledge: bool = True,
    max_rejections: int = 1,
    max_staleness: int = 9,
    max_resubmits: int = 3,
    batch_size: int = 8,
) -> AsyncIterator[Rig]:
    policy = StalenessPolicy(
        max_staleness=max_staleness,
        batch_size=batch_size,
        max_concurrent=64,
        max_resubmits=max_resubmits,
    )
    config = RolloutConfig(
        journal=journal,
        acknowledge=journal is not None and acknowledge,
        max_rejections=max_rejections,
    )
    async with (
        FakeEngine("engine") as engine,
        RolloutController(StaticEngines([engine.entry]), policy, config=config) as rollouts,
    ):
        made = Rig(rollouts, engine)
        rollouts.run_here({"w": made.workflow})
        yield made
        stats = rollouts.stats()
        assert stats.lost == 0
        assert policy.running == stats.outstanding - stats.buffered
        assert policy.accepted - policy.consumed == stats.buffered


def ids(group: RolloutGroup) -> list[str]:
    return [rollout.task_id for rollout in group.rollouts]


async def test_first_finished_rollouts_are_delivered_and_the_others_are_cancelled() -> None:
    async with rig() as made:
        handle = made.rollouts.submit_workflow_group("w", None, 2, SAMPLING, num_extra=2)
        a, b, c, d = handle.task_ids
        await made.wait_for_starts(4)
        made.end(c, a)
        group = await made.next_group()
        await made.wait_for_cancels(2)
        assert ids(group) == [a, c]
        assert await handle == group
        assert sorted(made.cancelled) == sorted((b, d))
        stats = made.rollouts.stats()
        assert (stats.completed, stats.cancelled, stats.outstanding) == (2, 2, 0)


async def test_replaced_answer_leaves_the_other_answers_of_its_group() -> None:
    async with rig(max_rejections=3) as made:
        handle = made.rollouts.submit_workflow_group("w", None, 3, SAMPLING, num_extra=1)
        a, b, c, d = handle.task_ids
        await made.wait_for_starts(4)
        made.end(a, b, c)
        await made.wait_for_cancels(1)
        before = made.rollouts.peek(handle.group_id)
        made.rollouts.replace({b: "cannot be scored"})
        assert made.rollouts.ready_ids() == []
        with pytest.raises(RolloutError, match=f"{b} must be finished and not delivered, but it"):
            made.rollouts.replace({b: "again"})
        with pytest.raises(RolloutError, match=f"{d} .* it is unknown or ended"):
            made.rollouts.replace({d: "cancelled before"})
        await made.wait_for_starts(5)
        assert made.started[4:] == [b]
        made.end(b, result="better")
        group = await made.next_group()
    assert ids(group) == [a, b, c]
    assert (group.rollouts[0], group.rollouts[2]) == (before.rollouts[0], before.rollouts[2])
    assert [rollout.value for rollout in group.rollouts] == ["done", "better", "done"]
    assert [rollout.attempts for rollout in group.rollouts] == [1, 2, 1]


async def test_returned_groups_come_first_and_are_never_too_old() -> None:
    async with rig(max_staleness=1) as made:
        rollouts = made.rollouts
        handles = [rollouts.submit_workflow_group("w", number, 2, SAMPLING) for number in range(4)]
        await made.wait_for_starts(8)
        for handle in handles:
            made.end(*handle.task_ids)
        delivered = await rollouts.next_batch(3, deadline_s=DEADLINE_S, keep=True)
        # A checkpoint contains the first group, and the trainer cannot use the second one.
        rollouts.acknowledge([delivered[0].rollouts[1].task_id])
        rollouts.decline(delivered[1])
        # The fourth group was not delivered, and becomes too old.
        made.engine.version = 5
        rollouts.set_version(5)
        await made.wait_for_starts(10)
        (again,) = rollouts.return_groups()
        assert rollouts.return_groups() == ()
        assert (again.group_id, again.task_ids) == (delivered[2].group_id, handles[2].task_ids)
        with pytest.raises(RolloutError, match="not declined yet"):
            rollouts.decline(delivered[2])
        made.engine.version = 9
        rollouts.set_version(9)
        made.end(*handles[3].task_ids)
        await made.wait_until(lambda: len(rollouts.ready_ids()) == 2)
        assert not again.done()
        first, second = await rollouts.next_batch(2, deadline_s=DEADLINE_S, keep=True)
        assert first == delivered[2] == await again == await handles[2]
        assert second.group_id == handles[3].group_id
        assert [rollout.versions for rollout in second.rollouts] == [(9, 9), (9, 9)]
        # A group may be returned and declined more than once.
        assert [handle.group_id for handle in rollouts.return_groups()] == [
            first.group_id,
            second.group_id,
        ]
        for group in await rollouts.next_batch(2, deadline_s=DEADLINE_S, keep=True):
            rollouts.decline(group)
        assert rollouts.return_groups() == ()
        assert rollouts.stats().outstanding == 0


async def test_one_task_id_is_acknowledged_as_an_id_and_not_as_its_characters(
    tmp_path: Path,
) -> None:
    file = tmp_path / "journal"
    async with rig(journal=file) as made:
        handle = made.rollouts.submit_workflow_group("w", None, 2, SAMPLING)
        await made.wait_for_starts(2)
        made.end(*handle.task_ids)
        group = await made.next_group()
        made.rollouts.acknowledge(group.rollouts[0].task_id)
    async with rig(journal=file) as made:
        assert made.rollouts.recovered.groups == {}


async def test_wait_returns_the_results_of_any_iterable_of_handles() -> None:
    async with rig() as made:
        handles = [made.rollouts.submit_workflow("w", None, SAMPLING) for _ in range(3)]
        await made.wait_for_starts(3)
        made.end(*[handle.task_id for handle in reversed(handles)])
        found = await made.rollouts.wait(iter(handles), deadline_s=DEADLINE_S)
        assert [each.task_id for each in found] == [handle.task_id for handle in handles]


@pytest.mark.parametrize("wrong", ["unknown", "repeated"])
async def test_take_delivers_no_group_if_one_id_is_wrong(wrong: str) -> None:
    async with rig() as made:
        rollouts = made.rollouts
        handle = rollouts.submit_workflow_group("w", None, 2, SAMPLING)
        await made.wait_for_starts(2)
        made.end(*handle.task_ids)
        await made.wait_until(lambda: rollouts.ready_ids() == [handle.group_id])
        bad = handle.group_id + (wrong == "unknown")
        rule = "complete, not delivered and given once"
        with pytest.raises(
            RolloutError, match=rf"take: group_ids must be {rule}, got {bad}; .*ready_ids"
        ):
            rollouts.take([handle.group_id, bad])
        assert rollouts.ready_ids() == [handle.group_id]
        assert not handle.done()
        with pytest.raises(
            RolloutError, match=r"peek: group_id must be complete .*, got 7; .*ready_ids"
        ):
            rollouts.peek(7)
        (group,) = rollouts.take(iter([handle.group_id]))
        assert group.group_id == handle.group_id


async def test_a_new_answer_of_a_returned_group_may_become_too_old() -> None:
    async with rig(max_staleness=1, max_rejections=3) as made:
        rollouts = made.rollouts
        handle = rollouts.submit_workflow_group("w", None, 2, SAMPLING)
        kept, replaced = handle.task_ids
        await made.wait_for_starts(2)
        made.end(kept, replaced)
        (delivered,) = await rollouts.next_batch(1, deadline_s=DEADLINE_S, keep=True)
        made.engine.version = 5
        rollouts.set_version(5)
        rollouts.return_groups()
        rollouts.replace({replaced: "its tensor is lost"})
        await made.wait_for_starts(3)
        made.end(replaced)
        await made.wait_until(lambda: bool(rollouts.ready_ids()))
        # The new answer of version 5 is now too old. The old answer of the other rollout stays.
        made.engine.version = 7
        rollouts.set_version(7)
        assert rollouts.ready_ids() == []
        await made.wait_for_starts(4)
        assert made.started[2:] == [replaced, replaced]
        made.end(replaced)
        group = await made.next_group()
        assert group.rollouts[0] == delivered.rollouts[0]
        assert group.rollouts[1].versions == (7, 7)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_replaced_answers_of_returned_groups_do_not_wait_for_the_bound(
    tmp_path: Path, is_killed: bool
) -> None:
    """The bound admits one group at a time. The answers that stay in two returned groups use it up."""
    setting = partial(
        rig, max_staleness=0, batch_size=2, max_rejections=2, journal=tmp_path / "journal"
    )
    delivered: list[RolloutGroup] = []
    groups: tuple[RolloutGroup, ...] = ()
    async with setting() as made:
        for number in range(2):
            handle = made.rollouts.submit_workflow_group("w", number, 2, SAMPLING)
            await made.wait_for_starts(2 * number + 2)
            made.end(*handle.task_ids)
            delivered += await made.rollouts.next_batch(1, deadline_s=DEADLINE_S, keep=True)
            made.rollouts.count_from(0)
        made.rollouts.return_groups()
        replaced = [group.rollouts[1].task_id for group in delivered]
        made.rollouts.pause()
        made.rollouts.replace(dict.fromkeys(replaced, "cannot be scored"))
        if not is_killed:
            made.rollouts.resume()
            await made.wait_for_starts(6)
            made.end(*replaced)
            groups = await made.rollouts.next_batch(2, deadline_s=DEADLINE_S)
    if is_killed:
        async with setting() as made:
            await made.wait_for_starts(2)
            assert sorted(made.started) == sorted(replaced)
            made.end(*replaced)
            groups = await made.rollouts.next_batch(2, deadline_s=DEADLINE_S)
    # The other answers stay.
    assert [[each.attempts for each in group.rollouts] for group in groups] == [[1, 2], [1, 2]]


async def test_replaced_answers_keep_their_place_beside_returned_groups() -> None:
    """The bound admits two groups, and a step takes two. One returned group waits beside two incomplete groups."""
    async with rig(max_staleness=0, batch_size=4, max_rejections=2) as made:
        handles = []
        for number in range(4):
            handles.append(made.rollouts.submit_workflow_group("w", number, 2, SAMPLING))
            await made.wait_for_starts(2 * number + 2)
            made.end(*handles[-1].task_ids)
            if number < 2:
                await made.rollouts.next_batch(1, deadline_s=DEADLINE_S, keep=True)
                made.rollouts.count_from(0)
        await made.wait_until(lambda: len(made.rollouts.ready_ids()) == 2)
        made.rollouts.return_groups()
        await made.next_group()
        replaced = [handle.task_ids[1] for handle in handles[2:]]
        made.rollouts.replace(dict.fromkeys(replaced, "cannot be scored"))
        await made.wait_for_starts(10)
        made.end(*replaced)
        groups = await made.rollouts.next_batch(3, deadline_s=DEADLINE_S)
        assert [group.group_id for group in groups] == [1, 2, 3]


async def test_groups_are_returned_only_if_they_were_kept() -> None:
    async with rig() as made:
        handle = made.rollouts.submit_workflow_group("w", None, 2, SAMPLING)
        await made.wait_for_starts(2)
        made.end(*handle.task_ids)
        await made.next_group()
        assert made.rollouts.return_groups() == ()


@pytest.mark.parametrize("acknowledge", [True, False])
async def test_journal_counts_a_returned_group_once(tmp_path: Path, acknowledge: bool) -> None:
    file = tmp_path / "journal"
    async with rig(journal=file, acknowledge=acknowledge) as made:
        handles = [
            made.rollouts.submit_workflow_group("w", number, 2, SAMPLING) for number in range(3)
        ]
        await made.wait_for_starts(6)
        for handle in handles:
            made.end(*handle.task_ids)
        delivered = await made.rollouts.next_batch(3, deadline_s=DEADLINE_S, keep=True)
        made.rollouts.return_groups()
        again = await made.rollouts.next_batch(2, deadline_s=DEADLINE_S, keep=True)
        assert again == delivered[:2]
        made.rollouts.acknowledge([delivered[0].rollouts[0].task_id])
    entry: Any = Entry
    state = PersistedState.of(read_entries(file, entry)[0])
    assert state is not None
    # Without acknowledgements, a group leaves the journal with its first delivery.
    left = [each for handle in handles[1:] for each in handle.task_ids]
    assert [*state.tasks] == (left if acknowledge else [])
    assert state.started.consumed == (2 if acknowledge else 4)
    async with rig(journal=file, acknowledge=acknowledge) as made:
        assert made.rollouts.ready_ids() == [
            handle.group_id for handle in handles[1:] if acknowledge
        ]


async def test_failed_rollout_ends_its_group_only_below_the_smallest_size() -> None:
    async with rig() as made:
        handle = made.rollouts.submit_workflow_group("w", None, 3, SAMPLING, min_samples=2)
        a, b, c = handle.task_ids
        await made.wait_for_starts(3)
        # The first rollout gives the group's future its id, and has ended before the others.
        made.end(a, result="reject")
        made.end(b)
        made.end(c)
        group = await made.next_group()
        assert ids(group) == [b, c]

        handle = made.rollouts.submit_workflow_group("w", None, 3, SAMPLING, min_samples=2)
        a, b, c = handle.task_ids
        await made.wait_for_starts(6)
        made.end(a, b, result="reject")
        with pytest.raises(RolloutError, match="rejected 1 times"):
            await handle
        await made.wait_for_cancels(1)
        assert made.cancelled == [c]


async def test_cancelled_handle_cancels_a_group_whose_first_rollout_has_ended() -> None:
    async with rig() as made:
        handle = made.rollouts.submit_workflow_group("w", None, 3, SAMPLING, min_samples=1)
        a, b, c = handle.task_ids
        await made.wait_for_starts(3)
        made.end(a, result="reject")
        await made.wait_until(lambda: made.rollouts.stats().failed == 1)
        handle.cancel()
        await made.wait_for_cancels(2)
        assert sorted(made.cancelled) == sorted((b, c))
        assert made.rollouts.stats().outstanding == 0


async def test_restarted_controller_continues_groups_without_their_ended_rollouts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "journal"
    async with rig(journal=file) as made:
        spare = made.rollouts.submit_workflow_group("w", 0, 2, SAMPLING, num_extra=1)
        small = made.rollouts.submit_workflow_group("w", 1, 3, SAMPLING, min_samples=2)
        whole = made.rollouts.submit_workflow_group("w", 2, 2, SAMPLING, min_samples=1)
        await made.wait_for_starts(8)
        made.end(*spare.task_ids[1:])
        await made.wait_for_cancels(1)
        made.end(small.task_ids[0], result="reject")
        made.end(small.task_ids[2])
        made.end(*whole.task_ids)
        delivered = [await made.next_group() for _ in range(2)]
        assert [ids(group) for group in delivered] == [
            list(spare.task_ids[1:]),
            list(whole.task_ids),
        ]
        made.rollouts.acknowledge(ids(delivered[1])[:1])
    async with rig(journal=file) as made:
        recovered = made.rollouts.recovered
        assert tasks_of(recovered) == [spare.task_ids[1:], small.task_ids[1:]]
        # The unacknowledged group is delivered again, without its cancelled rollout.
        assert ids(await made.next_group()) == list(spare.task_ids[1:])
        await made.wait_for_starts(1)
        assert made.started == [small.task_ids[1]]
        made.end(*made.started)
        assert ids(await made.next_group()) == list(small.task_ids[1:])


def tasks_of(recovered: Recovered) -> list[Sequence[str]]:
    return [handle.task_ids for handle in recovered.groups.values()]


async def test_dropped_rollout_leaves_a_group_that_may_be_smaller() -> None:
    async with rig(max_staleness=0, max_resubmits=0) as made:
        handle = made.rollouts.submit_workflow_group("w", None, 2, SAMPLING, min_samples=1)
        a, b = handle.task_ids
        await made.wait_for_starts(2)
        made.end(a)
        await made.wait_until(lambda: made.rollouts.stats().buffered == 1)
        made.engine.version = 1
        made.rollouts.set_version(1)
        assert made.rollouts.stats().dropped == 1
        made.end(b)
        assert ids(await made.next_group()) == [b]


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"num_extra": -1}, "num_extra must be an integer >= 0, got -1"),
        ({"num_extra": 1.5}, "num_extra must be an integer >= 0, got 1.5"),
        ({"min_samples": 0}, r"min_samples must be an integer in \[1, 4\], got 0"),
        ({"min_samples": 5}, r"min_samples must be an integer in \[1, 4\], got 5"),
    ],
)
async def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], error: str) -> None:
    async with rig() as made:
        with pytest.raises(ConfigError, match=error):
            made.rollouts.submit_group((1,), 4, SAMPLING, **sizes)


async def test_lost_rollouts_change_no_seed_also_after_a_restart(tmp_path: Path) -> None:
    seeded = SamplingParams(max_new_tokens=2, sampling_seed=100)
    config = RolloutConfig(journal=tmp_path / "journal", max_rejections=1)

    def life() -> Lifecycle:
        policy = StalenessPolicy.unbounded(64)
        return Lifecycle(policy, config, lambda _: None, lambda: None)

    def seeds(each: Lifecycle) -> list[int | None]:
        return [record.sampling().sampling_seed for record in each.table.records.values()]

    first = life()
    first.open()
    work = Work(prompt_ids=(1,), sampling=seeded)
    first.submit_group(work, GroupSize.of(3, 1, 1))
    assert seeds(first) == [100, 101, 102, 103]
    records = list(first.table.records.values())
    for record in records:
        first.start_attempt(record, "engine", "worker")
    first.retry(records[1], "refused", Partial(), ErrorKind.REFUSED)
    assert seeds(first) == [100, 102, 103]
    await first.journal.close()
    # The second process rewrites the file.
    for _ in range(2):
        after = life()
        after.open()
        assert seeds(after) == [100, 102, 103]
        await after.journal.close()
