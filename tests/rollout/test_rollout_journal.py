"""The journal of rollouts, under any sequence of events, kills, power cuts and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import os
import tempfile
import threading
from pathlib import Path
from stat import S_ISDIR

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.errors import ConfigError, RolloutError
from windlass.net.journal_file import read_entries
from windlass.rollout import (
    GroupHandle,
    OnStale,
    RolloutConfig,
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    journal,
)
from windlass.rollout.journal import Entry, PersistedState, RolloutJournal, VersionReached
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import ErrorKind, OutcomeStatus, Partial, RolloutOutcome, Work
from windlass.rollout.table import GroupSize, Record, State
from windlass.rollout.values import encode_value

SAMPLING = SamplingParams(max_new_tokens=1)
BATCH, MAX_STALENESS, MAX_RESUBMITS = 4, 1, 2


def prompt(prompt_ids: tuple[int, ...]) -> Work:
    return Work(prompt_ids=prompt_ids, sampling=SAMPLING)


def outcome(task_id: str, attempt: int, status: OutcomeStatus, version: int) -> RolloutOutcome:
    return RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        status=status,
        result=Partial((7,), (-0.5,), (version,)),
        engine="engine",
        worker="worker",
        finished_at=0.0,
    )


class Process:
    """State of a controller that a kill ends: records, counts, policy. Workers survive."""

    def __init__(self, path: Path, world: World) -> None:
        self.world = world
        self.policy = StalenessPolicy(
            *(MAX_STALENESS, BATCH, 6), on_stale=world.on_stale, max_resubmits=MAX_RESUBMITS
        )
        config = RolloutConfig(
            max_attempts=99,
            max_rejections=99,
            retry_backoff_s=1e-9,
            journal=path,
            acknowledge=True,
        )
        self.life = Lifecycle(self.policy, config, self.withdrawn, lambda: None)
        self.journal = self.life.journal
        self.recovered = self.life.open()
        self.run = self.life.first_attempt >> 20
        # Samples that waited or ran after the newest `return_groups`; they may be more than the bound allows.
        self.num_returned = 0
        self.table = self.life.table
        for handle in self.recovered.groups.values():
            # The handle lacks the rollouts that had ended before.
            whole = world.groups.get(handle.task_ids[0], handle.task_ids)
            self.watch(dataclasses.replace(handle, task_ids=tuple(whole)))
        # Workers report the attempts that they still have. Lost attempts are retried.
        for record in self.running():
            if (record.task_id, record.attempt) not in world.at_workers:
                self.life.retry(record, "unknown", Partial())

    def watch(self, handle: GroupHandle) -> None:
        def ended(done: asyncio.Future[RolloutGroup]) -> None:
            if done.cancelled() or (error := done.exception()) is None:
                return
            ended = self.world.dropped if "dropped" in str(error) else self.world.failed
            ended.add(frozenset(handle.task_ids))

        handle.future.add_done_callback(ended)

    def resubmits(self) -> dict[str, int]:
        return {task_id: record.resubmits for task_id, record in self.table.records.items()}

    def running(self) -> list[Record]:
        return [r for records in self.table.by_engine.values() for r in records.values()]

    def withdrawn(self, record: Record) -> None:
        self.world.at_workers.pop((record.task_id, record.attempt), None)

    def dispatch(self) -> None:
        table = self.table
        line = table.queued or (table.waiting if self.policy.capacity() > 0 else {})
        for record in list(line.values())[:1]:
            self.life.start_attempt(record, "engine", "worker")
            self.journal.flush()
            key = (record.task_id, record.attempt)
            assert key not in self.world.sent, "a worker ignores an attempt that it has seen"
            self.world.sent.add(key)
            self.world.at_workers[key] = -1

    def replace(self, pick: int) -> None:
        """Replace one answer of a complete group."""
        if self.table.ready:
            groups = list(self.table.ready.values())
            records = groups[pick % len(groups)].records
            self.life.replace({records[pick % len(records)].task_id: "cannot be scored"})
            self.journal.flush()

    def finish(
        self,
        pick: int,
        status: OutcomeStatus,
        version: int,
        kind: ErrorKind = ErrorKind.PASSING,
    ) -> None:
        """Deliver a worker's outcome. The worker drops only acknowledged outcomes."""
        if not self.world.at_workers:
            return
        key = sorted(self.world.at_workers)[pick % len(self.world.at_workers)]
        record = self.life.find_running(*key)
        if record is not None:
            found = outcome(*key, status, version)
            self.life.end_attempt(record, msgspec.structs.replace(found, error_kind=kind))
        self.journal.flush()
        self.world.at_workers.pop(key, None)

    def hand_out(self, *, acknowledge: bool) -> list[list[str]]:
        handed = []
        while self.table.ready:
            first = next(iter(self.table.ready.values()))
            returned = {record.task_id for record in first.records if record.is_returned}
            (group,) = self.life.deliver([*self.table.ready][:1], keep=True)
            self.journal.flush()
            for rollout in group.rollouts:
                young = self.policy.version - min(rollout.versions) <= MAX_STALENESS
                again = rollout.task_id in returned
                assert young or again or self.policy.on_stale is OnStale.TRAIN
            handed.append([rollout.task_id for rollout in group.rollouts])
            delivered = frozenset(handed[-1])
            ids = self.world.groups.get(handed[-1][0], delivered)
            size = self.world.sizes.get(ids) or GroupSize.of(len(ids))
            assert ids.issuperset(handed[-1])
            assert size.min_samples <= len(set(handed[-1])) == len(handed[-1]) <= size.num_wanted
            if acknowledge:
                # The owner has stored the group and acknowledges it.
                assert ids not in self.world.stored
                self.world.stored.append(ids)
                self.world.delivered.append(handed[-1][0])
                self.life.acknowledge(handed[-1][0])
                self.journal.flush()
        return handed

    def return_groups(self) -> None:
        """Return all delivered groups that are not acknowledged, and continue with a version that contains none of them."""
        for handle in self.life.return_groups():
            self.watch(
                dataclasses.replace(handle, task_ids=tuple(self.world.groups[handle.task_ids[0]]))
            )
        self.num_returned = self.policy.accepted + self.policy.running
        self.policy.count_from(self.policy.version + 1)
        self.life.set_version(self.policy.version + 1)
        self.journal.flush()

    def audit(self) -> None:
        table, counts, policy = self.table, self.table.counts, self.policy
        running = self.running()
        found = len(table.waiting) + len(table.queued) + len(table.backoff) + len(table.buffered)
        found += len(running)
        ended = counts.completed + counts.cancelled + counts.failed + counts.dropped
        assert counts.submitted == ended + found
        assert found == len(table.records)
        assert policy.running == len(table.queued) + len(table.backoff) + len(running)
        assert policy.accepted - policy.consumed == len(table.buffered)
        elapsed = policy.version - policy.start_version
        limit = policy.start_consumed + (MAX_STALENESS + elapsed + 1) * BATCH
        assert policy.accepted + policy.running <= max(limit, self.num_returned)


class World:
    """State that survives a kill: workers, the owner's store, and the file."""

    def __init__(self, path: Path, on_stale: OnStale = OnStale.RESUBMIT) -> None:
        self.path, self.on_stale = path, on_stale
        self.at_workers: dict[tuple[str, int], int] = {}
        self.sent: set[tuple[str, int]] = set()
        self.stored: list[frozenset[str]] = []
        self.wanted: list[frozenset[str]] = []
        self.cancelled: set[frozenset[str]] = set()
        self.dropped: set[frozenset[str]] = set()
        self.failed: set[frozenset[str]] = set()
        self.delivered: list[str] = []
        """One delivered rollout of each stored group."""
        self.groups: dict[str, frozenset[str]] = {}
        """Task id -> ids of all rollouts that were submitted with it."""
        self.sizes: dict[frozenset[str], GroupSize] = {}

    async def restarted(self, old: Process, torn: int) -> Process:
        """Restart after a kill, or after a power cut that lost the last `torn` bytes of the file."""
        await old.journal.close()
        if torn:
            data = self.path.read_bytes()
            # The record of a start is on disk before any other.
            first = data.index(b"\n") + 1
            self.path.write_bytes(data[: max(first, len(data) - torn)])
        fresh = Process(self.path, self)
        fresh.audit()
        if not torn:
            # No answer becomes too old by the restart, also if it was delivered and is not acknowledged.
            before, after = old.resubmits(), fresh.resubmits()
            assert [t for t in before if after.get(t, before[t]) != before[t]] == []
            if fresh.policy.version == old.policy.version:
                assert fresh.table.counts.too_old == fresh.table.counts.dropped == 0
        assert max(fresh.resubmits().values(), default=0) <= MAX_RESUBMITS
        return fresh


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "add",
                "go",
                "go",
                "go",
                "ok",
                "ok",
                "ok",
                "old",
                "error",
                "reject",
                "refuse",
                "replace",
                "out",
                "keep",
                "return",
                "decline",
                "up",
                "cancel",
                "kill",
                "cut",
            ]
        ),
        st.integers(0, 50),
    ),
    max_size=100,
)


@settings(deadline=None, max_examples=120)
@given(steps=STEPS, on_stale=st.sampled_from(OnStale))
@example(steps=[("add", 0), ("go", 0), ("error", 0), ("up", 1)], on_stale=OnStale.RESUBMIT)
@example(
    steps=[("add", 0), ("go", 0), ("ok", 0), ("keep", 0), ("up", 1), ("kill", 0)],
    on_stale=OnStale.RESUBMIT,
)
@example(
    steps=[("add", 0), ("go", 0), ("ok", 0), ("keep", 0), ("return", 0), ("up", 5), ("kill", 0)],
    on_stale=OnStale.RESUBMIT,
)
def test_every_rollout_is_delivered_once_within_the_bound_after_any_kills(
    steps: list[tuple[str, int]], on_stale: OnStale
) -> None:
    async def run(path: Path) -> None:
        world = World(path, on_stale)
        process = Process(path, world)
        cut = False
        for step, number in steps:
            version = process.policy.version
            match step:
                case "add":
                    n = 1 + number % 4
                    size = GroupSize.of(n, number // 4 % 3, 1 + number // 12 % n)
                    handle = process.life.submit_group(prompt((1,)), size, metadata=number)
                    together = frozenset(handle.task_ids)
                    world.wanted.append(together)
                    world.groups.update(dict.fromkeys(together, together))
                    world.sizes[together] = size
                    process.watch(handle)
                case "go":
                    process.dispatch()
                case "ok":
                    process.finish(number, OutcomeStatus.ACCEPTED, version)
                case "old":
                    process.finish(number, OutcomeStatus.ACCEPTED, version - 1 - number % 3)
                case "error":
                    process.finish(number, OutcomeStatus.ERROR, version)
                case "reject":
                    process.finish(number, OutcomeStatus.REJECTED, version)
                case "refuse":
                    process.finish(number, OutcomeStatus.ERROR, version, ErrorKind.REFUSED)
                case "replace":
                    process.replace(number)
                case "out":
                    process.hand_out(acknowledge=True)
                case "keep":
                    process.hand_out(acknowledge=False)
                case "return":
                    process.return_groups()
                case "decline":
                    for ids in process.hand_out(acknowledge=False):
                        process.life.decline(ids)
                        world.cancelled.add(world.groups[ids[0]])
                case "up":
                    process.life.set_version(version + 1 + number % 2)
                case "kill":
                    process = await world.restarted(process, 0)
                case "cut":
                    # A power cut can bring a stored group back, until the owner acknowledges it
                    # again.
                    process = await world.restarted(process, number * 40)
                    cut = True
                    for task_id in world.delivered:
                        process.life.acknowledge(task_id)
                case "cancel" if process.table.records:
                    record = next(iter(process.table.records.values()))
                    world.cancelled.add(world.groups[record.task_id])
                    process.life.cancel(record.group)
                case _:
                    pass
            await asyncio.sleep(0)
            process.audit()
        # All groups must end that were not cancelled or lost before they were on disk.
        process = await world.restarted(process, 0)
        for _ in itertools.takewhile(lambda _: process.table.records, range(1000)):
            for _ in range(2 * BATCH):
                process.dispatch()
                # Backoffs end here.
                await asyncio.sleep(0)
            while world.at_workers:
                process.finish(0, OutcomeStatus.ACCEPTED, process.policy.version)
            process.hand_out(acknowledge=True)
            process.life.set_version(process.policy.version + 1)
        process.audit()
        assert not process.table.records
        assert process.policy.running == 0
        if not cut:
            ended = world.cancelled | world.dropped | world.failed
            assert set(world.wanted) == set(world.stored) | ended
            assert not world.dropped or on_stale is not OnStale.TRAIN
        assert len(set(world.stored)) == len(world.stored)
        await process.journal.close()
        left = RolloutJournal(RolloutConfig(journal=path)).open(0)
        assert not left.tasks

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(run(Path(folder, "rollouts.journal")))


async def test_a_restarted_process_recovers_prompts_groups_and_metadata(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "journal")
    first = Process(world.path, world)
    first.life.submit_group(prompt((1, 2)), GroupSize.of(3), metadata={"row": 7})
    single = first.life.submit(
        Work(
            prompt_ids=(5,),
            sampling=SamplingParams(max_new_tokens=9, temperature=0.5),
            deadline_s=3.0,
        )
    )
    flow = first.life.submit(
        Work(
            sampling=SAMPLING,
            workflow="tools",
            arguments=encode_value("", {"seats": [1, 2]}),
        ),
        metadata="m",
    )
    first.dispatch()
    second = await world.restarted(first, 0)
    (group_id, group), *_ = second.recovered.groups.items()
    assert (group_id, len(group.task_ids), group.metadata) == (0, 3, {"row": 7})
    assert set(second.recovered.rollouts) == {single.task_id, flow.task_id}
    record = second.table.records[single.task_id]
    assert (record.work.prompt_ids, record.work.sampling.temperature, record.work.deadline_s) == (
        (5,),
        0.5,
        3.0,
    )
    record = second.table.records[flow.task_id]
    assert (record.work.workflow, record.work.arguments, record.metadata) == (
        "tools",
        b"\x81\xa5seats\x92\x01\x02",
        "m",
    )
    assert [r.state for r in second.table.records.values()].count(State.RUNNING) == 1
    new = second.life.submit(prompt((1,)))
    assert new.task_id not in {*first.table.records, *second.recovered.rollouts}
    assert second.life.identity == first.life.identity, "workers keep what they run for it"
    await second.journal.close()


async def test_a_rollouts_resubmits_and_first_version_survive_a_kill(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "journal")
    process = Process(world.path, world)
    handle = process.life.submit_group(prompt((1,)), GroupSize.of(1))
    process.watch(handle)
    (task_id,) = handle.task_ids
    for life in range(MAX_RESUBMITS + 1):
        process.dispatch()
        assert process.table.records[task_id].oldest_version == process.policy.version
        process = await world.restarted(process, 0)
        record = process.table.records[task_id]
        assert (record.resubmits, record.oldest_version) == (life, process.policy.version)
        assert record.state is State.RUNNING
        process.life.set_version(process.policy.version + 2)
        assert not world.at_workers, "the worker must have stopped it"
        process = await world.restarted(process, 0)
    # Run the callbacks of futures.
    await asyncio.sleep(0)
    assert not process.table.records
    assert world.dropped == {frozenset(handle.task_ids)}
    await process.journal.close()


async def test_a_restarted_controller_handles_rollouts_that_became_too_old(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "journal", OnStale.DROP)
    first = Process(world.path, world)
    told = first.life.submit(prompt((2,)))
    first.dispatch()
    # The owner got this outcome and did not acknowledge it.
    first.finish(0, OutcomeStatus.ACCEPTED, 0)
    first.life.submit_group(prompt((1,)), GroupSize.of(2))
    running = first.life.submit(prompt((3,)))
    for _ in range(3):
        first.dispatch()
    first.finish(0, OutcomeStatus.ACCEPTED, 0)
    # The process ends before it acts on this version.
    first.journal.add(VersionReached(5))
    second = await world.restarted(first, 0)
    assert (await second.recovered.rollouts[told.task_id]).versions == (0,)
    for handle in (second.recovered.groups[0], second.recovered.rollouts[running.task_id]):
        with pytest.raises(RolloutError, match="too old for version 5"):
            await handle
    assert second.table.counts.dropped == 3
    await second.journal.close()


async def test_handing_out_ends_a_rollout_unless_the_owner_acknowledges_itself(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    policy = StalenessPolicy(MAX_STALENESS, BATCH, 6)
    life = Lifecycle(policy, RolloutConfig(journal=path), lambda _: None, lambda: None)
    life.open()
    handle = life.submit(prompt((1,)))
    record = life.table.records[handle.task_id]
    life.start_attempt(record, "engine", "worker")
    life.end_attempt(record, outcome(handle.task_id, 1, OutcomeStatus.ACCEPTED, 0))
    assert (await handle).attempts == 1
    await life.journal.close()
    persisted = PersistedState.of(journal_entries(path))
    assert persisted is not None
    assert (persisted.tasks, persisted.started.consumed) == ({}, 1)


def journal_entries(path: Path) -> list[Entry]:
    entries: list[Entry]
    entries, _ = read_entries(path, Entry)  # type: ignore[arg-type]
    return entries


async def test_a_journal_in_use_or_without_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = RolloutJournal(RolloutConfig(journal=path))
    journal.open(0)
    with pytest.raises(ConfigError, match=r"journal .*journal: another process has it open"):
        RolloutJournal(RolloutConfig(journal=path)).open(0)
    await journal.close()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot be used: .*it is not a regular file"):
        RolloutJournal(RolloutConfig(journal=tmp_path / "pipe")).open(0)
    with pytest.raises(ConfigError, match="cannot be used"):
        RolloutJournal(RolloutConfig(journal=path / "below")).open(0)


async def test_metadata_that_a_journal_cannot_store_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "journal")
    process = Process(world.path, world)
    with pytest.raises(ConfigError, match="metadata: must be msgpack-plain, got object"):
        process.life.submit(prompt((1,)), metadata=object())
    assert not process.table.records
    await process.journal.close()
    with pytest.raises(RolloutError, match="is not open"):
        process.life.submit(prompt((1,)))


async def test_a_full_disk_stops_admission_and_delivery_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "WRITE_AGAIN_S", 0.01)
    world = World(tmp_path / "journal")
    process = Process(world.path, world)
    handle = process.life.submit_group(prompt((1,)), GroupSize.of(1))
    process.journal.flush()
    process.dispatch()
    has_room, changes = asyncio.Event(), 0

    def changed() -> None:
        nonlocal changes
        changes += 1
        if not process.journal.broken:
            has_room.set()

    process.journal.on_change(changed)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(RolloutError, match="No space left"):
            process.finish(0, OutcomeStatus.ACCEPTED, 0)
        for _ in range(3):
            with pytest.raises(RolloutError, match="No space left"):
                process.life.submit(prompt((1,)))
        # The write is repeated and fails again.
        await asyncio.sleep(0.05)
        assert process.journal.broken
        assert len(caplog.records) == changes == 1, "must be logged once, without a traceback"
    assert world.at_workers, "the worker keeps what was not acknowledged"
    # The records in the file are whole: a process can continue from them after a kill.
    left = PersistedState.of(journal_entries(world.path))
    assert left is not None
    assert [(task.running, task.outcome) for task in left.tasks.values()] == [(True, None)]
    async with asyncio.timeout(10):
        await has_room.wait()
    process.life.submit(prompt((1,)))
    assert process.hand_out(acknowledge=True) == [list(handle.task_ids)]
    second = await world.restarted(process, 0)
    assert [r.state for r in second.table.records.values()] == [State.WAITING]
    await second.journal.close()


async def test_a_local_rollout_that_ends_while_the_disk_is_full_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "WRITE_AGAIN_S", 0.01)
    num_started, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def gated(context: WorkflowContext) -> object:
        num_started.release()
        await may_end.wait()
        return context.arguments

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engines = StaticEngines([("engine", "http://127.0.0.1:9", 0)])
    config = RolloutConfig(journal=tmp_path / "journal")
    policy = StalenessPolicy.unbounded(4)
    async with RolloutController(engines, policy, config=config) as controller, asyncio.timeout(10):
        controller.run_here({"gated": gated})
        controller.submit_workflow_group("gated", 7, 2, SAMPLING)
        for _ in range(2):
            await num_started.acquire()
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            later = controller.submit_workflow("gated", 8, SAMPLING)
            may_end.set()
            await asyncio.sleep(0.05)
            assert controller.stats().completed == 0
        assert (await later).value == 8
        (group,) = await controller.next_batch(1, deadline_s=5)
        assert [rollout.value for rollout in group.rollouts] == [7, 7]
        stats = controller.stats()
        assert (stats.completed, stats.running, stats.retried) == (3, 0, 0)
    assert not [r for r in caplog.records if r.name == "asyncio"], "no traceback of a callback"


@pytest.mark.parametrize("acknowledge", [False, True])
async def test_groups_that_a_full_disk_keeps_from_delivery_are_delivered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acknowledge: bool
) -> None:
    monkeypatch.setattr(journal, "WRITE_AGAIN_S", 0.01)

    async def quick(context: WorkflowContext) -> object:
        return context.arguments

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engines = StaticEngines([("engine", "http://127.0.0.1:9", 0)])
    config = RolloutConfig(journal=tmp_path / "journal", acknowledge=acknowledge)
    policy = StalenessPolicy.unbounded(8)
    async with RolloutController(engines, policy, config=config) as controller, asyncio.timeout(10):
        changed = asyncio.Event()
        controller.on_change(changed.set)
        controller.run_here({"quick": quick})
        handles = [controller.submit_workflow_group("quick", n, 2, SAMPLING) for n in range(3)]
        while len(controller.ready_ids()) < 3:
            changed.clear()
            await changed.wait()
        # A checkpoint of the trainer has filled the disk, and nothing was written since then.
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            for _ in range(2):
                with pytest.raises(RolloutError, match="No space left"):
                    await controller.next_batch(2, deadline_s=5)
            await asyncio.sleep(0.05)
            assert controller.stats().completed == 0
            assert not any(handle.done() for handle in handles)
        while True:
            with contextlib.suppress(RolloutError):
                groups = await controller.next_batch(3, deadline_s=5)
                break
            await asyncio.sleep(0.01)
        assert [group.rollouts[1].value for group in groups] == [0, 1, 2]
        controller.acknowledge([group.rollouts[0].task_id for group in groups])
    left = PersistedState.of(journal_entries(tmp_path / "journal"))
    assert left is not None
    assert (left.tasks, left.started.consumed) == ({}, 6)


async def test_a_journal_that_was_removed_or_replaced_is_noticed(tmp_path: Path) -> None:
    world = World(tmp_path / "journal")
    process = Process(world.path, world)
    world.path.rename(tmp_path / "elsewhere")
    process.life.submit(prompt((1,)))
    with pytest.raises(RolloutError, match="was removed while it was open"):
        process.journal.flush()
    world.path.touch()
    with pytest.raises(RolloutError, match="was replaced while it was open"):
        process.journal.flush()
    with pytest.raises(OSError, match="was replaced"):
        await process.journal.close()


async def test_a_line_with_changed_content_fails_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    world = World(path)
    process = Process(path, world)
    process.life.set_version(5)
    await process.journal.close()
    path.write_bytes(path.read_bytes().replace(b'"version":5', b'"version":4'))
    with pytest.raises(ConfigError, match="checksum"):
        RolloutJournal(RolloutConfig(journal=path)).open(0)


async def test_a_start_is_on_disk_before_its_ids_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    calls: list[str] = []
    real_replace, real_fsync = Path.replace, os.fsync

    def replace(self: Path, target: Path) -> Path:
        calls.append("replace")
        return real_replace(self, target)

    def fsync(descriptor: int) -> None:
        calls.append("fsync" if S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    await Process(path, World(path)).journal.close()
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    second = Process(path, World(path))
    # A power cut could restore the file of the first process, and the third process would use the ids of the second.
    assert calls[-2:] == ["replace", "fsync"]
    await second.journal.close()


async def test_lines_written_during_a_sync_are_synced_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RolloutConfig(journal=tmp_path / "journal", journal_sync_s=0.001)
    journal = RolloutJournal(config)
    journal.open(0)
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    syncs: asyncio.Queue[None] = asyncio.Queue()
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        loop.call_soon_threadsafe(syncs.put_nowait, None)
        assert may_end.wait(10)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    async with asyncio.timeout(10):
        journal.add(VersionReached(1))
        journal.flush()
        await syncs.get()
        journal.add(VersionReached(2))
        journal.flush()
        may_end.set()
        await syncs.get()
    await journal.close()


async def test_closing_a_journal_syncs_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = RolloutJournal(RolloutConfig(journal=tmp_path / "journal", journal_sync_s=60.0))
    journal.open(0)
    journal.add(VersionReached(1))
    sizes: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    await journal.close()
    assert sizes == [(tmp_path / "journal").stat().st_size]


def failing(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("closes", [False, True], ids=["goes_on", "closes"])
async def test_a_failed_sync_stops_delivery_until_all_lines_are_in_a_new_file(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed sync, Linux counts the lost lines as written: the next sync succeeds without them."""
    path = tmp_path / "journal"
    config = RolloutConfig(journal=path, journal_sync_s=0.001)
    life = Lifecycle(StalenessPolicy.unbounded(100), config, lambda _: None, lambda: None)
    life.open()
    journal, fails, works = life.journal, asyncio.Event(), asyncio.Event()
    journal.on_change(lambda: (fails if journal.broken else works).set())
    kept = life.submit(prompt((9,)))
    inode = path.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        journal.flush()
        async with asyncio.timeout(10):
            await fails.wait()
        # The journal tries again, and fails again.
        await asyncio.sleep(0.05)
        with pytest.raises(RolloutError, match=r"cannot be synced to disk: .*Input/output error"):
            life.submit(prompt((1,)))
        assert len([r for r in caplog.records if "synced" in r.message]) == 1
        assert path.stat().st_ino == inode
        if closes:
            with pytest.raises(OSError, match="Input/output"):
                await journal.close()
    if not closes:
        async with asyncio.timeout(10):
            await works.wait()
        life.submit(prompt((1,)))
        assert path.stat().st_ino != inode
        await journal.close()
    persisted = RolloutJournal(RolloutConfig(journal=path)).open(0)
    assert kept.task_id in persisted.tasks


async def test_compaction_of_a_journal_removes_ended_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    policy = StalenessPolicy.unbounded(100)
    config = RolloutConfig(journal=path, journal_sync_s=0.001, journal_compact_nbytes=5_000)
    life = Lifecycle(policy, config, lambda _: None, lambda: None)
    life.open()
    journal = life.journal
    kept = life.submit(prompt((9,) * 10), metadata="kept")
    for _ in range(400):
        life.submit(prompt((1,) * 20)).cancel()
        journal.flush()
        if journal.upkeep is not None:
            await journal.upkeep
        await asyncio.sleep(0.0001)
    await journal.close()
    assert path.stat().st_size < 40_000
    persisted = RolloutJournal(RolloutConfig(journal=path)).open(0)
    assert set(persisted.tasks) == {kept.task_id}
