"""From what a journal says to records, groups and counts of a controller that goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from windlass.rollout.handles import GroupHandle, RolloutGroup, RolloutHandle
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.links import LOCAL_WORKER
from windlass.rollout.persisted import Saved, SavedTask
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.table import Group, Record, State

__all__ = ["Recovered", "Restored", "restore"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process on the same journal had left; handles as `submit` gives them.

    Attributes:
        rollouts: by task id. groups: by group id. Their `metadata` is what was submitted,
            after a round trip through msgpack (tuples are lists).
    """

    rollouts: dict[str, RolloutHandle] = field(default_factory=dict)
    groups: dict[int, GroupHandle] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restored:
    """Records that live again: `again` are singles whose outcome is delivered once more."""

    singles: list[Record]
    again: list[Record]
    groups: dict[int, Group]


def restore(saved: Saved, life: Lifecycle, policy: StalenessPolicy) -> Restored:
    """Put every task where it was; call once, in the loop, before anything else happens.

    Running attempts stay with their workers, which are asked when they register. What has grown too
    old is still there: `Lifecycle.drop_stale` once everybody has his handle. Time limits begin anew. What ran in the controller's own loop is queued again.
    """
    loop = asyncio.get_running_loop()
    restored = Restored([], [], {})
    waiting_again: list[Record] = []
    life.first_attempt = saved.run << 20
    records = {task_id: _record(task, loop.time()) for task_id, task in saved.tasks.items()}
    for submission in saved.submissions():
        members = [records[task_id] for task_id in submission.task_ids]
        if submission.group_id < 0:
            (restored.again if members[0].outcome else restored.singles).extend(members)
            continue
        future: asyncio.Future[RolloutGroup] = loop.create_future()
        group = Group(
            submission.group_id, submission.prompt_ids, members[0].metadata, future, members
        )
        restored.groups[group.group_id] = group
        for record in members:
            record.group = group
    num_held = sum(r.outcome is not None for r in records.values()) - len(restored.again)
    consumed = saved.consumed + len(restored.again)
    policy.restore(
        start_version=saved.start_version,
        version=saved.version,
        running=sum(task.running for task in saved.tasks.values()),
        accepted=consumed + num_held,
        consumed=consumed,
    )
    for task, record in zip(saved.tasks.values(), records.values(), strict=True):
        state = _state(task)
        record.admitted = task.running
        life.take_up(record, state)
        if state is State.WAITING and task.attempt is not None:
            waiting_again.append(record)
    for record in reversed(waiting_again):
        life.book.move(record, State.WAITING, front=True)
    for group in restored.groups.values():
        life.ready_if_complete(group)
    return restored


def _state(task: SavedTask) -> State:
    if task.outcome is not None:
        return State.HELD
    if not task.running or task.attempt is None:
        return State.WAITING
    return State.QUEUED if task.attempt.worker == LOCAL_WORKER else State.RUNNING


def _record(task: SavedTask, now: float) -> Record:
    submission, attempt = task.submission, task.attempt
    record = Record(
        task_id=task.task_id,
        prompt_ids=submission.prompt_ids,
        sampling=submission.sampling,
        metadata=msgspec.msgpack.decode(submission.metadata),
        deadline_s=submission.deadline_s,
        submitted_at=now,
        workflow=submission.workflow,
        arguments=submission.arguments,
        outcome=task.outcome,
        finished_at=now,
    )
    if attempt is not None:
        record.attempt, record.handed = attempt.attempt, attempt.handed
        record.engine, record.worker = attempt.engine, attempt.worker
        record.failures, record.rejections = attempt.failures, attempt.rejections
        record.resubmits, record.begun = attempt.resubmits, attempt.begun
    return record
