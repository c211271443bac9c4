"""Controller of all outstanding rollouts: admission, dispatch, completion and retry.

All code runs in one event loop, and every state change is synchronous, so the code needs no lock. The worker
pool passes the outcomes of attempts to `RolloutController._use`, which awaits nothing. A weight update runs in
other coroutines of the same event loop, so a long update does not delay finished rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Self, final

import msgspec
from aiohttp import web

from windlass.control.changes import Changes
from windlass.errors import ConfigError, PeerTimeout, RolloutError
from windlass.net.messages import PROTOCOL_VERSION
from windlass.net.server import ControlServer
from windlass.rollout.batches import BatchQueue
from windlass.rollout.blocked import BlockWatch
from windlass.rollout.chat.server import ChatSettings
from windlass.rollout.directory import EngineChoice, EngineDirectory, prefixes_of
from windlass.rollout.handles import (
    GroupHandle,
    Recovered,
    Rollout,
    RolloutConfig,
    RolloutGroup,
    RolloutHandle,
    RolloutStats,
)
from windlass.rollout.held import held_of
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.messages import (
    LOCAL_WORKER,
    MAX_TOKENS,
    AttemptKey,
    EngineTarget,
    Partial,
    RolloutOutcome,
    RolloutTask,
    Work,
    WorkerHello,
    check_deadline,
)
from windlass.rollout.pool import LocalWorker, RemoteWorker, WorkerPool
from windlass.rollout.staleness import OnStale, StalenessPolicy
from windlass.rollout.table import GroupSize, Record, State
from windlass.rollout.text import Prompt, encode_prompt
from windlass.rollout.values import LARGEST_INTEGER, encode_value
from windlass.rollout.workflows import Workflow, check_workflows
from windlass.sampling import SamplingParams, is_count

logger = logging.getLogger(__name__)
MAX_ASSIGNMENTS_PER_DISPATCH = 256
"""Largest number of attempts that one callback in the event loop assigns to workers, so that other callbacks can run."""
CLEAN_UP_S = 5.0
"""Seconds that cancelled workflows have to clean up when the controller closes."""


@final
class RolloutController:
    """Controller of rollouts: takes submissions, and delivers each result exactly once. Use it with `async with`.

    Call all methods in the event loop that entered the `async with` block.

    Args:
        engines: directory of the routable engines.
        policy: bounds on admission. After this call, only the controller may change the policy.
        token: secret of the job. The local worker, see `run_here`, derives the token for engines from it.
        config: limits.

    Attributes:
        recovered: handles of the rollouts that an earlier process with the same journal left unfinished.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        policy: StalenessPolicy,
        *,
        token: str = "",
        config: RolloutConfig | None = None,
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._token = token
        self._config = config if config is not None else RolloutConfig()
        self.recovered = Recovered()
        self._life = Lifecycle(
            policy,
            self._config,
            self._withdraw,
            self._schedule_dispatch,
            unanswered=lambda record: self._pool.note_unanswered(record.worker),
        )
        self._table, self._journal = self._life.table, self._life.journal
        self._pool = WorkerPool(
            self._config,
            self._use,
            self._try_again,
            self._worker_joined,
            policy.max_concurrent,
            self._life.lose_tensors,
        )
        self._workers = self._pool.workers
        self._engine_timers: dict[str, asyncio.TimerHandle] = {}
        self._choice = EngineChoice(self._config.affinity_slack, self._config.routing)
        # Work of the newest assignment with its prefixes: rollouts of a group have the same work.
        self._routed: tuple[Work | None, list[int]] = None, []
        self._batch_lock = asyncio.Lock()
        self._room, self._joined, self._changes = Changes(), Changes(), Changes()
        self._is_dispatch_scheduled = self._is_open = False
        self._paused = self._closed = False
        self._watch: BlockWatch | None = None

    async def __aenter__(self) -> Self:
        """Open the journal and start; raise `ConfigError` if the journal cannot be used."""
        self.recovered = self._life.open()
        kept = [r.outcome.tensors for r in self._table.buffered.values() if r.outcome is not None]
        for tensors in kept:
            self._pool.references.watch(tensors)
        self._pool.open(
            self._life.identity,
            ((r.worker, r.key) for r in self._table.running()),
            {held.holder for tensors in kept for held in held_of(tensors)},
        )
        self._journal.on_change(self._schedule_dispatch)
        self._is_open = True
        self._watch = BlockWatch(asyncio.get_running_loop(), "the controller")
        self._engines.subscribe(self._engines_changed)
        self._engines_changed()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the controller."""
        await self.close()

    async def close(self) -> None:
        """Cancel all outstanding rollouts and disconnect the workers. Idempotent.

        Without a journal, cancelled workflows have `CLEAN_UP_S` to clean up. With a journal, `close` does not wait for
        their clean-up. The journal does not record this cancellation, so the next controller process with this journal
        runs the outstanding rollouts again.
        """
        if self._closed:
            return
        if not self._config.journal:
            await self.cancel_all(deadline_s=CLEAN_UP_S)
        await self._close_journal()
        for record in list(self._table.records.values()):
            self._life.cancel(record.group)
        self._closed = True
        for timer in self._engine_timers.values():
            timer.cancel()
        self._room.notify()
        self._joined.notify()
        self._life.ready.set()
        await self._pool.close()
        if self._watch is not None:
            self._watch.close()

    async def _close_journal(self) -> None:
        """Write and close the journal. Log an error if its last entries cannot be written."""
        try:
            await self._journal.close()
        # Continue after an error, so that `close` still disconnects the workers and stops the timers.
        except OSError as error:
            logger.error("the journal lacks its last entries: %s", error)  # noqa: TRY400

    @property
    def position(self) -> tuple[str, int]:
        """Random id of the journal, and number of groups that all controllers with this journal have submitted.

        Without a journal, the id is a random id of this controller, and the number counts only its own groups.
        """
        return self._life.identity, self._life.num_groups

    async def cancel_all(self, *, deadline_s: float, keep_in_journal: bool = False) -> int:
        """Cancel all outstanding rollouts, and wait until their workflows have cleaned up.

        From this call until `resume`, the controller dispatches nothing.

        Args:
            deadline_s: seconds for the clean-up of all workflows together.
            keep_in_journal: True to close the journal first, so that the next controller process continues these
                rollouts. This controller then accepts no more rollouts.

        Returns:
            Number of attempts that have not ended within `deadline_s`. They may run until their worker ends.
        """
        self.pause()
        if keep_in_journal:
            await self._close_journal()
        for record in list(self._table.records.values()):
            self._life.cancel(record.group)
        num_left = await self._pool.wait_for_ends(deadline_s)
        if num_left:
            logger.error(
                "%d cancelled attempts had not ended after %g s; the controller does not wait longer",
                *(num_left, deadline_s),
            )
        return num_left

    # --- submission --------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> RolloutHandle:
        """Submit one rollout and return its handle without waiting.

        The staleness policy counts the rollout as consumed as soon as its answer is accepted.

        Args:
            prompt: token ids, a text, messages, or a `Chat` (messages with tools). All but token ids need workers with
                a tokenizer: `--tokenizer`, or `run_here(..., tokenizer=...)`.
            sampling: sampling parameters.
            metadata: any object; the result contains it. With a journal, `metadata` must be msgpack-plain
                (numbers, text, bytes, lists, maps, None).
            deadline_s: seconds from the first dispatch of the rollout until it fails; None for no deadline.

        Raises:
            ConfigError: the prompt is empty or contains an invalid token id or message; `sampling` has wrong types; the
                deadline is not positive; the journal cannot store the metadata; or the controller is closed.
            RolloutError: the journal cannot be written.
        """
        work = self._work(sampling, deadline_s, prompt)
        return self._life.submit(work, metadata=metadata)

    def submit_workflow(
        self,
        workflow: str,
        arguments: object,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
    ) -> RolloutHandle:
        """Submit one rollout that runs a workflow, and return its handle without waiting.

        Args:
            workflow: name of the workflow. The rollout waits until a worker that was started with this
                workflow has a free slot.
            arguments: msgpack-plain value, which the workflow reads as `WorkflowContext.arguments`.
            sampling: default sampling parameters of the workflow's engine calls.
            metadata: as in `submit`.
            deadline_s: as in `submit`.

        Raises:
            ConfigError: as in `submit`, or the name is empty, or the arguments are not msgpack-plain.
            RolloutError: the journal cannot be written.
        """
        work = self._workflow(workflow, arguments, sampling, deadline_s)
        return self._life.submit(work, metadata=metadata)

    def submit_workflow_group(
        self,
        workflow: str,
        arguments: object,
        n: int,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
        num_extra: int = 0,
        min_samples: int | None = None,
    ) -> GroupHandle:
        """Submit a group of `n` rollouts that run a workflow with the same arguments; see `submit_workflow`.

        `submit_group` describes the other parameters, and when the group is delivered.

        Raises:
            ConfigError: as in `submit_workflow` and `submit_group`.
            RolloutError: the journal cannot be written.
        """
        work = self._workflow(workflow, arguments, sampling, deadline_s)
        size = GroupSize.of(n, num_extra, min_samples)
        return self._life.submit_group(work, size, metadata=metadata)

    def submit_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingParams,
        *,
        metadata: object = None,
        deadline_s: float | None = None,
        num_extra: int = 0,
        min_samples: int | None = None,
    ) -> GroupHandle:
        """Submit a group of `n` rollouts of the same prompt; see `submit`.

        `next_batch` delivers the group when `n` of its rollouts are finished.

        Args:
            prompt: as in `submit`.
            n: number of samples that the group needs.
            sampling: as in `submit`.
            metadata: as in `submit`.
            deadline_s: as in `submit`.
            num_extra: number of rollouts to submit in addition. The first `n` rollouts that finish are delivered, and the
                other rollouts are cancelled.
            min_samples: smallest number of samples of a delivered group; None for `n`. Rollouts that fail, or are dropped
                as too old, leave a smaller group. If fewer than `min_samples` samples are left, the group fails.

        Raises:
            ConfigError: as in `submit`, or a number of samples is out of its range.
            RolloutError: the journal cannot be written.
        """
        work = self._work(sampling, deadline_s, prompt)
        size = GroupSize.of(n, num_extra, min_samples)
        return self._life.submit_group(work, size, metadata=metadata)

    def decline(self, result: RolloutGroup | Rollout) -> None:
        """Remove a delivered result from the counts.

        Call this if the trainer cannot use the result, for example because all rewards are equal.

        The staleness policy admits a limited number of rollouts until the version rises, and delivered results count
        towards this limit. If a trainer cannot use some results, it may lack samples for its step. The version then
        does not rise, and without this call the controller would admit no more rollouts.

        Raises:
            RolloutError: the result was not delivered by this process, is not among the 4096 newest results, or
                was declined already.
        """
        found = result.rollouts if isinstance(result, RolloutGroup) else (result,)
        self._life.decline([rollout.task_id for rollout in found])

    def replace(self, reasons: Mapping[str, str]) -> None:
        """Discard answers of a group that is not delivered, and generate new answers in their place.

        The group keeps all answers that are not in `reasons`. It is complete again when the new answers are finished.
        Each discarded answer counts as rejected. A rollout fails after `RolloutConfig.max_rejections` rejections.

        Args:
            reasons: task id of a finished rollout (see `peek`) -> reason for logs and errors, for example why the
                answer could not be scored.

        Raises:
            RolloutError: a rollout is not finished, or was delivered, or the journal cannot be written. In these cases
                no answer is discarded.
        """
        self._journal.check()
        self._life.replace(reasons)

    async def wait(
        self, handles: Iterable[RolloutHandle], *, deadline_s: float
    ) -> tuple[Rollout, ...]:
        """Wait for all rollouts; return their results in the order of `handles`.

        Raises:
            ConfigError: `deadline_s` is not a number.
            PeerTimeout: a rollout was not done within `deadline_s` (it continues), or failed at its own deadline.
            RolloutError: a rollout failed for a different reason.
            asyncio.CancelledError: a rollout was cancelled.
        """
        check_deadline("wait", deadline_s)
        handles = tuple(handles)
        futures = {handle.future for handle in handles}
        if futures:
            _, left = await asyncio.wait(futures, timeout=deadline_s)
            if left:
                raise PeerTimeout(
                    f"wait: {len(left)} of {len(handles)} rollouts were not done within {deadline_s} s "
                    f"{self.describe()}"
                )
        return tuple([await handle for handle in handles])

    def _work(self, sampling: SamplingParams, deadline_s: float | None, prompt: Prompt) -> Work:
        """Return the work of a plain prompt; raise `ConfigError` as `submit` does."""
        self._check_open("submit")
        if text := encode_prompt(prompt):
            return Work(prompt=text, sampling=sampling, deadline_s=deadline_s)
        return Work(prompt_ids=_token_ids(prompt), sampling=sampling, deadline_s=deadline_s)

    def _workflow(
        self, workflow: str, arguments: object, sampling: SamplingParams, deadline_s: float | None
    ) -> Work:
        """Return the work of a workflow, with encoded arguments; raise `ConfigError` as `submit_workflow` does."""
        self._check_open("submit")
        if not workflow or not isinstance(workflow, str):
            raise ConfigError(f"rollout: workflow must be text and not empty, got {workflow!r}")
        encoded = encode_value(f"workflow {workflow}: arguments", arguments)
        return Work(sampling=sampling, deadline_s=deadline_s, workflow=workflow, arguments=encoded)

    def _check_open(self, what: str) -> None:
        """Raise `ConfigError` if the controller is closed. `what` names the method that the caller has called."""
        if self._closed:
            raise ConfigError(f"rollout controller: {what}: the controller is closed")

    # --- for the caller ----------------------------------------------------------------

    def pause(self) -> None:
        """Dispatch nothing until `resume`. Running attempts continue, and the controller uses their outcomes."""
        self._paused = True

    def resume(self) -> None:
        """Dispatch rollouts again after `pause` or `cancel_all`."""
        self._paused = False
        self._schedule_dispatch()

    def run_here(
        self,
        workflows: Mapping[str, Workflow],
        *,
        max_concurrent: int = 256,
        chat: ChatSettings | None = None,
        tokenizer: str = "",
    ) -> None:
        """Start a local worker, which runs these workflows and plain prompts in the controller's event loop.

        Args:
            workflows: name used in submissions -> workflow.
            max_concurrent: largest number of attempts at a time.
            chat: settings of the endpoint for agents, see `WorkflowContext.chat_endpoint`.
            tokenizer: folder of the model's tokenizer. Prompts of text or messages need it, and so do agents. Empty for
                none.

        Raises:
            ConfigError: a local worker exists already, a workflow's name is empty, `max_concurrent` is below
                1, there is no such tokenizer, or the controller is not open.
        """
        known = check_workflows(workflows)
        if self._closed or not self._is_open or LOCAL_WORKER in self._workers:
            raise ConfigError(
                "run_here: the controller must be open and must not have a local worker yet"
            )
        if max_concurrent < 1:
            raise ConfigError(f"run_here: max_concurrent must be >= 1, got {max_concurrent}")
        hello = WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=LOCAL_WORKER,
            incarnation=self._life.identity,
            max_concurrent=max_concurrent,
            workflows=tuple(sorted(known)),
        )
        settings = chat or ChatSettings()
        if tokenizer:
            settings = msgspec.structs.replace(settings, tokenizer=tokenizer)
        worker = LocalWorker(hello, known, self._use, self._pool.note_end, self._token, settings)
        self._journal.on_change(worker.deliver)
        self._pool.add(worker)

    async def next_batch(
        self, num_groups: int, *, deadline_s: float, keep: bool = False
    ) -> tuple[RolloutGroup, ...]:
        """Wait for the next `num_groups` complete groups, and deliver them in the order of their completion; see `take`.

        No delivered group is too old for the trainer, except with `OnStale.TRAIN`. Concurrent calls get their
        groups in the order of the calls.

        Raises:
            ConfigError: num_groups < 1, or the controller was closed before or during the call.
            PeerTimeout: fewer than `num_groups` groups were complete within `deadline_s`. The call delivered no group;
                a later call can deliver the complete groups.
            RolloutError: the journal cannot be written.
        """
        if not is_count(num_groups):
            raise ConfigError(f"next_batch: num_groups must be an integer >= 1, got {num_groups!r}")
        check_deadline("next_batch", deadline_s)
        try:
            async with asyncio.timeout(deadline_s), self._batch_lock:
                while len(self._table.ready) < num_groups:
                    self._check_open("next_batch")
                    self._journal.check()
                    self._life.ready.clear()
                    await self._life.ready.wait()
                return self.take(self.ready_ids()[:num_groups], keep=keep)
        except TimeoutError as error:
            raise PeerTimeout(
                f"next_batch: {len(self._table.ready)} of {num_groups} groups were complete within "
                f"{deadline_s:g} s {self.describe()}"
            ) from error

    def num_open_groups(self) -> int:
        """Return the number of groups that are not delivered and have not ended."""
        return len({r.group.group_id for r in self._table.records.values()} - {-1})

    def ready_ids(self) -> list[int]:
        """Return the ids of complete groups that wait for delivery, in the order of their completion."""
        return list(self._table.ready)

    def peek(self, group_id: int) -> RolloutGroup:
        """Return the complete group with this id without delivering it; the group may still become too old.

        Raises:
            RolloutError: the group is not complete, or was delivered.
        """
        return self._life.peek(group_id)

    def take(self, group_ids: Iterable[int], *, keep: bool = False) -> tuple[RolloutGroup, ...]:
        """Deliver the complete groups with these ids (see `ready_ids`), and return them in the same order.

        The samples of a delivered group count as consumed. The controller drops the group, but the caller may still call
        `decline` with it.

        Args:
            group_ids: ids of the groups.
            keep: whether the controller keeps the groups in memory until `acknowledge` or `decline`, so that
                `return_groups` can make them ready again.

        Raises:
            RolloutError: a group is not complete, was delivered, or is in `group_ids` twice; or the journal cannot be
                written. In these cases no group is delivered.
        """
        self._journal.check()
        return self._life.deliver(tuple(group_ids), keep=keep)

    def return_groups(self) -> tuple[GroupHandle, ...]:
        """Make all kept groups ready again, before all other groups.

        If `take` or `next_batch` delivered a group with `keep=True`, the controller keeps the group until `acknowledge`
        or `decline`.

        Call this if trainer ranks continue from a checkpoint that does not contain their newest steps. Call it after the
        ranks have loaded the checkpoint, and before `count_from`. First acknowledge the groups on which the checkpoint
        has been trained.

        Groups without held tensors (large tensors in the memory of workers) keep their ids, answers and versions. They
        never count as too old, because the trainer trains on each group again from the same step as the first time. The
        controller does not keep held tensors. So groups with held tensors keep their ids, but are generated again.

        Returns:
            New handles of the groups, in the order of their delivery.

        Raises:
            RolloutError: the journal cannot be written.
        """
        self._journal.check()
        return tuple(self._life.return_groups())

    @property
    def failed_alike(self) -> int:
        """Number of rollouts that failed since the last accepted answer and would fail again in the same way.

        Either an engine refused the rollout's request, or the rollout's workflow raised the same exception
        `max_same_errors` times in a row.
        """
        return self._life.failed_alike

    def describe(self) -> str:
        """Return a text for logs and errors: rollouts in each state, and known reasons why rollouts do not end."""
        stats = self.stats()
        names = ("running", "waiting", "parked", "buffered", "failed", "rejected", "declined")
        more = ("dropped", "too_old", "stopped_early")
        counts = {name: getattr(stats, name) for name in (*names, *more)}
        shown = [f"{name.replace('_', ' ')} {count}" for name, count in counts.items()]
        shown += [f"workers {stats.workers}", f"engines {stats.engines}"]
        parts = [f"({', '.join(shown)})"]
        if not stats.engines and stats.version >= 0:
            parts.append(f"no engine serves version {stats.version}")
        parts += [self.refusal(name) for name in self._table.parked if self._table.parked[name]]
        if self._life.newest_failure:
            parts.append(f"newest failure: {self._life.newest_failure}")
        return "; ".join(filter(None, parts))

    def refusal(self, workflow: str) -> str:
        """Return an error text if no worker has registered this workflow, else an empty text.

        `workflow` is empty for a plain prompt, which every worker can run.
        """
        known = self._pool.workflows
        if not workflow or workflow in known:
            return ""
        return (
            f"no worker has registered workflow {workflow!r}; registered workflows: {sorted(known)}"
        )

    def acknowledge(self, task_ids: Iterable[str]) -> None:
        """Record that the caller has stored these rollouts, so that no later process delivers them. Idempotent.

        A later `return_groups` leaves these rollouts out. `task_ids` may also be a single id.

        The id of one rollout acknowledges the rollout's whole group. Unknown ids are ignored. After a restart, the controller
        may run a rollout again although the caller has stored the rollout's result already. This call then also
        ends the rollout.

        Raises:
            RolloutError: the journal cannot be written.
        """
        # A `str` is an iterable of `str` too. Its characters would be ignored as unknown ids.
        for task_id in (task_ids,) if isinstance(task_ids, str) else task_ids:
            self._life.acknowledge(task_id)
        self._journal.flush()

    async def wait_for_room(self, *, deadline_s: float) -> None:
        """Wait until the controller would admit another rollout immediately.

        If a producer calls this before each submission, it reads prompts from its dataset only as fast as the
        staleness bound, the workers and the trainer allow.

        Args:
            deadline_s: seconds; should exceed the time of a training step, because the bound may rise only
                after a step.

        Raises:
            PeerTimeout: no submission would be admitted within `deadline_s`; the error contains the counts.
            ConfigError: the controller was closed before or during the call.
        """

        def there() -> bool:
            self._check_open("wait_for_room")
            return self._policy.capacity() > len(self._table.waiting)

        def message() -> str:
            stats, policy = self.stats(), self._policy
            return (
                f"wait_for_room: no room within {deadline_s:g} s (version {stats.version}, accepted "
                f"{policy.accepted}, consumed {policy.consumed}); {self.describe()}"
            )

        await self._room.until(there, deadline_s, message)

    async def wait_for_workers(self, num_workers: int, *, deadline_s: float) -> None:
        """Wait until at least `num_workers` workers are registered.

        Raises:
            PeerTimeout: fewer were registered after `deadline_s` seconds.
            ConfigError: the controller was closed before or during the call.
        """

        def there() -> bool:
            self._check_open("wait_for_workers")
            return len(self._workers) >= num_workers

        await self._joined.until(
            there,
            deadline_s,
            lambda: (
                f"wait_for_workers: {len(self._workers)} of {num_workers} workers registered within "
                f"{deadline_s} s ({', '.join(self._workers) or 'none'})"
            ),
        )

    def has_worker(self, name: str) -> bool:
        """Return whether the worker process with this name is connected."""
        worker = self._workers.get(name)
        return isinstance(worker, RemoteWorker) and worker.is_connected

    def set_version(self, version: int) -> None:
        """Set the trainer's version. `StalenessPolicy.on_stale` decides what happens to rollouts that are now too old.

        The controller itself calls this with the newest version that a routable engine serves.
        """
        if version > self._policy.version:
            # An engine with new weights discards its cached prefixes. So forget which engine has cached which prefix.
            self._choice.forget()
        self._life.set_version(version)

    def count_from(self, version: int) -> None:
        """Count training steps from `version`, which the trainer publishes without a training step.

        Call this before the trainer publishes such a version, for example for the weights of a checkpoint. Otherwise
        the controller would count the version as a training step, and admit rollouts of later steps too early.
        """
        self._policy.count_from(version)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop after rollouts began, ended or were discarded.

        Several changes in one iteration of the event loop cause one call.
        """
        self._changes.subscribe(listener)

    def stats(self) -> RolloutStats:
        """Return totals, and the current number of rollouts in each state."""
        table, counts = self._table, self._table.counts
        running = self._pool.num_running
        waiting = len(table.waiting) + len(table.queued) + len(table.backoff) + table.num_parked()
        outstanding = waiting + len(table.buffered) + running
        ended = counts.completed + counts.cancelled + counts.failed + counts.dropped
        return RolloutStats(
            **msgspec.structs.asdict(counts),
            outstanding=outstanding,
            lost=counts.submitted - ended - outstanding,
            waiting=len(table.waiting),
            parked=table.num_parked(),
            running=running,
            buffered=len(table.buffered),
            workers=len(self._workers),
            engines=len(self._usable_engines()),
            version=self._policy.version,
            capacity=self._policy.capacity(),
        )

    # --- workers -------------------------------------------------------------------------

    def _worker_joined(self) -> None:
        """Wake the callers of `wait_for_workers`, and let the event loop assign rollouts to the new worker."""
        self._joined.notify()
        self._schedule_dispatch()

    def _use(self, outcomes: Sequence[RolloutOutcome]) -> bool:
        """Apply the outcomes of running attempts; ignore outcomes of all other attempts.

        Returns:
            Whether the journal contains the outcomes. If False, the worker must keep the outcomes and send them again,
            because a later controller process would not know them. This process ignores the repetition.

        Raises:
            RolloutError: the journal cannot be written now, so no outcome was applied.
        """
        self._journal.check()
        for outcome in outcomes:
            record = self._life.find_running(outcome.task_id, outcome.attempt)
            if record is None:
                self._table.counts.ignored += 1
                continue
            self._pool.release(record.worker, record.task_id, record.attempt)
            self._life.end_attempt(record, outcome)
        self._schedule_dispatch()
        try:
            self._journal.flush()
        except RolloutError:
            # The journal has logged the error, and writes again later.
            return False
        return True

    def _try_again(self, keys: Iterable[AttemptKey], reason: str) -> None:
        """Retry the rollouts of attempts that their workers have lost.

        Ignore attempts that the controller has ended already.
        """
        for key in keys:
            record = self._life.find_running(key.task_id, key.attempt)
            if record is not None:
                self._life.retry(record, reason, Partial())

    def _withdraw(self, record: Record) -> None:
        """Cancel the running attempt of a rollout at its worker."""
        self._pool.withdraw(record.worker, record.task_id, record.attempt)

    # --- engines -------------------------------------------------------------------------

    def _engines_changed(self) -> None:
        """Set the trainer's version to the newest version of the routable engines, and schedule a dispatch.

        If an engine with running attempts is no longer routable, start a timer. The timer calls `_evacuate`, unless the
        engine becomes routable again within `engine_grace_s`.
        """
        if self._closed:
            return
        routable = {name: version for name, _, version in self._engines.routable()}
        for name in list(self._engine_timers):
            if name in routable:
                self._engine_timers.pop(name).cancel()
        loop = asyncio.get_running_loop()
        for name in self._table.by_engine:
            if name not in routable and name not in self._engine_timers:
                self._engine_timers[name] = loop.call_later(
                    self._config.engine_grace_s, self._evacuate, name
                )
        self.set_version(max(routable.values(), default=-1))
        self._schedule_dispatch()

    def _evacuate(self, name: str) -> None:
        """Cancel all attempts on an engine that was not routable for `engine_grace_s`, and retry their rollouts."""
        self._engine_timers.pop(name, None)
        for record in list(self._table.by_engine.get(name, {}).values()):
            self._withdraw(record)
            self._life.retry(record, f"engine {name}: not routable any more", Partial())

    # --- dispatch --------------------------------------------------------------------------

    def _schedule_dispatch(self) -> None:
        """Schedule `_dispatch` for the next iteration of the event loop, unless it is scheduled already."""
        if not self._is_dispatch_scheduled and not self._closed:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Assign rollouts to workers, write the assignments to the journal, and notify waiting callers of changes."""
        self._is_dispatch_scheduled = False
        if self._closed or self._journal.broken:
            return
        if not self._paused and self._dispatch_some():
            # Let the event loop receive outcomes before the next dispatch.
            self._schedule_dispatch()
        try:
            # The journal must contain the assignments before a worker receives the tasks.
            self._journal.flush()
        except RolloutError:
            # The journal has logged the error, and notifies the controller when writing succeeds again.
            return
        if self._room and self._policy.capacity() > len(self._table.waiting):
            self._room.notify()
        self._changes.notify()

    def _dispatch_some(self) -> bool:
        """Assign rollouts to workers with free slots; return whether another dispatch may assign more."""
        engines = self._usable_engines()
        if not engines:
            return False
        self._unpark()
        queued, waiting = self._table.queued, self._table.waiting
        slots = sum(worker.free_slots for worker in self._workers.values())
        room, parked = self._policy.capacity(), False
        for _ in range(min(slots, MAX_ASSIGNMENTS_PER_DISPATCH)):
            if queued:
                record = next(iter(queued.values()))
            elif waiting and room > 0:
                record = next(iter(waiting.values()))
                room -= 1
            else:
                return parked
            if not self._assign(record, engines):
                # No worker can run this record, but the next dispatch may assign records after it.
                self._life.park(record)
                parked = True
        return parked or slots > MAX_ASSIGNMENTS_PER_DISPATCH

    def _usable_engines(self) -> list[EngineTarget]:
        """Return the routable engines that are at most `max_staleness` versions behind the newest engine.

        A routable engine without a version (-1) is always usable.
        """
        routable = self._engines.routable()
        newest = max((version for _, _, version in routable), default=-1)
        return [
            EngineTarget(name, url)
            for name, url, version in routable
            if version < 0 or newest - version <= self._policy.max_staleness
        ]

    def _unpark(self) -> None:
        """Move parked records to the front of the dispatch queue.

        For each workflow, move at most one record per free slot of the workers that can run the workflow.
        """
        for workflow, records in self._table.parked.items():
            room = sum(w.free_slots for w in self._workers.values() if w.can_run(workflow))
            for record in reversed(list(islice(records.values(), room))):
                self._table.move(record, State.QUEUED, front=True)

    def _assign(self, record: Record, engines: Sequence[EngineTarget]) -> bool:
        """Assign a rollout to the least busy worker that can run it, and to an engine; return False if no worker can."""
        workers = [w for w in self._workers.values() if w.can_run(record.work.workflow)]
        if not workers:
            return False
        work = record.work
        if work is not self._routed[0]:
            whole = (work.workflow, work.arguments) if work.workflow else work.prompt
            self._routed = work, [hash(whole)] if whole else prefixes_of(work.prompt_ids)
        engine = self._choice.choose(
            engines, self._table.engine_load, self._routed[1], record.avoid_engine
        )
        worker = min(workers, key=lambda each: len(each.assigned) / each.limit)
        deadline_s = self._life.start_attempt(record, engine.name, worker.hello.name)
        trains_on_stale = self._policy.on_stale is OnStale.TRAIN
        worker.enqueue(
            RolloutTask(
                task_id=record.task_id,
                attempt=record.attempt,
                prompt_ids=record.prompt_ids or work.prompt_ids,
                sampling=record.sampling(),
                engine=engine,
                deadline_s=deadline_s,
                on_abort=self._config.on_abort,
                partial=record.partial,
                workflow=work.workflow,
                arguments=work.arguments,
                prompt=work.prompt,
                max_staleness=None if trains_on_stale else self._policy.max_staleness,
            )
        )
        return True


def _token_ids(prompt_ids: Any) -> tuple[int, ...]:
    """Return token ids as Python integers; raise `ConfigError` for ids that a worker could not decode.

    If a worker cannot decode a task, it does not report the task as received. So the controller would resend it for ever.
    """
    try:
        tokens = tuple([int(operator.index(each)) for each in prompt_ids])
    except TypeError as error:
        raise ConfigError(f"rollout: prompt_ids must be integers: {error}") from error
    if not tokens:
        raise ConfigError("rollout: prompt_ids must not be empty")
    if min(tokens) < 0:
        raise ConfigError(f"rollout: prompt_ids must be >= 0, got {min(tokens)}")
    if max(tokens) > LARGEST_INTEGER:
        raise ConfigError(
            f"rollout: prompt_ids must be integers of at most 63 bits, got {max(tokens)}"
        )
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(
            f"rollout: prompt_ids must have at most {MAX_TOKENS} tokens, got {len(tokens)}"
        )
    return tokens


def mount_rollout_routes(
    server: ControlServer, controller: RolloutController, batches: BatchQueue
) -> None:
    """Add the HTTP routes for workers, training batches and rollout counts. Call this before the server starts."""
    batches.write_with(controller._pool.write_tensors)

    async def serve_status(_: web.Request) -> web.Response:
        body = msgspec.json.encode(controller.stats())
        return web.Response(body=body, content_type="application/json")

    server.add_routes(
        [
            web.get("/v1/workers", controller._pool.serve),
            web.get("/v1/batches", batches.serve),
            web.post("/v1/batches/tensors", batches.serve_tensors),
            web.post("/v1/batches/confirm", batches.serve_confirm),
            web.get("/v1/rollouts/status", serve_status),
        ]
    )
