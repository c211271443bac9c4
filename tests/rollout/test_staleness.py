"""The staleness bound and the bookkeeping, under any sequence of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.errors import ConfigError, ProtocolError, RolloutError
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import OutcomeStatus, Partial, RolloutOutcome, Work
from windlass.rollout.staleness import OnStale, StalenessPolicy
from windlass.rollout.table import Group, GroupSize, Record, State
from windlass.sampling import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=1)
EVENTS = st.lists(
    st.sampled_from(
        ["admit", "accept", "release", "discard", "consume", "back", "version", "skip", "again"]
    ),
    max_size=200,
)


@given(
    events=EVENTS,
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 6),
    max_concurrent=st.integers(1, 12),
    start_version=st.integers(0, 50),
)
def test_rollouts_never_run_further_ahead_than_the_bound(
    events: list[str], max_staleness: int, batch_size: int, max_concurrent: int, start_version: int
) -> None:
    policy = StalenessPolicy(max_staleness, batch_size, max_concurrent, start_version)

    def publish_again() -> None:
        policy.count_from(policy.version + 1)
        policy.set_version(policy.version + 1)
        assert policy.start_version == policy.version

    actions: dict[str, Callable[[], None]] = {
        "admit": policy.admit,
        "accept": policy.accept,
        "release": policy.release,
        "discard": policy.discard,
        "consume": lambda: policy.consume(batch_size),
        "back": lambda: policy.give_back(batch_size),
        "version": lambda: policy.set_version(policy.version + 1),
        "skip": lambda: policy.set_version(policy.version + 7),
        "again": publish_again,
    }
    for event in events:
        before = (policy.running, policy.accepted, policy.consumed, policy.version)
        try:
            actions[event]()
        except RolloutError:
            assert before == (policy.running, policy.accepted, policy.consumed, policy.version)
        ahead = policy.accepted - policy.consumed + policy.running
        assert 0 <= policy.running <= max_concurrent
        assert 0 <= policy.consumed <= policy.accepted
        assert ahead <= (max_staleness + 1) * batch_size
        elapsed = policy.version - policy.start_version
        limit = policy.start_consumed + (max_staleness + elapsed + 1) * batch_size
        assert policy.accepted + policy.running <= limit
        assert policy.start_consumed <= policy.consumed
        assert 0 <= policy.capacity() <= (max_staleness + 1) * batch_size - ahead


def test_a_policy_with_a_recovered_version_has_no_more_room_than_a_fresh_policy() -> None:
    fresh = StalenessPolicy(2, 8, 1000)
    recovered = StalenessPolicy(2, 8, 1000, start_version=500)
    assert recovered.capacity() == fresh.capacity() == 24


def test_a_jump_of_the_version_opens_no_unused_room() -> None:
    policy = StalenessPolicy(1, 4, 1000)
    for _ in range(8):
        policy.admit()
    policy.set_version(100)
    assert policy.capacity() == 0


def test_a_version_without_a_step_admits_no_batch_too_early() -> None:
    """A job continues from a checkpoint of 4 steps, and its journal has version 5."""
    policy = StalenessPolicy(1, 4, 1000)
    policy.restore(start_version=0, version=5, running=0, accepted=16, consumed=16)
    policy.count_from(6)
    policy.set_version(6)
    assert policy.capacity() == 8
    for _ in range(8):
        policy.admit()
        policy.accept()
    for version in range(7, 12):
        # A step trains one batch, and the next batch waits. A third batch of the same version would wait for two steps.
        policy.consume(4)
        assert policy.capacity() == 0
        policy.set_version(version)
        assert policy.capacity() == 4
        for _ in range(4):
            policy.admit()
            policy.accept()


def test_samples_that_are_delivered_again_take_the_place_of_new_samples() -> None:
    """A trainer continues at version 6 from a checkpoint of 3 steps. It has trained 5 steps, and the next batch waits."""
    policy = StalenessPolicy(1, 4, 1000)
    policy.restore(start_version=0, version=5, running=0, accepted=24, consumed=20)
    with pytest.raises(
        RolloutError, match=r"deliver_again: num_samples must be in \[0, 20\], got 21"
    ):
        policy.deliver_again(21)
    policy.deliver_again(8)
    policy.count_from(6)
    policy.set_version(6)
    assert (policy.accepted, policy.consumed, policy.capacity()) == (24, 12, 0)
    for version, capacity in ((7, 0), (8, 4)):
        policy.consume(4)
        assert policy.capacity() == 0
        policy.set_version(version)
        assert policy.capacity() == capacity


def test_the_oldest_token_decides_the_age() -> None:
    policy = StalenessPolicy(1, 4, 10, start_version=5)
    assert not policy.throws_away([4, 5, 5])
    assert policy.throws_away([5, 5, 3])
    assert not policy.throws_away([])


@pytest.mark.parametrize("bad", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_bounds_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        StalenessPolicy(*bad)


class Bench:
    """A lifecycle with this object as its workers."""

    def __init__(
        self,
        start_version: int = 0,
        on_stale: OnStale = OnStale.RESUBMIT,
        max_resubmits: int = 3,
    ) -> None:
        self.policy = StalenessPolicy(
            1, 4, 6, start_version, on_stale=on_stale, max_resubmits=max_resubmits
        )
        self.life = Lifecycle(
            self.policy,
            RolloutConfig(max_attempts=3, retry_backoff_s=1e-9),
            withdraw=self.withdrawn,
            work_changed=lambda: None,
        )
        self.at_worker: dict[str, int] = {}
        self.groups: list[Group] = []
        self.delivered: list[str] = []
        self.handed: list[list[str]] = []
        self.versions: dict[str, int] = {}
        self.num = 0

    def restarted(self) -> Bench:
        """Return another controller process, which learns only the version from the engines."""
        fresh = Bench(self.policy.version, self.policy.on_stale, self.policy.max_resubmits)
        fresh.num = self.num
        assert fresh.policy.capacity() <= 2 * 4
        for task_id, attempt in self.at_worker.items():
            assert fresh.life.find_running(task_id, attempt) is None, "answers to a dead process"
        return fresh

    def withdrawn(self, record: Record) -> None:
        assert self.at_worker.pop(record.task_id) == record.attempt

    def add_group(self, n: int) -> None:
        task_ids = [str(number) for number in range(self.num + 1, self.num + n + 1)]
        work = Work(prompt_ids=(1,), sampling=SAMPLING)
        group = Group.of(len(self.groups), task_ids, work, None, self.life.give_up_group)
        group.future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self.num += n
        for record in group.records:
            self.life.add(record)
        self.groups.append(group)

    def dispatch(self) -> None:
        table = self.life.table
        line = table.queued or (table.waiting if self.policy.capacity() > 0 else {})
        for record in list(line.values())[:1]:
            self.life.start_attempt(record, "engine", "worker")
            self.at_worker[record.task_id] = record.attempt

    def finish(self, status: OutcomeStatus, pick: int, version: int) -> None:
        if not self.at_worker:
            return
        task_id = sorted(self.at_worker)[pick % len(self.at_worker)]
        attempt = self.at_worker.pop(task_id)
        record = self.life.find_running(task_id, attempt)
        assert record is not None
        self.versions[task_id] = version
        self.life.end_attempt(record, outcome(task_id, attempt, status, version))
        assert self.life.find_running(task_id, attempt) is None, "a second delivery would be used"

    def hand_out(self) -> None:
        while self.life.table.ready:
            (group,) = self.life.deliver([*self.life.table.ready][:1])
            self.handed.append([rollout.task_id for rollout in group.rollouts])
            for rollout in group.rollouts:
                age = self.policy.version - min(rollout.versions)
                assert age <= self.policy.max_staleness or self.policy.on_stale is OnStale.TRAIN
                self.delivered.append(rollout.task_id)

    def audit(self) -> None:
        table, counts = self.life.table, self.life.table.counts
        found = len(table.waiting) + len(table.queued) + len(table.backoff) + len(table.buffered)
        found += len(self.at_worker)
        ended = counts.completed + counts.cancelled + counts.failed + counts.dropped
        assert counts.submitted == ended + found
        assert found == len(table.records)
        assert sum(len(each) for each in table.by_engine.values()) == len(self.at_worker)
        admitted = len(table.queued) + len(table.backoff) + len(self.at_worker)
        assert self.policy.running == admitted
        assert admitted + len(table.buffered) <= 2 * 4, "no more unconsumed than the bound allows"
        assert self.policy.accepted - self.policy.consumed == len(table.buffered)
        assert len(self.delivered) == len(set(self.delivered)) == counts.completed
        for group in table.ready.values():
            assert group.complete()
        self.audit_ages()

    def audit_ages(self) -> None:
        table, policy = self.life.table, self.policy
        counts = table.counts
        if policy.on_stale is OnStale.TRAIN:
            waste = (counts.too_old, counts.stopped_early, counts.dropped, counts.wasted_tokens)
            assert waste == (0, 0, 0, 0)
            return
        limit = policy.max_resubmits if policy.on_stale is OnStale.RESUBMIT else 0
        assert all(record.resubmits <= limit for record in table.records.values())
        for record in table.buffered.values():
            assert record.outcome is not None
            assert not policy.throws_away(record.outcome.versions())
        for running in table.by_engine.values():
            assert not any(
                policy.throws_away([record.oldest_version or 0]) for record in running.values()
            )
        for group in self.groups:
            ended = [record.state is State.ENDED for record in group.records]
            assert all(ended) or not any(ended), "a group ends as a whole"
            assert group.future.done() == all(ended)


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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "add",
                "go",
                "go",
                "ok",
                "ok",
                "ok",
                "old",
                "error",
                "reject",
                "out",
                "decline",
                "up",
                "cancel",
                "restart",
            ]
        ),
        st.integers(0, 50),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, on_stale=st.sampled_from(OnStale), max_resubmits=st.integers(0, 3))
def test_every_rollout_is_in_exactly_one_place_and_delivered_at_most_once(
    steps: list[tuple[str, int]], on_stale: OnStale, max_resubmits: int
) -> None:
    async def run() -> None:
        bench = Bench(0, on_stale, max_resubmits)
        for step, number in steps:
            version = bench.policy.version
            match step:
                case "add":
                    bench.add_group(1 + number % 4)
                case "go":
                    bench.dispatch()
                case "ok":
                    bench.finish(OutcomeStatus.ACCEPTED, number, version)
                case "old":
                    bench.finish(OutcomeStatus.ACCEPTED, number, version - 1 - number % 3)
                case "error":
                    bench.finish(OutcomeStatus.ERROR, number, version)
                case "reject":
                    bench.finish(OutcomeStatus.REJECTED, number, version)
                case "out":
                    bench.hand_out()
                case "decline" if bench.handed:
                    bench.life.decline(bench.handed.pop(number % len(bench.handed)))
                case "up":
                    bench.life.set_version(version + 1 + number % 2)
                case "restart":
                    dead, bench = bench, bench.restarted()
                    for group in dead.groups:
                        dead.life.cancel(group)
                case "cancel" if bench.groups:
                    bench.life.cancel(bench.groups[number % len(bench.groups)])
                case _:
                    pass
            await asyncio.sleep(0)
            bench.audit()
        for group in bench.groups:
            bench.life.cancel(group)
        bench.audit()
        assert not bench.life.table.records
        assert bench.policy.running == 0

    asyncio.run(run())


async def test_a_group_is_never_ready_before_its_last_sample() -> None:
    bench = Bench()
    bench.add_group(3)
    for _ in range(3):
        assert not bench.life.table.ready
        bench.dispatch()
        bench.finish(OutcomeStatus.ACCEPTED, 0, 0)
    assert list(bench.life.table.ready) == [0]
    assert all(record.state is State.BUFFERED for record in bench.groups[0].records)


async def test_cancelling_the_future_cancels_the_whole_group_at_once() -> None:
    """Any cancellation works, for example by `asyncio.wait_for`, which has no handle."""
    bench = Bench()
    work = Work(prompt_ids=(1,), sampling=SAMPLING)
    single, group = bench.life.submit(work), bench.life.submit_group(work, GroupSize.of(3))
    bench.dispatch()
    assert list(bench.at_worker) == [single.task_id]
    assert single.future.cancel()
    assert group.future.cancel()
    assert not bench.at_worker
    assert not bench.life.table.records
    for handle in (single, group):
        handle.cancel()
        assert not handle.future.cancel()
    assert bench.life.table.counts.cancelled == 4


async def test_declined_groups_always_free_their_room() -> None:
    # Two batches of 4 may be ahead, and the version never grows.
    bench = Bench()
    for _ in range(20):
        bench.add_group(4)
        for _ in range(4):
            bench.dispatch()
            bench.finish(OutcomeStatus.ACCEPTED, 0, 0)
        bench.hand_out()
        bench.life.decline(bench.handed.pop())
        bench.audit()
    assert bench.life.table.counts.declined == len(bench.delivered) == 80
    assert (bench.policy.accepted, bench.policy.consumed, bench.policy.capacity()) == (0, 0, 6)


async def test_only_a_whole_group_can_be_declined_and_only_once() -> None:
    bench = Bench()
    bench.add_group(2)
    for _ in range(2):
        bench.dispatch()
        bench.finish(OutcomeStatus.ACCEPTED, 0, 0)
    with pytest.raises(RolloutError, match="must be delivered by this process"):
        bench.life.decline(["1", "2"])
    bench.hand_out()
    for wrong in (["1"], ["2", "1"], []):
        with pytest.raises(RolloutError, match="must be delivered by this process"):
            bench.life.decline(wrong)
    bench.life.decline(["1", "2"])
    with pytest.raises(RolloutError, match="not declined yet"):
        bench.life.decline(["1", "2"])


async def test_a_ready_group_loses_exactly_the_samples_that_became_too_old() -> None:
    bench = Bench()
    bench.add_group(2)
    for version in (0, 1):
        bench.dispatch()
        bench.life.set_version(version)
        bench.finish(OutcomeStatus.ACCEPTED, 0, version)
    old, young = bench.groups[0].records
    assert list(bench.life.table.ready) == [0]
    bench.life.set_version(2)
    assert not bench.life.table.ready
    assert (old.state, young.state) == (State.WAITING, State.BUFFERED)
    bench.audit()
    bench.dispatch()
    bench.finish(OutcomeStatus.ACCEPTED, 0, 2)
    bench.hand_out()
    assert bench.delivered == ["1", "2"]
    assert (bench.life.table.counts.too_old, bench.life.table.counts.wasted_tokens) == (1, 1)


@pytest.mark.parametrize("on_stale", OnStale)
async def test_a_group_that_lasts_three_versions_ends_as_configured(on_stale: OnStale) -> None:
    bench = Bench(0, on_stale, max_resubmits=2)
    bench.add_group(2)
    for version in range(1, 30):
        for _ in range(2):
            bench.dispatch()
        begun = bench.policy.version - 2
        for task_id in sorted(bench.at_worker):
            if bench.life.table.records[task_id].oldest_version == begun:
                bench.finish(OutcomeStatus.ACCEPTED, 0, begun)
        bench.hand_out()
        bench.life.set_version(version)
        bench.audit()
    counts = bench.life.table.counts
    assert bench.groups[0].future.done()
    assert not bench.at_worker
    assert not bench.life.table.records
    assert bench.policy.capacity() > 0
    match on_stale:
        case OnStale.TRAIN:
            assert bench.groups[0].future.result().rollouts[0].versions == (0,)
            assert counts.completed == 2
        case OnStale.RESUBMIT:
            # Each sample is stopped twice, and one more ends the group.
            assert counts.stopped_early == 5
            with pytest.raises(RolloutError, match=r"dropped .* after 2 resubmissions"):
                bench.groups[0].future.result()
        case OnStale.DROP:
            assert counts.stopped_early == 1
            with pytest.raises(RolloutError, match=r"dropped .*\(on_stale=drop"):
                bench.groups[0].future.result()


async def test_finished_tokens_of_a_dropped_group_count_as_wasted() -> None:
    bench = Bench(0, OnStale.DROP)
    bench.add_group(3)
    for _ in range(3):
        bench.dispatch()
    bench.life.set_version(1)
    # This sample is young, but belongs to the same group.
    bench.finish(OutcomeStatus.ACCEPTED, 0, 1)
    bench.life.set_version(2)
    counts = bench.life.table.counts
    assert (counts.dropped, counts.stopped_early, counts.too_old) == (3, 1, 0)
    assert counts.wasted_tokens == 1
    assert (bench.policy.running, bench.policy.accepted, bench.policy.capacity()) == (0, 0, 6)
    assert not bench.at_worker, "the group's last sample must be stopped too"
    bench.audit()


async def test_an_unknown_choice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"on_stale must be one of .*'drop'.*, got 'ignore'"):
        StalenessPolicy(1, 1, 1, on_stale="ignore")  # type: ignore[arg-type]
    assert StalenessPolicy(1, 1, 1, on_stale="train").on_stale is OnStale.TRAIN  # type: ignore[arg-type]


def test_tokens_without_logprobs_are_refused() -> None:
    with pytest.raises(ProtocolError, match="the same length, got 2, 1, 2"):
        Partial((1, 2), (0.5,), (0, 0))
