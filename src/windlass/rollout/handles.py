"""What the owner of a `RolloutController` holds: handles, results, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from windlass.config import check_numbers, take_name
from windlass.errors import ConfigError
from windlass.rollout.messages import OnAbort, Turn

ResultT = TypeVar("ResultT")


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a `RolloutController`; seconds unless a name says otherwise.

    Attributes:
        max_attempts: failures (engine, worker, attempt deadline) after which a rollout fails.
        max_same_errors: times in a row that a workflow may raise the same exception before its rollout fails.
        attempt_deadline_s: one attempt may take this long, then it is tried on another engine.
        retry_backoff_s: wait before the second try, doubled each time up to 2 s.
        engine_grace_s: an engine may be unroutable this long before its work is moved.
        worker_lease_s: silence on the watch connection after which a worker is asked again.
        worker_grace_s: a worker that cannot be reached is given up after this long.
        on_abort: what workers do when an update ends a generation early.
        carry_partial: a retry on another engine goes on from the surviving tokens, so that
            one answer may hold tokens of two engines.
        max_rejections: a rollout whose workflow rejects it so often fails.
        affinity_slack: attempts that the engine of a prompt's prefix may hold more than the
            least loaded one and still be chosen.
        journal: file from which a restarted controller goes on; None keeps all in memory.
        acknowledge: what was handed out stays in the journal, and is handed out again after a
            restart, until `RolloutController.acknowledge`; otherwise handing out ends it.
        journal_sync_s: the journal is brought to disk so often.
        journal_compact_nbytes: it is written anew, without what has ended, above this size.
    """

    max_attempts: int = 8
    max_same_errors: int = 3
    attempt_deadline_s: float = 600.0
    retry_backoff_s: float = 0.05
    engine_grace_s: float = 30.0
    worker_lease_s: float = 15.0
    worker_grace_s: float = 30.0
    on_abort: OnAbort = OnAbort.CONTINUE
    carry_partial: bool = False
    max_rejections: int = 8
    affinity_slack: int = 8
    journal: Path | None = None
    acknowledge: bool = False
    journal_sync_s: float = 1.0
    journal_compact_nbytes: int = 64 << 20

    _where: ClassVar[str] = "RolloutConfig: "

    def __post_init__(self) -> None:
        on_abort = take_name(f"{self._where}on_abort", self.on_abort, OnAbort)
        msgspec.structs.force_setattr(self, "on_abort", on_abort)
        above = ("attempt_deadline_s", "worker_lease_s", "journal_sync_s")
        check_numbers(self, _LEAST, above, where=self._where)
        if self.acknowledge and self.journal is None:
            raise ConfigError(
                f"{self._where}acknowledge must be false without a journal, got true; set journal to a file"
            )


_LEAST = {
    "max_attempts": 1,
    "max_same_errors": 1,
    "retry_backoff_s": 0.0,
    "engine_grace_s": 0.0,
    "worker_grace_s": 0.0,
    "max_rejections": 1,
    "affinity_slack": 0,
    "journal_compact_nbytes": 0,
}


class Rollout(msgspec.Struct, frozen=True):
    """A finished rollout.

    Attributes:
        group_id: -1 for one that was submitted alone.
        output_ids, logprobs, versions: one entry per generated token.
        engine: name of the engine that made the last token.
        attempts: how often it was handed to a worker.
        metadata: what the submitter gave; never leaves the process.
        finished_at: Unix time at which the worker had the answer, on the worker's clock.
        seconds: from submission to completion.
        turns: calls of a workflow; `versions` then covers the tokens of all turns, and
            `prompt_ids`, `output_ids` and `logprobs` are empty.
        value: what the workflow returned.
    """

    task_id: str
    group_id: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    engine: str
    worker: str
    attempts: int
    metadata: object
    finished_at: float
    seconds: float
    turns: tuple[Turn, ...] = ()
    value: object = None


class RolloutGroup(msgspec.Struct, frozen=True):
    """All samples of one prompt, in the order in which they were submitted."""

    group_id: int
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    metadata: object


class Counts(msgspec.Struct):
    """Totals since the start of this process.

    Attributes:
        completed: handed to the owner. failed: given up after `max_attempts` or the deadline.
        dropped: given up as too old, `OnStale`; of a group all samples.
        rejected: answers that a workflow rejected.
        too_old: finished answers that were thrown away because they were too old.
        stopped_early: running attempts that were cancelled because their answer would have been.
        wasted_tokens: tokens of the answers that were thrown away, of finished samples of dropped
            groups and of those that were not carried on; what a stopped attempt had is not known.
        retried: attempts repeated after an engine, worker or deadline failure.
        ignored: outcomes that came twice or too late.
        declined: completed ones that the owner had no use for.
    """

    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    dropped: int = 0
    rejected: int = 0
    too_old: int = 0
    stopped_early: int = 0
    wasted_tokens: int = 0
    retried: int = 0
    ignored: int = 0
    declined: int = 0


class RolloutStats(Counts, kw_only=True):
    """Counts since the start of this process, and where what has not ended is now.

    submitted = completed + cancelled + failed + dropped + outstanding + lost.

    Attributes:
        outstanding: found in a queue, at a worker, in a backoff, or waiting in a group.
        lost: submitted and found nowhere; anything but 0 is a defect.
        buffered: finished, waiting for the rest of their group or to be handed out.
        parked: no worker that knows their workflow has room.
    """

    outstanding: int
    lost: int
    waiting: int
    parked: int
    running: int
    buffered: int
    workers: int
    engines: int
    version: int
    capacity: int


class _Handle(Generic[ResultT]):
    __slots__ = ()
    future: asyncio.Future[ResultT]

    def done(self) -> bool:
        """Whether awaiting would return or raise at once."""
        return self.future.done()

    def cancel(self) -> None:
        """Give it up, a group as a whole; workers are told. Idempotent."""
        self.future.cancel()

    def add_done_callback(self, callback: Callable[[asyncio.Future[ResultT]], None]) -> None:
        """Call `callback` with the future once it is done."""
        self.future.add_done_callback(callback)


@dataclass(eq=False, slots=True)
class RolloutHandle(_Handle[Rollout]):
    """One submitted rollout: await it for its `Rollout`. `metadata` is the submitter's.

    Awaiting raises `RolloutError` when every attempt failed, `PeerTimeout` when the
    deadline passed, `asyncio.CancelledError` when it was cancelled.
    """

    task_id: str
    future: asyncio.Future[Rollout]
    metadata: object = None

    def __await__(self) -> Generator[object, None, Rollout]:
        return self.future.__await__()


@dataclass(eq=False, slots=True)
class GroupHandle(_Handle[RolloutGroup]):
    """The samples of one prompt. They are delivered by `RolloutController.next_batch`.

    Awaiting returns the group once it was handed out, and raises `RolloutError` when a
    sample failed (the rest of the group is cancelled then). `metadata` is the submitter's.
    """

    group_id: int
    task_ids: tuple[str, ...]
    future: asyncio.Future[RolloutGroup]
    metadata: object = None

    def __await__(self) -> Generator[object, None, RolloutGroup]:
        return asyncio.shield(self.future).__await__()


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process on the same journal had left; handles as `submit` gives them.

    Attributes:
        rollouts: by task id. groups: by group id. Their `metadata` is what was submitted,
            after a round trip through msgpack (tuples are lists).
    """

    rollouts: dict[str, RolloutHandle] = field(default_factory=dict)
    groups: dict[int, GroupHandle] = field(default_factory=dict)
