"""How rollouts enter: single prompts, workflows, and groups of either."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, PeerTimeout
from windlass.rollout.handles import GroupHandle, Rollout, RolloutGroup, RolloutHandle
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import SamplingParams
from windlass.rollout.persisted import Saved
from windlass.rollout.recovery import Recovered, restore
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.table import Group, Record
from windlass.rollout.workflows import encode_value

__all__ = ["Submissions"]


class Submissions:
    """The part of a `RolloutController` that gives rollouts their identity.

    Args:
        incarnation: prefix of task ids.
        life: gets the records.
        work_changed: called after each submission.
    """

    def __init__(self, incarnation: str, life: Lifecycle, work_changed: Callable[[], None]) -> None:
        self.incarnation = self._prefix = incarnation
        self._life = life
        self._work_changed = work_changed
        self._next_task = 0
        self._next_group = 0
        self._closed = False
        self._sampling: SamplingParams | None = None

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> RolloutHandle:
        """Submit one rollout; returns at once. It is consumed when it completes.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: how to sample.
            metadata: given back with the result; msgpack-plain when there is a journal.
            deadline_s: seconds from its first dispatch after which it fails; None for never.

        Raises:
            ConfigError: a prompt that is empty or no integers, sampling of wrong types, a deadline
                that is not positive, metadata that a journal cannot keep, a closed controller.
            RolloutError: the journal cannot be written any more.
        """
        tokens = _token_ids(prompt_ids)
        return self._single(self._record(tokens, sampling, metadata, deadline_s))

    def submit_workflow(
        self,
        workflow: str,
        arguments: object,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> RolloutHandle:
        """Submit one run of a workflow that workers were started with.

        Args:
            workflow: its name; it waits until a worker that knows it has room.
            arguments: msgpack-plain; `WorkflowContext.arguments`.
            sampling: used by calls of the workflow that name no other.
            metadata: as `submit`.
            deadline_s: as `submit`.

        Raises:
            ConfigError: as `submit`; an empty name, arguments that are not plain.
        """
        encoded = _workflow_arguments(workflow, arguments)
        return self._single(self._record((), sampling, metadata, deadline_s, workflow, encoded))

    def submit_workflow_group(
        self,
        workflow: str,
        arguments: object,
        n: int,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> GroupHandle:
        """Submit `n` runs of a workflow with the same arguments, delivered by `next_batch`.

        Raises:
            ConfigError: as `submit_workflow`; n < 1.
        """
        encoded = _workflow_arguments(workflow, arguments)
        return self._group((), n, sampling, metadata, deadline_s, workflow, encoded)

    def _single(self, record: Record) -> RolloutHandle:
        self._life.journal.submitted((record.task_id,), -1, record, record.metadata)
        handle = self._single_handle(record)
        self._life.add(record)
        self._work_changed()
        return handle

    def _single_handle(self, record: Record) -> RolloutHandle:
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        record.future = future
        future.add_done_callback(
            lambda done: self._life.cancel(record) if done.cancelled() else None
        )
        return RolloutHandle(
            record.task_id, future, lambda: self._life.cancel(record), record.metadata
        )

    def _group_handle(self, group: Group) -> GroupHandle:
        # The failure of a group whose handle nobody kept is in the counts and the log.
        group.future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return GroupHandle(
            group.group_id,
            tuple(record.task_id for record in group.records),
            group.future,
            lambda: self._life.cancel_group(group),
            group.metadata,
        )

    def submit_group(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> GroupHandle:
        """Submit `n` samples of one prompt, delivered together by `next_batch`.

        Raises:
            ConfigError: as `submit`; n < 1.
        """
        return self._group(_token_ids(prompt_ids), n, sampling, metadata, deadline_s)

    def _group(
        self,
        prompt_ids: tuple[int, ...],
        n: int,
        sampling: SamplingParams,
        metadata: object,
        deadline_s: float | None,
        workflow: str = "",
        arguments: bytes = b"",
    ) -> GroupHandle:
        if n < 1:
            raise ConfigError(f"rollout: n must be >= 1, got {n}")
        records = [
            self._record(prompt_ids, sampling, metadata, deadline_s, workflow, arguments)
            for _ in range(n)
        ]
        group_id = self._next_group
        task_ids = tuple(record.task_id for record in records)
        self._life.journal.submitted(task_ids, group_id, records[0], metadata)
        self._next_group += 1
        future: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        group = Group(group_id, records[0].prompt_ids, metadata, future, records)
        for record in records:
            record.group = group
            self._life.add(record)
        self._work_changed()
        return self._group_handle(group)

    def _go_on(self, saved: Saved, policy: StalenessPolicy) -> Recovered:
        """Take up what an earlier process left. Ids of this one differ from all of before."""
        self.incarnation = saved.identity
        self._prefix = f"{saved.identity}.{saved.run}" if saved.run else saved.identity
        self._next_group = saved.run << 32
        restored = restore(saved, self._life, policy)
        recovered = Recovered()
        for record in (*restored.singles, *restored.again):
            recovered.rollouts[record.task_id] = self._single_handle(record)
            if record.future is not None:  # nobody has to ask for what it did not submit
                record.future.add_done_callback(
                    lambda done: None if done.cancelled() else done.exception()
                )
        for group in restored.groups.values():
            recovered.groups[group.group_id] = self._group_handle(group)
        for record in restored.again:
            self._life.deliver(record)
        self._life.drop_stale()
        return recovered

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ConfigError(f"rollout controller: {what} needs an open controller, got closed")

    def decline(self, result: RolloutGroup | Rollout) -> None:
        """What was handed out is of no use (all rewards equal, say): it counts as never drawn.

        Without this the staleness bound counts it as trained on, and in the end admits nothing.

        Raises:
            RolloutError: it was not handed out by this process, not lately, or is declined already.
        """
        found = result.rollouts if isinstance(result, RolloutGroup) else (result,)
        self._life.decline([rollout.task_id for rollout in found])

    async def wait(
        self, handles: Sequence[RolloutHandle], *, deadline_s: float
    ) -> tuple[Rollout, ...]:
        """The results in order of `handles`. At the deadline none of them is cancelled.

        Raises:
            PeerTimeout: not all were done within `deadline_s`.
            RolloutError: one of them failed.
        """
        done = asyncio.Event()
        left = len(handles)

        def one_done(_: asyncio.Future[Rollout]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done.set()

        for handle in handles:
            handle.add_done_callback(one_done)
        try:
            async with asyncio.timeout(deadline_s if handles else None):
                if handles:
                    await done.wait()
        except TimeoutError as error:
            raise PeerTimeout(
                f"wait: {len(handles)} rollouts within {deadline_s} s, {left} are not done"
            ) from error
        return tuple([await handle for handle in handles])

    def _record(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        metadata: object,
        deadline_s: float | None,
        workflow: str = "",
        arguments: bytes = b"",
    ) -> Record:
        self._check_open("submit")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {deadline_s}")
        if sampling is not self._sampling:
            self._sampling = _checked(sampling)
        self._next_task += 1
        return Record(
            task_id=f"{self._prefix}-{self._next_task}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            metadata=metadata,
            deadline_s=deadline_s,
            submitted_at=asyncio.get_running_loop().time(),
            workflow=workflow,
            arguments=arguments,
        )


def _token_ids(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Plain integers, also of an array or a tensor: what a worker cannot decode would be sent for ever."""
    try:
        tokens = tuple(map(operator.index, prompt_ids))
    except TypeError as error:
        raise ConfigError(f"rollout: prompt_ids must be integers: {error}") from error
    if not tokens:
        raise ConfigError("rollout: prompt_ids must not be empty")
    if min(tokens) < 0:
        raise ConfigError(f"rollout: prompt_ids must be >= 0, got {min(tokens)}")
    return tokens


def _checked(sampling: SamplingParams) -> SamplingParams:
    """The same object, if a worker can decode it."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    except (TypeError, OverflowError, *DECODE_ERRORS) as error:
        raise ConfigError(f"rollout: sampling must be SamplingParams: {error}") from error
    return sampling


def _workflow_arguments(workflow: str, arguments: object) -> bytes:
    if not workflow:
        raise ConfigError("rollout: workflow must not be empty, got ''")
    return encode_value(f"workflow {workflow}: arguments", arguments)
