"""Table of all rollouts of a controller that have not ended.

Each rollout has a record in exactly one state: waiting for admission, queued for dispatch, parked until a
worker that knows its workflow has a free slot, running at a worker, in a backoff, or buffered until its group
is delivered. `RolloutStats.lost` counts submitted rollouts that have not ended and are in none of these states.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, final

import msgspec

from windlass.errors import ConfigError
from windlass.rollout.handles import Counts, Rollout
from windlass.rollout.messages import AttemptKey, Partial, RolloutOutcome, Work
from windlass.rollout.trajectories import whole_turns
from windlass.sampling import SamplingParams, is_count

NOTHING = Partial()


@final
class Deadlines:
    """Deadlines of many records. When the deadline of a record passes, the object calls `passed` with the record.

    All deadlines have the same length, so they pass in the order in which they started. One queue and one
    event-loop timer are therefore enough. This is faster than one timer per record, because tens of thousands
    of deadlines may run at a time.

    Args:
        length_s: length of every deadline.
        passed: called in the event loop with the record.
    """

    def __init__(self, length_s: float, passed: Callable[[Record], None]) -> None:
        self._length_s, self._passed = length_s, passed
        self._ends: dict[Record, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, record: Record) -> float:
        """Start a record's deadline; return when it passes, in seconds of the event loop's clock."""
        loop = asyncio.get_running_loop()
        ends = self._ends[record] = loop.time() + self._length_s
        if self._timer is None:
            self._timer = loop.call_at(ends, self._look)
        return ends

    def stop(self, record: Record) -> None:
        """Stop a record's deadline. Idempotent."""
        self._ends.pop(record, None)

    def _look(self) -> None:
        """Call `passed` for every deadline that has passed, and set the timer to the next deadline."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._ends:
            record, ends = next(iter(self._ends.items()))
            if ends > loop.time():
                self._timer = loop.call_at(ends, self._look)
                return
            del self._ends[record]
            self._passed(record)


class State(Enum):
    """State of a record; the module docstring of `windlass.rollout.lifecycle` describes the transitions."""

    WAITING = "waiting"
    QUEUED = "queued"
    PARKED = "parked"
    RUNNING = "running"
    BACKOFF = "backoff"
    BUFFERED = "buffered"
    ENDED = "ended"


@final
class GroupFuture(asyncio.Future[Any]):
    """Future of a group. It calls `give_up` when the group's handle, or a task that awaits the future, cancels the future.

    A done-callback could call `give_up` too, but the event loop would run this callback for every rollout, including
    rollouts that are not cancelled.

    Args:
        task_id: task id of the group's first record. A reference to the group itself would be a reference
            cycle, because the group refers to the future.
        give_up: called with `task_id`, synchronously.
    """

    __slots__ = ("_give_up", "_task_id")

    def __init__(self, task_id: str, give_up: Callable[[str], None]) -> None:
        super().__init__()
        self._task_id, self._give_up = task_id, give_up

    def names(self, task_id: str) -> None:
        """Set the id that `give_up` gets, because the record of the earlier id has ended."""
        self._task_id = task_id

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future, and call `give_up` if the future was not done; see `asyncio.Future.cancel`."""
        if not super().cancel(msg):
            return False
        self._give_up(self._task_id)
        return True


class GroupSize(msgspec.Struct, frozen=True):
    """Numbers of samples of a group.

    Attributes:
        num_rollouts: number of rollouts that are submitted.
        num_wanted: number of samples that complete the group. Its other rollouts are then cancelled.
        min_samples: smallest number of samples of a complete group. If rollouts fail, a complete group has fewer than
            `num_wanted` samples.
    """

    num_rollouts: int
    num_wanted: int
    min_samples: int

    @classmethod
    def of(cls, n: int, num_extra: int = 0, min_samples: int | None = None) -> GroupSize:
        """Return the size of a group of `n` wanted samples; `min_samples` is `n` by default.

        Raises:
            ConfigError: an argument is not an integer, or is out of range.
        """
        if not is_count(n):
            raise ConfigError(f"rollout: n must be an integer >= 1, got {n!r}")
        if not (is_count(num_extra) or num_extra == 0):
            raise ConfigError(f"rollout: num_extra must be an integer >= 0, got {num_extra!r}")
        least = n if min_samples is None else min_samples
        if not is_count(least) or least > n:
            raise ConfigError(f"rollout: min_samples must be an integer in [1, {n}], got {least!r}")
        return cls(n + num_extra, n, least)


class Group(msgspec.Struct, eq=False):
    """Records that were submitted together and are delivered together. A rollout submitted alone is a group of one.

    Attributes:
        group_id: id of the group; -1 for a rollout that was submitted alone.
        future: resolves to the `RolloutGroup`, or to the `Rollout` if it was submitted alone. The future is
            done after delivery, failure or cancellation.
        size: numbers of samples.
        records: records in the order of submission, without those that have ended.
    """

    group_id: int
    future: GroupFuture
    size: GroupSize
    records: list[Record] = []

    @classmethod
    def of(
        cls,
        group_id: int,
        task_ids: Sequence[str],
        work: Work,
        metadata: object,
        give_up: Callable[[str], None],
        size: GroupSize | None = None,
    ) -> Group:
        """Create a group with a record for each id; call this in the event loop.

        When the group's future is cancelled, it calls `give_up` with the first of `task_ids`. Without `size`, the group
        needs all its records.
        """
        future = GroupFuture(task_ids[0], give_up)
        group = cls(group_id, future, size or GroupSize.of(len(task_ids)))
        now = asyncio.get_running_loop().time()
        group.records += [
            Record(task_id, group, work, metadata, now, index)
            for index, task_id in enumerate(task_ids)
        ]
        return group

    @property
    def is_single(self) -> bool:
        """Whether the group is one rollout that was submitted alone."""
        return self.group_id < 0

    def complete(self) -> bool:
        """Return whether `num_wanted` rollouts are finished. If fewer rollouts are left, all of them must be finished."""
        num_finished = sum(record.state is State.BUFFERED for record in self.records)
        return num_finished >= min(self.size.num_wanted, len(self.records))

    def can_lose_one(self) -> bool:
        """Return whether the group can still be complete without one of its records."""
        return len(self.records) > self.size.min_samples

    def remove(self, record: Record) -> None:
        """Remove a record that has ended. At least one other must be left, because the future needs a task id for `give_up`."""
        self.records.remove(record)
        self.future.names(self.records[0].task_id)


class Record(msgspec.Struct, eq=False):
    """One rollout from submission to its end.

    Attributes:
        index: number of the rollout in its submission. It selects the rollout's seed.
        admitted: whether the staleness policy counts the rollout as running.
        attempt: number of the last attempt; 0 before the first. Later attempts have greater numbers, with
            gaps after a restart of the controller.
        num_dispatches: number of times that the rollout was assigned to a worker.
        failures: number of attempts that ended in an error.
        raised: text of the exception that the workflow raised in the last attempt, and the number of attempts
            in a row that raised this exception.
        rejections: number of answers that the workflow has rejected, or the caller has replaced.
        resubmits: number of times that the rollout was generated again because its answer was too old.
        oldest_version: version of the oldest token that the running attempt can have; None if unknown.
        avoid_engine: engine of a failed attempt. The next attempt avoids this engine if it can. Empty for none.
        engine: engine of the last attempt.
        load_key: name of the engine under which `RolloutTable.by_engine` contains the record.
        prompt_ids: tokens of a prompt of text or messages, once a worker has tokenised it.
        is_returned: whether the answer was delivered before, and will be delivered again with its whole group. Either the
            caller has returned the group (`RolloutController.return_groups`), or an earlier process delivered the group,
            and its caller did not acknowledge it.
        queue: queue of the table that contains the record; None after the end of the rollout.
        timer: timer that ends the backoff.
        expiry: timer of the rollout's overall deadline, started at the first dispatch.
    """

    task_id: str
    group: Group
    work: Work
    metadata: object
    submitted_at: float
    index: int = 0
    state: State = State.WAITING
    admitted: bool = False
    attempt: int = 0
    num_dispatches: int = 0
    failures: int = 0
    raised: tuple[str, int] = ("", 0)
    rejections: int = 0
    resubmits: int = 0
    oldest_version: int | None = None
    last_error: str = ""
    avoid_engine: str = ""
    engine: str = ""
    load_key: str = ""
    worker: str = ""
    prompt_ids: tuple[int, ...] = ()
    partial: Partial = NOTHING
    outcome: RolloutOutcome | None = None
    is_returned: bool = False
    finished_at: float = 0.0
    queue: dict[str, Record] | None = None
    timer: asyncio.TimerHandle | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def key(self) -> AttemptKey:
        """Identity of the last attempt."""
        return AttemptKey(self.task_id, self.attempt)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of the next attempt.

        If the submitter set a seed, each sample of a group gets a different seed. The seed also changes after an answer
        was rejected or too old, because the same seed could give the same answer again.
        """
        num_rollouts = self.group.size.num_rollouts
        return self.work.sampling.seeded(
            self.index + num_rollouts * (self.rejections + self.resubmits)
        )

    def stop_expiry(self) -> None:
        """Cancel the timer of the rollout's overall deadline, if it runs."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def rollout(self) -> Rollout:
        """Return the result of a record that has an outcome.

        Raises:
            RuntimeError: the record has no outcome.
        """
        if self.outcome is None:
            raise RuntimeError(f"rollout {self.task_id}: no outcome in state {self.state.value}")
        result = self.outcome.result
        return Rollout(
            task_id=self.task_id,
            group_id=self.group.group_id,
            prompt_ids=self.outcome.prompt_ids or self.work.prompt_ids,
            output_ids=result.output_ids,
            logprobs=result.logprobs,
            versions=self.outcome.versions(),
            finish_reason=self.outcome.finish_reason,
            engine=self.outcome.engine,
            worker=self.outcome.worker,
            attempts=self.num_dispatches,
            metadata=self.metadata,
            finished_at=self.outcome.finished_at,
            seconds=self.finished_at - self.submitted_at,
            turns=whole_turns(self.outcome.turns),
            value=msgspec.msgpack.decode(self.outcome.value) if self.outcome.value else None,
            sampling_seed=self.sampling().sampling_seed,
            text=self.outcome.text,
            tensors=self.outcome.tensors,
        )


class RolloutTable:
    """Records by task id, and queues with the records of each state.

    Args:
        deadlines: deadlines of running attempts. The table stops a record's deadline when its attempt ends.

    Attributes:
        records: all records that have not ended, by task id.
        waiting, queued, backoff, buffered: records in each state, by task id.
        parked: workflow -> parked records.
        by_engine: engine -> records with an attempt on this engine.
        ready: group id -> complete group that waits for delivery, in the order of completion.
        counts: totals since the start of this process.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self.records: dict[str, Record] = {}
        self.waiting: OrderedDict[str, Record] = OrderedDict()
        self.queued: OrderedDict[str, Record] = OrderedDict()
        self.parked: dict[str, OrderedDict[str, Record]] = {}
        self.backoff: dict[str, Record] = {}
        self.buffered: dict[str, Record] = {}
        self.ready: OrderedDict[int, Group] = OrderedDict()
        self.by_engine: dict[str, dict[str, Record]] = {}
        self.counts = Counts()

    def move(self, record: Record, state: State, *, front: bool = False) -> None:
        """Set a record's state, and append the record to the state's queue. With `front`, insert it at the front.

        A record in the state ENDED leaves the table.
        """
        if record.timer is not None:
            record.timer.cancel()
            record.timer = None
        if record.queue is not None:
            del record.queue[record.task_id]
        if record.state is State.RUNNING:
            self._deadlines.stop(record)
            if not record.queue:
                del self.by_engine[record.load_key]
        record.state = state
        record.load_key = record.engine
        if state is State.ENDED:
            record.queue = None
            record.stop_expiry()
            self.records.pop(record.task_id, None)
            return
        queue = record.queue = self._queue_of(record)
        queue[record.task_id] = record
        if front and isinstance(queue, OrderedDict):
            queue.move_to_end(record.task_id, last=False)

    def _queue_of(self, record: Record) -> dict[str, Record]:
        """Return the queue for a record's state; for PARKED and RUNNING, the queue of its workflow or engine."""
        match record.state:
            case State.WAITING:
                return self.waiting
            case State.QUEUED:
                return self.queued
            case State.PARKED:
                return self.parked.setdefault(record.work.workflow, OrderedDict())
            case State.RUNNING:
                return self.by_engine.setdefault(record.load_key, {})
            case State.BACKOFF:
                return self.backoff
            case State.BUFFERED:
                return self.buffered
            case State.ENDED:
                raise AssertionError("a record that has ended is in no queue")

    def running(self) -> list[Record]:
        """Return the records with an attempt at a worker."""
        return [record for of_engine in self.by_engine.values() for record in of_engine.values()]

    def num_parked(self) -> int:
        """Return the number of records that wait for a free slot at a worker that knows their workflow."""
        return sum(len(records) for records in self.parked.values())

    def engine_load(self, name: str) -> int:
        """Return the number of running attempts on an engine."""
        return len(self.by_engine.get(name, ()))
