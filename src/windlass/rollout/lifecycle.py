"""State transitions of a rollout, from submission to end. All transitions are synchronous.

WAITING for admission -> RUNNING at a worker -> BUFFERED until its group is complete and delivered -> ENDED.
A rollout that was submitted alone skips BUFFERED. A rollout is PARKED while no worker with a free slot knows
its workflow, and moves to QUEUED when such a worker exists. After an error a RUNNING rollout moves to BACKOFF, and
after the backoff to QUEUED. If the answer of a RUNNING or BUFFERED rollout is or will be too old, `OnStale` decides
whether the rollout moves to the front of the WAITING queue or its whole group ends.

A held tensor is a large tensor of an answer, whose elements stay in the worker's memory (`windlass.rollout.held`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, PeerTimeout, RolloutError
from windlass.net.clock import Backoff
from windlass.net.logs import LineLimit, log_fields
from windlass.rollout.handles import (
    GroupHandle,
    Recovered,
    Rollout,
    RolloutConfig,
    RolloutGroup,
    RolloutHandle,
)
from windlass.rollout.held import held_of
from windlass.rollout.journal import (
    Accepted,
    Ended,
    PersistedState,
    PersistedTask,
    Resubmitted,
    RolloutJournal,
    VersionReached,
)
from windlass.rollout.messages import (
    LOCAL_WORKER,
    ErrorKind,
    OnAbort,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    Work,
)
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.table import (
    NOTHING,
    Deadlines,
    Group,
    GroupFuture,
    GroupSize,
    Record,
    RolloutTable,
    State,
)
from windlass.sampling import SamplingParams

logger = logging.getLogger(__name__)
MAX_BACKOFF_S = 2.0
"""Longest time between a failed attempt and the next attempt of the rollout."""
WARN_EVERY_S = 10.0
"""Shortest time between two log lines about failed rollouts."""
WASTE_EVERY_S = 600.0
"""Shortest time between two warnings about discarded answers."""
WASTE_SHARE = 0.5
"""Smallest ratio of discarded to delivered answers at which the controller warns. A lower ratio is normal if a
rollout takes longer than a training step."""
_SINGLE = GroupSize.of(1)
DECLINABLE = 4096
"""Number of newest delivered results that the caller may still decline."""


class Lifecycle:
    """State machine of all rollouts, from submission to end.

    Only this class changes records, groups, counts and the staleness policy.

    Args:
        policy: bounds for admission and consumption.
        config: limits.
        withdraw: cancels a running attempt at its worker.
        work_changed: called when a rollout may be dispatched or admitted.
        unanswered: called before `withdraw`, with the record of an attempt that has no answer at its deadline.

    Attributes:
        identity: random id of the controller; a restarted controller with the same journal keeps the id.
        num_groups: number of groups that this process and earlier processes with the same journal have submitted.
        first_attempt: number below all attempt numbers of this process, and above those of earlier processes.
        journal: journal of the transitions that a later process needs.
        table: records of all rollouts, by state.
        newest_failure: reason of the newest failure or rejection; empty if there was none.
        failed_alike: number of rollouts that failed since the last accepted answer because an engine refused
            the request or because the workflow kept raising the same exception.
        ready: set when a group can be delivered, or when the controller closes.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        config: RolloutConfig,
        withdraw: Callable[[Record], None],
        work_changed: Callable[[], None],
        unanswered: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.journal = RolloutJournal(config)
        self.first_attempt = 0
        self._deadlines = Deadlines(config.attempt_deadline_s, self._attempt_expired)
        self.table = RolloutTable(self._deadlines)
        self.ready = asyncio.Event()
        self.journal.on_change(self.ready.set)
        self.identity = self._prefix = uuid.uuid4().hex[:12]
        self._next_task = self._next_group = 0
        self.num_groups = 0
        self._sampling: SamplingParams | None = None
        self._policy = policy
        self._config = config
        self._handed_out: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._kept: dict[str, Group] = {}
        """Task id -> delivered group that the caller may return, for each rollout of the group, in the order of delivery."""
        self._silent_until = 0.0
        self._waste_is_due = False
        self._failures = LineLimit(WARN_EVERY_S)
        self.newest_failure = ""
        self.failed_alike = 0
        self._withdraw, self._unanswered = withdraw, unanswered
        self._work_changed = work_changed

    # --- begin -----------------------------------------------------------------------------

    def open(self) -> Recovered:
        """Restore the state of an earlier process from the journal; choose ids that no earlier process has used.

        Raises:
            ConfigError: the journal cannot be used.
        """
        persisted = self.journal.open(self._policy.start_version)
        started = persisted.started
        self.identity = self._prefix = started.identity
        if started.run:
            self._prefix += f".{started.run}"
        self._next_group, self.first_attempt = started.run << 32, started.run << 20
        self.num_groups = started.num_groups
        groups = self._restore(persisted)
        outcomes = [task.outcome for task in persisted.tasks.values() if task.outcome is not None]
        # An engine may serve a version shortly before the journal records this version. So an outcome may contain a
        # version that is newer than the journalled version.
        newest = [version for outcome in outcomes for version in outcome.versions()]
        recovered = Recovered(max([started.version, *newest]))
        for group in groups:
            if group.is_single:
                recovered.rollouts[group.records[0].task_id] = self._single_handle(group)
                # The caller may never await the handle. asyncio would then log a failure as an unretrieved exception.
                group.future.add_done_callback(_retrieve)
            else:
                recovered.groups[group.group_id] = self._group_handle(group)
        for group in self._in_order_of_delivery(groups, persisted):
            if group.is_single and group.complete():
                self._deliver_single(group)
            else:
                self.ready_if_complete(group)
        self.drop_stale()
        return recovered

    def _in_order_of_delivery(
        self, groups: Sequence[Group], persisted: PersistedState
    ) -> list[Group]:
        """Sort groups: first the groups that an earlier process delivered, in order of delivery, then all other groups.

        The answers of a delivered group may have held tensors: large tensors whose elements stay in the memory of a worker.
        The workers have freed the elements of delivered groups. So discard all answers of such a group, and submit its
        rollouts again.
        """
        order = {
            group: persisted.delivery_of(persisted.tasks[group.records[0].task_id].submission)
            for group in groups
        }
        found = sorted(groups, key=lambda group: order[group] or math.inf)
        # The newest first, because each step moves a group to the front of the queue.
        for group in reversed(found):
            kept = [record.outcome for record in group.records if record.is_returned]
            if any(held_of(outcome.tensors) for outcome in kept if outcome is not None):
                self._generate_again(group)
        return found

    def _generate_again(self, group: Group) -> None:
        """Discard all answers of a delivered group, and move its rollouts to the front of the WAITING queue."""
        answered = [record for record in group.records if record.state is State.BUFFERED]
        for record in group.records:
            record.is_returned = False
        for record in reversed(answered):
            self._policy.discard()
            self._resubmit(record, with_group=True)

    def submit(self, work: Work, *, metadata: object = None) -> RolloutHandle:
        """Submit one rollout with a prompt or arguments that the caller has checked; see `RolloutController.submit`."""
        return self._single_handle(self._submit(work, _SINGLE, -1, metadata))

    def submit_group(self, work: Work, size: GroupSize, *, metadata: object = None) -> GroupHandle:
        """Submit a group; see `RolloutController.submit_group`. The caller must check `work` first."""
        group = self._submit(work, size, self._next_group, metadata)
        self._next_group += 1
        self.num_groups += 1
        return self._group_handle(group)

    def _submit(self, work: Work, size: GroupSize, group_id: int, metadata: object) -> Group:
        """Record a submission in the journal, and add its rollouts to the WAITING queue."""
        if self._sampling is None or work.sampling is not self._sampling:
            self._sampling = _checked(work.sampling)
        first, n = self._next_task + 1, size.num_rollouts
        task_ids = [f"{self._prefix}-{number}" for number in range(first, first + n)]
        self.journal.submitted(task_ids, group_id, work, metadata, size)
        self._next_task += n
        group = Group.of(group_id, task_ids, work, metadata, self.give_up_group, size)
        for record in group.records:
            self.add(record)
        self._work_changed()
        return group

    def _single_handle(self, group: Group) -> RolloutHandle:
        """Return the handle that the submitter of a single rollout gets."""
        (record,) = group.records
        return RolloutHandle(record.task_id, group.future, record.metadata)

    def _group_handle(self, group: Group) -> GroupHandle:
        """Return the handle that the submitter of a group gets."""
        # The caller may never await the handle. asyncio would then report an unretrieved exception, although
        # the log and the counts contain the failure already.
        group.future.add_done_callback(_retrieve)
        return GroupHandle(
            group.group_id,
            tuple(record.task_id for record in group.records),
            group.future,
            group.records[0].metadata,
        )

    def add(self, record: Record, state: State = State.WAITING) -> None:
        """Add the record of a new or recovered rollout to the table in this state, and count it as submitted."""
        self.table.records[record.task_id] = record
        self.table.counts.submitted += 1
        self.table.move(record, state)

    def _restore(self, persisted: PersistedState) -> list[Group]:
        """Restore the state of every rollout, and return the groups.

        A running attempt stays assigned to its worker process, and the worker reports the attempt when it connects.
        An attempt of the local worker ended with the earlier process, so its rollout is queued again. Deadlines
        start again. Afterwards, `open` delivers finished single rollouts again, and discards rollouts that are too old.
        """
        groups = [
            Group.of(
                each.group_id,
                each.task_ids,
                each.work,
                msgspec.msgpack.decode(each.metadata),
                self.give_up_group,
                each.size,
            )
            for each in persisted.submissions()
        ]
        tasks, started = persisted.tasks, persisted.started
        for group in groups:
            for record in [each for each in group.records if each.task_id not in tasks]:
                group.remove(record)
        records = {record.task_id: record for group in groups for record in group.records}
        finished = [records[t] for t, task in tasks.items() if task.outcome is not None]
        num_again = sum(record.group.is_single for record in finished)
        consumed = started.consumed + num_again
        self._policy.restore(
            start_version=started.start_version,
            version=started.version,
            running=sum(task.running for task in tasks.values()),
            accepted=consumed + len(finished) - num_again,
            consumed=consumed,
        )
        waiting_again: list[Record] = []
        for task in tasks.values():
            record = records[task.task_id]
            state = _restore_record(record, task)
            self.add(record, state)
            if state is State.RUNNING:
                self._start_timers(record)
            elif state is State.WAITING and task.attempt is not None:
                waiting_again.append(record)
        for record in reversed(waiting_again):
            self._wait(record)
        return groups

    def _admit(self, record: Record) -> None:
        """Let the staleness policy count a rollout as running, unless the policy counts it already."""
        if not record.admitted:
            self._policy.admit()
            record.admitted = True

    def park(self, record: Record) -> None:
        """Admit a rollout and move it to PARKED, because no worker with a free slot knows its workflow."""
        self._admit(record)
        self.table.move(record, State.PARKED)

    def start_attempt(self, record: Record, engine: str, worker: str) -> float:
        """Admit a rollout, and record that its next attempt runs at a worker. The caller sends the attempt to the worker.

        Write the assignment to the journal, discard a partial answer that is too old, and start the attempt's timers.

        Args:
            record: the rollout.
            engine: engine for the attempt.
            worker: name of the worker.

        Returns:
            Seconds until the deadline of the attempt or of the rollout, whichever is earlier.
        """
        self._admit(record)
        record.attempt = max(record.attempt, self.first_attempt) + 1
        record.num_dispatches += 1
        record.engine = engine
        record.worker = worker
        if record.partial is not NOTHING and self._policy.throws_away(record.partial.versions):
            self.table.counts.wasted_tokens += len(record.partial.output_ids)
            record.partial = NOTHING
        record.oldest_version = self._oldest_token(record)
        self.journal.attempted(record)
        self.table.move(record, State.RUNNING)
        return self._start_timers(record)

    def _oldest_token(self, record: Record) -> int | None:
        """Return the lowest version that a token of a starting attempt can have; None if this version is unknown.

        If the attempt continues a partial answer, the version is the lowest version in this answer. Otherwise, the first
        token has the lowest version. A plain prompt goes to an engine at once, so its first token has the current version,
        or a later one if the request waits. A workflow may do other work before it generates, so the version is unknown. With
        `OnAbort.RETRY`, a worker discards the tokens of an attempt at every update and starts again, so the version is
        unknown.
        """
        if record.partial.versions:
            return min(record.partial.versions)
        if record.work.workflow or self._config.on_abort is OnAbort.RETRY:
            return None
        return self._policy.version

    def _start_timers(self, record: Record) -> float:
        """Start the deadline of an attempt. Before the first attempt, also start the rollout's overall deadline.

        Return the seconds until the earlier deadline.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if record.expiry is None and record.work.deadline_s is not None:
            record.expiry = loop.call_at(now + record.work.deadline_s, self._expire, record)
        ends = self._deadlines.start(record)
        return (ends if record.expiry is None else min(ends, record.expiry.when())) - now

    def find_running(self, task_id: str, attempt: int) -> Record | None:
        """Return the record of a rollout if its attempt number `attempt` is running, else None."""
        record = self.table.records.get(task_id)
        if record is None or record.state is not State.RUNNING or record.attempt != attempt:
            return None
        return record

    # --- end of an attempt -----------------------------------------------------------------

    def end_attempt(self, record: Record, outcome: RolloutOutcome) -> None:
        """Accept, discard or reject the answer of a running attempt, or retry the rollout, as the outcome demands."""
        if outcome.prompt_ids:
            # Later attempts must use the same prompt tokens. If a worker applied the chat template again, the tokens
            # could differ, for example because the template contains the time.
            record.prompt_ids = outcome.prompt_ids
        match outcome.status:
            case OutcomeStatus.ACCEPTED:
                if self._policy.throws_away(outcome.versions()):
                    self.table.counts.too_old += 1
                    self._throw_away(record, outcome)
                else:
                    self._accept(record, outcome)
            case OutcomeStatus.STALE:
                self.table.counts.stopped_early += 1
                self._throw_away(record, outcome)
            case OutcomeStatus.REJECTED:
                self._reject(record, outcome.error)
            case OutcomeStatus.ERROR | OutcomeStatus.CANCELLED:
                reason = outcome.error or f"cancelled by worker {outcome.worker}"
                self.retry(record, reason, outcome.result, outcome.error_kind)

    def _reject(self, record: Record, reason: str) -> None:
        """Count a rejected answer. Generate another answer, or fail the rollout after `max_rejections` rejections."""
        record.rejections += 1
        self.table.counts.rejected += 1
        self.newest_failure = f"rollout {record.task_id}: rejected: {reason}"
        if record.rejections < self._config.max_rejections:
            self._resubmit(record)
            return
        self._fail(
            record,
            RolloutError(
                f"rollout {record.task_id}: rejected {record.rejections} times "
                f"(max_rejections={self._config.max_rejections}); newest reason: {reason}"
            ),
        )

    def replace(self, reasons: Mapping[str, str]) -> None:
        """Discard finished answers of a group, and generate new answers; see `RolloutController.replace`.

        Raises:
            RolloutError: a rollout is not finished, or was delivered.
        """
        records = {task_id: self.table.records.get(task_id) for task_id in reasons}
        for task_id, record in records.items():
            if record is None or record.state is not State.BUFFERED:
                state = "unknown or ended" if record is None else record.state.value
                raise RolloutError(
                    f"replace: rollout {task_id} must be finished and not delivered, but it is {state}"
                )
        for record in records.values():
            if record is not None:
                self.table.ready.pop(record.group.group_id, None)
        for task_id, record in records.items():
            # An earlier iteration may have ended the whole group.
            if record is not None and record.state is State.BUFFERED:
                self._policy.discard()
                self._reject(record, reasons[task_id])

    def retry(
        self,
        record: Record,
        reason: str,
        partial: Partial,
        kind: ErrorKind = ErrorKind.PASSING,
    ) -> None:
        """Count the failure of an attempt. Retry the rollout after a backoff, preferably on another engine, or fail it.

        A retry moves the rollout to BACKOFF, keeps `partial` if `carry_partial` is set, and starts the timer that queues
        the rollout again.

        The rollout fails if an engine refused the request, if the rollout has `max_attempts` failures, or if
        `max_same_errors` attempts in a row have raised the same exception.
        """
        self._count_failure(record, reason)
        raised, num_raised = record.raised
        # Compare the text after the prefix "worker NAME: ", because the attempts may run at several workers.
        text = reason.partition(": ")[2] if kind is ErrorKind.RAISED else ""
        record.raised = (text, num_raised + 1 if text == raised else 1)
        if kind is ErrorKind.REFUSED:
            self._fail_for_good(record, f"refused: {reason}")
            return
        if text and record.raised[1] >= self._config.max_same_errors:
            times = f"raised the same exception {record.raised[1]} times in a row"
            limit = f"max_same_errors={self._config.max_same_errors}"
            self._fail_for_good(record, f"{times} ({limit}): {reason}")
            return
        record.avoid_engine = record.engine
        if self._config.carry_partial and partial.output_ids:
            record.partial = partial
        if self._failed_too_often(record):
            return
        # `oldest_version` belongs to a running attempt, and no attempt runs during the backoff.
        record.oldest_version = None
        self.journal.attempted(record)
        self.table.move(record, State.BACKOFF)
        delay = Backoff(self._config.retry_backoff_s, MAX_BACKOFF_S).after(record.failures)
        record.timer = asyncio.get_running_loop().call_later(delay, self._requeue, record)
        self._work_changed()

    def lose_tensors(self, worker: str, living: str, reason: str) -> None:
        """Discard finished answers with tensors in the memory of a worker process that has ended, and retry their rollouts.

        Args:
            worker: name of the worker.
            living: incarnation of the worker process that still lives; empty for none.
            reason: why the process has ended, for logs and errors.
        """
        lost = [
            record
            for record in self.table.buffered.values()
            if record.outcome is not None
            and any(
                held.holder == worker and held.incarnation != living
                for held in held_of(record.outcome.tensors)
            )
        ]
        for record in lost:
            # An earlier iteration may have ended the whole group.
            if record.state is not State.BUFFERED:
                continue
            self._policy.discard()
            self._count_failure(record, f"the tensors of the rollout are lost: {reason}")
            self.table.ready.pop(record.group.group_id, None)
            if not self._failed_too_often(record):
                self._resubmit(record)

    def _count_failure(self, record: Record, reason: str) -> None:
        """Count a failure of the rollout. Store the reason in its record, and in `newest_failure` for all rollouts."""
        record.failures += 1
        record.last_error = reason
        self.newest_failure = f"rollout {record.task_id}: {reason}"

    def _failed_too_often(self, record: Record) -> bool:
        """Fail the rollout and return True if `max_attempts` attempts have failed.

        Otherwise count a retry and return False.
        """
        if record.failures < self._config.max_attempts:
            self.table.counts.retried += 1
            return False
        self._fail(
            record,
            RolloutError(
                f"rollout {record.task_id}: failed {record.failures} times "
                f"(max_attempts={self._config.max_attempts}); newest error: {record.last_error}"
            ),
        )
        return True

    def _fail_for_good(self, record: Record, reason: str) -> None:
        """Fail a rollout because further attempts would fail in the same way."""
        self.failed_alike += 1
        self._fail(record, RolloutError(f"rollout {record.task_id}: {reason}"))

    def _requeue(self, record: Record) -> None:
        """Queue a rollout again at the end of its backoff, and let the controller assign it."""
        self.table.move(record, State.QUEUED)
        self._work_changed()

    def _accept(self, record: Record, outcome: RolloutOutcome) -> None:
        """Store the outcome of a successful attempt, and count its sample as accepted in the staleness policy.

        If the rollout was submitted without a group, deliver it. Otherwise write it to the journal, buffer it, and mark
        its group as ready if the group is now complete.
        """
        self._policy.accept()
        self.failed_alike = 0
        record.admitted = False
        record.outcome = outcome
        record.finished_at = asyncio.get_running_loop().time()
        if record.group.is_single:
            if self.journal.keep_delivered:
                self.journal.add(Accepted(outcome))
            self._policy.consume(1)
            self._deliver_single(record.group)
            return
        self.journal.add(Accepted(outcome))
        record.stop_expiry()
        self.table.move(record, State.BUFFERED)
        self.ready_if_complete(record.group)

    def ready_if_complete(self, group: Group) -> None:
        """Mark a group as ready if it is complete, and wake the callers that wait for a ready group.

        Cancel rollouts of the complete group that are not needed any more, and remove them from the group.
        """
        if group.complete():
            extra = [record for record in group.records if record.state is not State.BUFFERED]
            self.table.counts.cancelled += len(extra)
            self._end_all(extra)
            for record in extra:
                group.remove(record)
            self.table.ready[group.group_id] = group
            self.ready.set()

    def _resubmit(self, record: Record, *, with_group: bool = False) -> None:
        """Discard the answer, and move the rollout to the front of the WAITING queue. Record this in the journal.

        The group is then no longer ready. The staleness policy no longer counts the rollout as running. The timer of the
        rollout's overall deadline is cancelled.

        Args:
            record: the rollout.
            with_group: whether the caller resubmits all rollouts of the group. If so, the group has no answers that wait
                for this rollout, so the exception in `_wait` does not apply.
        """
        self.table.ready.pop(record.group.group_id, None)
        if record.admitted:
            self._policy.release()
            record.admitted = False
        self.journal.add(Resubmitted(record.task_id, record.rejections, record.resubmits))
        record.outcome = None
        record.is_returned = False
        record.partial = NOTHING
        record.stop_expiry()
        if with_group:
            self.table.move(record, State.WAITING, front=True)
        else:
            self._wait(record)
        self._work_changed()

    def _wait(self, record: Record) -> None:
        """Move a rollout without an answer to the front of the WAITING queue, with one exception.

        The exception: the staleness bound is full, and another rollout of the group has an answer or is admitted. Then admit
        the rollout at once, in place of its discarded answer. Otherwise, the answers of incomplete groups could use up the
        bound, and no group would ever be complete. The bound may be full because delivered groups were returned.
        """
        keeps_place = self._policy.is_full and any(
            each.admitted or each.outcome is not None for each in record.group.records
        )
        if keeps_place:
            self._policy.keep_place()
            record.admitted = True
        self.table.move(record, State.QUEUED if keeps_place else State.WAITING, front=True)

    # --- too old -----------------------------------------------------------------------------

    def _throw_away(self, record: Record, outcome: RolloutOutcome | None) -> None:
        """Resubmit or drop a rollout whose answer is too old.

        `outcome` is None if the attempt was stopped before it had an answer.

        The rollout must not have a running attempt, and the policy must not count the sample as accepted.
        """
        self.table.counts.wasted_tokens += 0 if outcome is None else len(outcome.versions())
        if self._policy.makes_again(record.resubmits):
            record.resubmits += 1
            self._resubmit(record)
        else:
            self._drop(record)
        self._warn_of_waste()

    def _drop(self, record: Record) -> None:
        """Drop a rollout that is too old. An incomplete group that can lose a rollout continues without it.

        Otherwise end the whole group, and let the group's handle raise `RolloutError`.
        """
        policy, group = self._policy, record.group
        error = RolloutError(
            f"rollout {record.task_id}: dropped because it is too old for version {policy.version} "
            f"(max_staleness={policy.max_staleness}) after {record.resubmits} resubmissions "
            f"(on_stale={policy.on_stale}, max_resubmits={policy.max_resubmits})"
        )
        logger.info("%s", error)
        # The caller may have read the samples of a ready group (see `peek`), so a ready group must keep all samples.
        if group.can_lose_one() and group.group_id not in self.table.ready:
            self.table.counts.dropped += 1
            self._lose(record)
            return
        self._end(record)
        self.journal.add(Ended((record.task_id,)))
        others = self._take_back(group)
        self.table.counts.wasted_tokens += sum(
            [len(other.outcome.versions()) for other in others if other.outcome is not None]
        )
        self.table.counts.dropped += 1 + len(others)
        if not group.future.done():
            group.future.set_exception(error)
        self._work_changed()

    def _warn_of_waste(self) -> None:
        """Schedule `_log_waste` once per iteration of the event loop, however many answers are discarded."""
        if not self._waste_is_due:
            self._waste_is_due = True
            asyncio.get_running_loop().call_soon(self._log_waste)

    def _log_waste(self) -> None:
        """Warn if rollouts were dropped or many answers were discarded, at most once per `WASTE_EVERY_S`."""
        policy, counts, now = self._policy, self.table.counts, asyncio.get_running_loop().time()
        self._waste_is_due = False
        wasted = counts.too_old + counts.stopped_early
        is_much = wasted >= max(policy.batch_size, WASTE_SHARE * counts.completed)
        if now < self._silent_until or not (counts.dropped or is_much):
            return
        self._silent_until = now + WASTE_EVERY_S
        logger.warning(
            "rollouts are too old for version %d (max_staleness=%d, on_stale=%s, max_resubmits=%d): "
            "since the start %d answers were discarded, %d attempts stopped early, %d rollouts "
            "dropped, %d tokens wasted",
            *(policy.version, policy.max_staleness, policy.on_stale, policy.max_resubmits),
            *(counts.too_old, counts.stopped_early, counts.dropped, counts.wasted_tokens),
        )

    # --- consumption -----------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Set the trainer's version; discard answers that are too old for it."""
        if version <= self._policy.version:
            return
        self._policy.set_version(version)
        self.journal.add(VersionReached(version))
        self.drop_stale()
        self._work_changed()

    def drop_stale(self) -> None:
        """Discard buffered answers that are too old, and stop attempts whose answers would be too old.

        An answer that is delivered again is never too old: the trainer trains on it again with the same weights as the first
        time, although these weights now have a higher version number. A new answer in its
        place can be too old.
        """
        throws_away, buffered = self._policy.throws_away, self.table.buffered.values()
        old = [
            r
            for r in buffered
            if r.outcome and not r.is_returned and throws_away(r.outcome.versions())
        ]
        old += [
            r
            for r in self.table.running()
            if r.oldest_version is not None and throws_away((r.oldest_version,))
        ]
        for record in old:
            # An earlier iteration may have dropped the whole group of this record.
            if record.state is State.ENDED:
                continue
            self.table.counts.too_old += record.state is State.BUFFERED
            self.table.counts.stopped_early += record.state is State.RUNNING
            self._give_up(record)
            self._throw_away(record, record.outcome)

    def peek(self, group_id: int) -> RolloutGroup:
        """Return a ready group without delivering it; raise `RolloutError` if the group is not ready."""
        group = self.table.ready.get(group_id)
        if group is None:
            raise RolloutError(
                f"peek: group_id must be complete and not delivered, got {group_id}; take an id that ready_ids returns"
            )
        first = group.records[0]
        rollouts = tuple([record.rollout() for record in group.records])
        return RolloutGroup(group_id, rollouts[0].prompt_ids, rollouts, first.metadata)

    def deliver(self, group_ids: Sequence[int], *, keep: bool = False) -> tuple[RolloutGroup, ...]:
        """Deliver ready groups; their samples count as consumed. See `RolloutController.take`.

        A ready group is never too old, because `set_version` discards answers that become too old. With `keep`, the caller
        may return the groups later; see `return_groups`.

        Raises:
            RolloutError: a group is not ready, or an id occurs twice; or the journal cannot be written. In these cases no
                group is delivered.
        """
        ready = self.table.ready
        for index, group_id in enumerate(group_ids):
            if group_id not in ready or group_id in group_ids[:index]:
                raise RolloutError(
                    f"take: group_ids must be complete, not delivered and given once, got {group_id}; "
                    "take ids that ready_ids returns"
                )
        groups = [ready[group_id] for group_id in group_ids]
        self.journal.deliver([[record.task_id for record in group.records] for group in groups])
        return tuple([self._deliver(group, keep=keep) for group in groups])

    def _deliver(self, group: Group, *, keep: bool) -> RolloutGroup:
        """Deliver a ready group. The caller has recorded the delivery in the journal.

        With `keep`, keep the group until the caller acknowledges, declines or returns it.
        """
        del self.table.ready[group.group_id]
        first, records = group.records[0], tuple(group.records)
        rollouts = self._rollouts(group)
        self._policy.consume(len(rollouts))
        delivered = RolloutGroup(group.group_id, rollouts[0].prompt_ids, rollouts, first.metadata)
        if not group.future.done():
            group.future.set_result(delivered)
        if keep:
            self._keep(group, records)
        self._work_changed()
        return delivered

    def _keep(self, group: Group, records: Sequence[Record]) -> None:
        """Keep a delivered group until the caller acknowledges, declines or returns it.

        If an answer has held tensors, discard all answers of the group. Otherwise the workers would have to keep the
        elements of these tensors.
        """
        group.records += records
        outcomes = [record.outcome for record in records if record.outcome is not None]
        if any(held_of(outcome.tensors) for outcome in outcomes):
            # Discard whole groups: the answers of incomplete groups could use the staleness bound up, so that none of
            # these groups would ever be complete.
            for record in records:
                record.outcome = None
        # Replace the future, because its result refers to all tensors of the group.
        group.future = GroupFuture(records[0].task_id, self.give_up_group)
        self._kept.update(dict.fromkeys([record.task_id for record in records], group))

    def _drop_kept(self, task_id: str) -> None:
        """Drop the kept group that contains this rollout, if there is one."""
        if (group := self._kept.get(task_id)) is not None:
            for record in group.records:
                del self._kept[record.task_id]
            group.records.clear()

    def return_groups(self) -> list[GroupHandle]:
        """Put all kept groups in front of the other ready groups; see `RolloutController.return_groups`.

        If the answers of a group were discarded, resubmit its rollouts. The group is ready when the new answers arrive.
        """
        groups = list(dict.fromkeys(self._kept.values()))
        self._kept.clear()
        for group in groups:
            task_ids = [record.task_id for record in group.records]
            self._handed_out.pop(task_ids[0], None)
            self._policy.deliver_again(len(task_ids))
            self.journal.returned(task_ids)
            for record in group.records:
                record.is_returned = True
                self.add(record, State.BUFFERED)
        # The newest first, because each step moves a group or a rollout to the front of its queue.
        for group in reversed(groups):
            if group.records[0].outcome is None:
                self._generate_again(group)
            else:
                self.table.ready[group.group_id] = group
                self.table.ready.move_to_end(group.group_id, last=False)
        if self.table.ready:
            self.ready.set()
        self._work_changed()
        return [self._group_handle(group) for group in groups]

    def _deliver_single(self, group: Group) -> None:
        """End a rollout that was submitted without a group, and set the result of its handle."""
        self.journal.delivered([record.task_id for record in group.records])
        (rollout,) = self._rollouts(group)
        if not group.future.done():
            group.future.set_result(rollout)

    def _rollouts(self, group: Group) -> tuple[Rollout, ...]:
        """End all rollouts of a complete group, and count them as completed. Return their results, in the group's order.

        Keep the rollouts' ids of the newest `DECLINABLE` groups, because the caller may decline these groups.
        """
        rollouts = tuple([record.rollout() for record in group.records])
        for record in group.records:
            self._end(record)
        self.table.counts.completed += len(rollouts)
        task_ids = tuple([record.task_id for record in group.records])
        self._handed_out[task_ids[0]] = task_ids
        if len(self._handed_out) > DECLINABLE:
            self._handed_out.popitem(last=False)
        # Groups and records refer to each other. Breaking the cycle frees them without the garbage
        # collector.
        group.records.clear()
        return rollouts

    def decline(self, task_ids: Sequence[str]) -> None:
        """Remove one delivered result from the counts, because the trainer could not use it. New rollouts may then start.

        `task_ids` are the task ids of a delivered group. A rollout that was submitted without a group has only one id.

        Raises:
            RolloutError: the result with these ids was not delivered, is not among the `DECLINABLE` newest results,
                or was declined before.
        """
        together = tuple(task_ids)
        if not together or self._handed_out.get(together[0]) != together:
            raise RolloutError(
                f"decline: result must be delivered by this process, among the newest {DECLINABLE} and not declined yet, got "
                f"rollouts {list(together)}"
            )
        del self._handed_out[together[0]]
        self._drop_kept(together[0])
        self._policy.give_back(len(together))
        self.journal.declined(together)
        self.table.counts.declined += len(together)
        self._work_changed()

    def acknowledge(self, task_id: str) -> None:
        """Record that the caller has stored this rollout and its whole group. Idempotent.

        If this process has not delivered the group yet, all rollouts of the group end as completed, and workers stop the
        attempts that still run for the group.
        """
        self._drop_kept(task_id)
        record = self.table.records.get(task_id)
        if self.journal.acknowledged(task_id) or record is None:
            return
        self.table.ready.pop(record.group.group_id, None)
        members, num_buffered = record.group.records, 0
        for member in members:
            if member.state is State.BUFFERED:
                num_buffered += 1
                self._policy.consume(1)
            elif member.state is State.RUNNING:
                self._withdraw(member)
            self._end(member)
            self.table.counts.completed += 1
        self.journal.add(Ended(tuple([member.task_id for member in members]), num_buffered))
        record.group.future.cancel()
        self._work_changed()

    # --- giving up -------------------------------------------------------------------------

    def cancel(self, group: Group) -> None:
        """Cancel every rollout of a group that has not ended. Idempotent."""
        self.table.counts.cancelled += len(self._take_back(group))
        group.future.cancel()

    def give_up_group(self, task_id: str) -> None:
        """Cancel the group that contains a rollout. The group's `GroupFuture` calls this when it is cancelled."""
        record = self.table.records.get(task_id)
        if record is not None:
            self.cancel(record.group)

    def _take_back(self, group: Group) -> list[Record]:
        """End all unfinished records of a group; return these records."""
        self.table.ready.pop(group.group_id, None)
        records = [record for record in group.records if record.state is not State.ENDED]
        self._end_all(records)
        return records

    def _end_all(self, records: Sequence[Record]) -> None:
        """End these records of a group, and stop their attempts.

        Write one journal entry for all of them. Otherwise a crash between two entries could leave a part of a cancelled
        group in the journal, and the next process would continue this part.
        """
        for record in records:
            self._give_up(record)
            self._end(record)
        if records:
            self.journal.add(Ended(tuple([record.task_id for record in records])))
            self._work_changed()

    def _lose(self, record: Record) -> None:
        """End a rollout that has failed or is too old, and continue its group without it."""
        self._end(record)
        self.journal.add(Ended((record.task_id,)))
        record.group.remove(record)
        self.ready_if_complete(record.group)
        self._work_changed()

    def _give_up(self, record: Record) -> None:
        """Cancel the attempt of a RUNNING record; remove the accepted sample of a BUFFERED record from the counts."""
        if record.state is State.RUNNING:
            self._withdraw(record)
        elif record.state is State.BUFFERED:
            self._policy.discard()

    def _expire(self, record: Record) -> None:
        """Fail a rollout whose overall deadline `deadline_s` passed."""
        when = "between two attempts, after"
        if record.state is State.RUNNING:
            self._withdraw(record)
            when = "in"
        self._fail(
            record,
            PeerTimeout(
                f"rollout {record.task_id}: deadline_s={record.work.deadline_s} passed {when} attempt "
                f"{record.attempt} on engine {record.engine}; newest error: {record.last_error or 'none'}"
            ),
        )

    def _attempt_expired(self, record: Record) -> None:
        """Cancel an attempt that has no answer at its deadline, and retry the rollout."""
        self._unanswered(record)
        self._withdraw(record)
        limit = self._config.attempt_deadline_s
        self.retry(record, f"engine {record.engine}: no answer in {limit} s", Partial())

    def _fail(self, record: Record, error: Exception) -> None:
        """End a rollout that has failed. A group that can lose a rollout continues without it.

        Otherwise let the group's handle raise `error`, and cancel the other rollouts of the group.
        """
        self.newest_failure = str(error)
        said = record.last_error or type(error).__name__
        if num_alike := self._failures.count(said):
            more = f" ({num_alike} rollouts failed in this way)" if num_alike > 1 else ""
            with log_fields(task=record.task_id, attempt=record.attempt, engine=record.engine):
                logger.warning("%s%s", error, more)
        self.table.counts.failed += 1
        if record.group.can_lose_one():
            self._lose(record)
            return
        self._end(record)
        self.journal.add(Ended((record.task_id,)))
        if not record.group.future.done():
            record.group.future.set_exception(error)
        self.cancel(record.group)
        self._work_changed()

    def _end(self, record: Record) -> None:
        """Move a record to ENDED. The staleness policy then no longer counts the rollout as running."""
        if record.admitted:
            self._policy.release()
            record.admitted = False
        self.table.move(record, State.ENDED)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not log it as never retrieved."""
    if not done.cancelled():
        done.exception()


def _checked(sampling: SamplingParams) -> SamplingParams:
    """Return `sampling`; raise `ConfigError` if a worker could not decode it."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"rollout: sampling must be SamplingParams, got {sampling!r}")
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    except (TypeError, OverflowError, *DECODE_ERRORS) as error:
        raise ConfigError(f"rollout: sampling must be SamplingParams: {error}") from error
    return sampling


def _restore_record(record: Record, task: PersistedTask) -> State:
    """Copy the journalled fields of a rollout into its record; return the state of the restored record."""
    record.outcome, record.finished_at = task.outcome, record.submitted_at
    record.admitted = task.running
    if (attempt := task.attempt) is not None:
        record.attempt, record.num_dispatches = attempt.attempt, attempt.num_dispatches
        record.engine, record.worker = attempt.engine, attempt.worker
        record.failures, record.rejections = attempt.failures, attempt.rejections
        record.resubmits, record.oldest_version = attempt.resubmits, attempt.oldest_version
    if task.outcome is not None:
        record.is_returned = task.delivery > 0
        return State.BUFFERED
    if not task.running or attempt is None:
        return State.WAITING
    return State.QUEUED if attempt.worker == LOCAL_WORKER else State.RUNNING
