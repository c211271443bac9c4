"""Configuration, handles, results and counts: types for the process that runs a `RolloutController`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from windlass.config import check_numbers, take_name
from windlass.errors import ConfigError
from windlass.rollout.directory import Routing
from windlass.rollout.messages import OnAbort, Turn
from windlass.rollout.tensors import SampleTensor

ResultT = TypeVar("ResultT")


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a `RolloutController`. Times are in seconds.

    Attributes:
        max_attempts: number of failed attempts after which a rollout fails. An attempt fails if its engine or
            worker fails, or if `attempt_deadline_s` passes.
        max_same_errors: number of times in a row that a workflow may raise the same exception before its
            rollout fails.
        attempt_deadline_s: longest time of one attempt; after this time, the controller retries on another engine.
        retry_backoff_s: wait before the second attempt, doubled before each further attempt up to 2 s.
        engine_grace_s: time that an engine may be unroutable before the controller retries its attempts on other
            engines.
        worker_lease_s: time without a message from a worker after which the controller sends a ping.
        worker_grace_s: time after which the controller treats an unreachable worker as lost.
        on_abort: reaction of workers to an update that ends a generation early.
        carry_partial: whether a retry on another engine continues from the tokens of the failed attempt. If so,
            an answer may contain tokens of two engines.
        max_rejections: number of rejected answers after which a rollout fails. The workflow rejects its own answer, or
            the caller replaces the answer (`RolloutController.replace`).
        affinity_slack: the controller prefers the engine that has cached a prompt's prefix, as long as this
            engine runs at most this many attempts more than the least loaded engine.
        routing: rule by which the controller chooses the engine of an attempt.
        journal: file that records all rollouts, so that a restarted controller continues them; None for no
            file.
        acknowledge: if true, a delivered result stays in the journal until the caller passes its task id to
            `RolloutController.acknowledge`; a controller that restarts before this call delivers the result again. If
            false, delivery removes the result from the journal.
        journal_sync_s: interval at which the journal is synced to disk.
        journal_compact_nbytes: size above which the journal is rewritten without ended rollouts.

    Raises:
        ConfigError: a value is out of range, or `acknowledge` is set without a journal.
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
    routing: Routing = Routing.PREFIX
    journal: Path | None = None
    acknowledge: bool = False
    journal_sync_s: float = 1.0
    journal_compact_nbytes: int = 64 << 20

    _where: ClassVar[str] = "RolloutConfig: "

    def __post_init__(self) -> None:
        on_abort = take_name(f"{self._where}on_abort", self.on_abort, OnAbort)
        msgspec.structs.force_setattr(self, "on_abort", on_abort)
        routing = take_name(f"{self._where}routing", self.routing, Routing)
        msgspec.structs.force_setattr(self, "routing", routing)
        above = ("attempt_deadline_s", "worker_lease_s", "journal_sync_s")
        check_numbers(self, _LEAST, above, where=self._where)
        self._check_acknowledge()

    def _check_acknowledge(self) -> None:
        """Raise `ConfigError` if `acknowledge` is set without a journal."""
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
"""Smallest allowed value of each of these settings of `RolloutConfig`."""


class Rollout(msgspec.Struct, frozen=True):
    """A finished rollout.

    Attributes:
        group_id: group of the rollout; -1 if it was submitted alone.
        prompt_ids: tokens of the prompt, also if text or messages were submitted.
        output_ids, logprobs, versions: one entry per generated token.
        engine: name of the engine that made the last token.
        attempts: number of times that the controller assigned the rollout to a worker.
        metadata: the submitter's metadata; workers and engines never receive it.
        finished_at: Unix time at which the worker received the answer, on the worker's clock.
        seconds: time from submission to completion.
        turns: engine calls of a workflow. `versions` then has one entry per generated token of all turns, and
            `prompt_ids`, `output_ids` and `logprobs` are empty.
        value: return value of the workflow.
        sampling_seed: seed of the answer; None if `SamplingParams.sampling_seed` is None.
        reward: reward from a `Scorer`, in a job with `[rewards]`; None for a rollout that no scorer has scored.
        text: decoded answer if text or messages were submitted, without special tokens; otherwise empty.
        tensors: named tensors that the workflow added, and tensors of the images in a prompt. The elements of large ones are in the worker's memory, until a
            trainer rank gets them with its batch.
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
    reward: float | None = None
    sampling_seed: int | None = None
    text: str = ""
    tensors: Mapping[str, SampleTensor] = {}


class RolloutGroup(msgspec.Struct, frozen=True):
    """All rollouts of one prompt or workflow submission, in the order of their task ids."""

    group_id: int
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    metadata: object


class Counts(msgspec.Struct):
    """Totals since the start of this process.

    Attributes:
        submitted: submitted rollouts. A rollout that the caller returns counts again, see `RolloutController.return_groups`.
        completed: rollouts delivered to the caller. A returned rollout that is delivered again counts again.
        failed: rollouts that failed, for example after `max_attempts` or at their deadline.
        dropped: rollouts that the controller ended because they were too old, see `OnStale`. If a group ends because
            fewer than `min_samples` samples would be left, all its rollouts count.
        rejected: answers that a workflow rejected, or that the caller replaced (`RolloutController.replace`).
        too_old: finished answers that were discarded as too old.
        stopped_early: running attempts that were cancelled because their answers would have been too old.
        wasted_tokens: tokens of discarded answers, of finished samples of dropped groups, and of partial
            answers that became too old before an attempt continued them. The tokens of a stopped attempt are
            unknown and not counted.
        retried: attempts repeated after an engine, worker or deadline failure.
        ignored: outcomes that arrived twice or too late.
        declined: completed rollouts that the caller declined, see `RolloutController.decline`.
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
    """Totals since the start of this process, and the current number of rollouts in each state.

    submitted = completed + cancelled + failed + dropped + outstanding + lost.

    Attributes:
        outstanding: rollouts in a queue, at a worker, in a backoff, or buffered.
        lost: submitted rollouts that have not ended and are not outstanding; a value other than 0 is a bug in
            Windlass.
        buffered: finished rollouts that wait for the rest of their group or for delivery.
        waiting: rollouts that wait for admission.
        parked: rollouts that wait for a worker with a free slot that knows their workflow.
        running: attempts that are assigned to workers.
        engines: routable engines that are not too far behind the newest version.
        version: version of the trainer.
        capacity: rollouts that could be admitted now.
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
        """Return whether `await` on the handle returns or raises immediately."""
        return self.future.done()

    def cancel(self) -> None:
        """Cancel the rollout, or all rollouts of the group. Workers stop the running attempts. Idempotent."""
        self.future.cancel()

    def add_done_callback(self, callback: Callable[[asyncio.Future[ResultT]], None]) -> None:
        """Call `callback` with the future when the future is done."""
        self.future.add_done_callback(callback)


@dataclass(eq=False, slots=True)
class RolloutHandle(_Handle[Rollout]):
    """Handle of one submitted rollout; `await` it to get its `Rollout`. `metadata` is the submitter's.

    Awaiting raises `RolloutError` if the rollout failed, `PeerTimeout` if its deadline passed, and
    `asyncio.CancelledError` if it was cancelled.
    """

    task_id: str
    future: asyncio.Future[Rollout]
    metadata: object = None

    def __await__(self) -> Generator[object, None, Rollout]:
        return self.future.__await__()


@dataclass(eq=False, slots=True)
class GroupHandle(_Handle[RolloutGroup]):
    """Handle of one submitted group, which `RolloutController.next_batch` delivers.

    `await` returns the group after its delivery. If fewer than `min_samples` samples are left after a failure, the
    controller cancels the other samples, and `await` raises `RolloutError`, or `PeerTimeout` if the deadline of a sample
    passed. If the group is cancelled, `await` raises `asyncio.CancelledError`. `metadata` is the submitter's.
    """

    group_id: int
    task_ids: tuple[str, ...]
    future: asyncio.Future[RolloutGroup]
    metadata: object = None

    def __await__(self) -> Generator[object, None, RolloutGroup]:
        return asyncio.shield(self.future).__await__()


@dataclass(frozen=True, slots=True)
class Recovered:
    """Handles of the rollouts that an earlier process with the same journal left unfinished.

    The journal stores `metadata` as msgpack, so tuples in `metadata` have become lists.

    Attributes:
        version: newest weight version in the journal (of the trainer or of a generated token); -1 if there is no version or no
            journal.
        rollouts: task id -> handle of a rollout that was submitted alone.
        groups: group id -> handle of a group.
    """

    version: int = -1
    rollouts: dict[str, RolloutHandle] = field(default_factory=dict)
    groups: dict[int, GroupHandle] = field(default_factory=dict)
