"""The owner of every outstanding rollout: admission, dispatch, completion, retry.

Everything runs in one event loop and every state change is synchronous, so there is no
lock: not between completions, and none that is shared with weight updates. A completion
is one call of `complete`, made by the callback route; it resolves futures, frees slots
and dispatches what waits, without awaiting anything. A weight update that takes minutes
is other coroutines awaiting other peers and cannot delay it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Self, final

import aiohttp

from windlass.errors import ConfigError, PeerTimeout, StaleMessage
from windlass.rollout._http import authorization
from windlass.rollout.book import Group, Record, State
from windlass.rollout.choice import PREFIX_TOKENS, EngineChoice
from windlass.rollout.directory import EngineDirectory
from windlass.rollout.handles import (
    ControllerConfig,
    GroupHandle,
    Rollout,
    RolloutGroup,
    RolloutHandle,
    RolloutStats,
)
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.links import Link, WorkerLink
from windlass.rollout.local import LocalLink
from windlass.rollout.messages import (
    AttemptKey,
    CompletionAck,
    CompletionBatch,
    EngineTarget,
    Partial,
    RolloutOutcome,
    RolloutTask,
    SamplingParams,
    WorkerHello,
    WorkerWelcome,
)
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.workflows import Workflow, check_workflows, encode_value

__all__ = ["RolloutController"]

logger = logging.getLogger(__name__)
MAX_DISPATCHES_PER_TURN = 256
LOCAL_WORKER = "controller"


@final
class RolloutController:
    """Submits rollouts and delivers each exactly once; used as `async with`.

    All methods are called in the event loop in which it was entered.

    Args:
        engines: who may be given work; read, never locked.
        policy: admission and consumption bounds; the controller is its only user.
        token: shared secret, sent to workers.
        config: limits.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        policy: StalenessPolicy,
        *,
        token: str = "",
        config: ControllerConfig | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self._engines = engines
        self._policy = policy
        self._token = token
        self._config = config if config is not None else ControllerConfig()
        self._life = Lifecycle(policy, self._config, self._take_back, self._pump_soon)
        self._book = self._life.book
        self._links: dict[str, Link] = {}
        self._choice = EngineChoice(self._config.affinity_slack)
        self._paused = False
        self._replaced: set[tuple[str, str]] = set()
        self._stopping: set[asyncio.Future[list[object]]] = set()
        self._engine_timers: dict[str, asyncio.TimerHandle] = {}
        self._session: aiohttp.ClientSession | None = None
        self._next_task = 0
        self._next_group = 0
        self._batch_turn = asyncio.Lock()
        self._room: set[asyncio.Future[None]] = set()
        self._pump_scheduled = False
        self._closed = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=authorization(self._token), connector=aiohttp.TCPConnector(limit=0)
        )
        self._engines.subscribe(self._engines_changed)
        self._engines_changed()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel everything outstanding and let go of the workers. Idempotent."""
        if self._closed:
            return
        for record in list(self._book.records.values()):
            self._life.cancel(record)
        self._closed = True
        for timer in self._engine_timers.values():
            timer.cancel()
        for waiter in self._room:
            waiter.cancel()
        for link in list(self._links.values()):
            self._stop(link)
        await asyncio.gather(*self._stopping, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- for the owner -----------------------------------------------------------------

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
            metadata: given back with the result.
            deadline_s: seconds from its first dispatch after which it fails; None for never.

        Raises:
            ConfigError: an empty prompt, a deadline that is not positive, a closed controller.
        """
        if not prompt_ids:
            raise ConfigError("rollout: prompt_ids must not be empty")
        return self._single(self._record(prompt_ids, sampling, metadata, deadline_s))

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
        record = self._record((), sampling, metadata, deadline_s)
        record.workflow, record.arguments = workflow, encoded
        return self._single(record)

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
        group = self._group((), n, sampling, metadata, deadline_s)
        for record in group.records:
            record.workflow, record.arguments = workflow, encoded
        return GroupHandle(group.group_id, group.future, lambda: self._life.cancel_group(group))

    def _single(self, record: Record) -> RolloutHandle:
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        record.future = future
        future.add_done_callback(
            lambda done: self._life.cancel(record) if done.cancelled() else None
        )
        self._pump_soon()
        return RolloutHandle(record.task_id, future, lambda: self._life.cancel(record))

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
        if not prompt_ids:
            raise ConfigError("rollout: prompt_ids must not be empty")
        group = self._group(prompt_ids, n, sampling, metadata, deadline_s)
        return GroupHandle(group.group_id, group.future, lambda: self._life.cancel_group(group))

    def _group(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: SamplingParams,
        metadata: object,
        deadline_s: float | None,
    ) -> Group:
        if n < 1:
            raise ConfigError(f"rollout: n must be >= 1, got {n}")
        future: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        # The failure of a group whose handle nobody kept is in the counts and the log.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        group = Group(self._next_group, tuple(prompt_ids), metadata, future)
        self._next_group += 1
        for _ in range(n):
            record = self._record(group.prompt_ids, sampling, metadata, deadline_s)
            record.group = group
            group.records.append(record)
        self._pump_soon()
        return group

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

    def pause(self) -> None:
        """Dispatch nothing until `resume`; what runs goes on, completions still arrive."""
        self._paused = True

    def resume(self) -> None:
        """Dispatch again."""
        self._paused = False
        self._pump_soon()

    def run_here(self, workflows: Mapping[str, Workflow], *, max_concurrent: int = 256) -> None:
        """Run these workflows, and plain prompts, in this event loop too.

        Raises:
            ConfigError: it already does, a name is empty, the limit is below 1, not open.
        """
        known = check_workflows(workflows)
        if self._closed or self._session is None or LOCAL_WORKER in self._links:
            raise ConfigError("run_here: needs an open controller that has no local worker yet")
        if max_concurrent < 1:
            raise ConfigError(f"run_here: max_concurrent must be >= 1, got {max_concurrent}")
        hello = WorkerHello(
            name=LOCAL_WORKER,
            url="",
            incarnation=self.incarnation,
            max_concurrent=max_concurrent,
            workflows=tuple(sorted(known)),
        )
        self._links[LOCAL_WORKER] = LocalLink(hello, known, self)
        self._pump_soon()

    async def next_batch(self, num_groups: int, *, deadline_s: float) -> tuple[RolloutGroup, ...]:
        """The next `num_groups` groups, in order of completion, none too stale to be consumed.

        Concurrent callers are served in order of their calls.

        Raises:
            ConfigError: num_groups < 1.
            PeerTimeout: there were not enough within `deadline_s`; none is taken.
        """
        if num_groups < 1:
            raise ConfigError(f"next_batch: num_groups must be >= 1, got {num_groups}")
        try:
            async with asyncio.timeout(deadline_s), self._batch_turn:
                while len(self._book.ready) < num_groups:
                    self._life.ready.clear()
                    await self._life.ready.wait()
                return tuple(self._life.hand_out() for _ in range(num_groups))
        except TimeoutError as error:
            stats = self.stats()
            raise PeerTimeout(
                f"next_batch: {num_groups} groups within {deadline_s} s, got "
                f"{len(self._book.ready)} (running {stats.running}, waiting {stats.waiting}, "
                f"failed {stats.failed}, workers {stats.workers}, engines {stats.engines})"
            ) from error

    async def wait_for_room(self) -> None:
        """Return once another submission would be admitted at once.

        A producer that waits here before each submission draws prompts exactly as fast
        as the staleness bound, the workers and the trainer allow.
        """
        while self._policy.capacity() <= len(self._book.waiting):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.add(waiter)
            try:
                await waiter
            finally:
                self._room.discard(waiter)

    def set_version(self, version: int) -> None:
        """The consumer holds `version` now. Held answers that grew too old are submitted again.

        Called by itself with the newest version that a routable engine serves.
        """
        self._life.set_version(version)

    def stats(self) -> RolloutStats:
        """Counts, and an audit of where every outstanding rollout is."""
        book, counts = self._book, self._book.counts
        at_workers = sum(len(link.assigned) for link in self._links.values())
        found = (
            len(book.waiting)
            + len(book.queued)
            + book.num_parked()
            + len(book.backoff)
            + len(book.held)
            + at_workers
        )
        ended = counts.completed + counts.cancelled + counts.failed
        return RolloutStats(
            submitted=counts.submitted,
            completed=counts.completed,
            cancelled=counts.cancelled,
            failed=counts.failed,
            outstanding=found,
            lost=counts.submitted - ended - found,
            rejected=counts.rejected,
            retried=counts.retried,
            ignored=counts.ignored,
            waiting=len(book.waiting),
            parked=book.num_parked(),
            running=at_workers,
            held=len(book.held),
            workers=len(self._links),
            engines=len(self._usable_engines()),
            version=self._policy.version,
            capacity=self._policy.capacity(),
        )

    # --- for the routes ------------------------------------------------------------------

    def register_worker(self, hello: WorkerHello) -> WorkerWelcome:
        """A worker introduces itself, for the first time or again.

        Raises:
            ConfigError: the controller is closed, or the worker takes no work.
            StaleMessage: another process took over this worker's name.
        """
        if self._closed or self._session is None:
            raise ConfigError(
                "rollout controller: registration needs an open controller, got closed"
            )
        if hello.name == LOCAL_WORKER:
            raise ConfigError(f"worker: name must not be {LOCAL_WORKER}, it is the controller's")
        if hello.max_concurrent < 1:
            raise ConfigError(
                f"worker {hello.name}: max_concurrent must be >= 1, got {hello.max_concurrent}"
            )
        if (hello.name, hello.incarnation) in self._replaced:
            raise StaleMessage(
                f"worker {hello.name}: incarnation {hello.incarnation} was replaced by another"
            )
        known = self._links.get(hello.name)
        if known is not None and known.hello != hello:
            self._replaced.add((hello.name, known.hello.incarnation))
            self.worker_lost(known, "another incarnation registered")
            known = None
        if known is None:
            self._links[hello.name] = WorkerLink(hello, self._session, self, self._config)
            self._pump_soon()
        return WorkerWelcome(self.incarnation)

    def complete(self, batch: CompletionBatch) -> CompletionAck:
        """Use outcomes, each at most once; all of them may be forgotten by the worker."""
        link = self._links.get(batch.worker)
        if link is not None and link.hello.incarnation == batch.incarnation:
            link.seen(batch.outcomes)
        else:
            link = None
        self._take(batch.outcomes)
        return CompletionAck(tuple(o.seq for o in batch.outcomes), registered=link is not None)

    # --- called by links -------------------------------------------------------------------

    def outcomes_arrived(self, link: Link, outcomes: Sequence[RolloutOutcome]) -> None:
        """Outcomes that a callback has not delivered yet."""
        link.seen(outcomes)
        self._take(outcomes)

    def attempts_unknown(self, link: Link, keys: Sequence[AttemptKey]) -> None:
        """The worker forgot these: try them again."""
        for key in keys:
            record = self._life.running(key.task_id, key.attempt)
            if record is not None:
                self._life.retry(record, f"worker {link.hello.name}: attempt unknown", Partial())

    def worker_lost(self, link: Link, reason: str) -> None:
        """The worker is gone: its attempts are tried elsewhere."""
        if self._links.get(link.hello.name) is link:
            del self._links[link.hello.name]
        assigned = tuple(link.assigned.items())
        self._stop(link)
        logger.warning(
            "worker %s lost with %d rollouts: %s", link.hello.name, len(assigned), reason
        )
        for task_id, attempt in assigned:
            record = self._life.running(task_id, attempt)
            if record is not None:
                link.release(task_id, attempt)
                self._life.retry(record, f"worker {link.hello.name}: {reason}", Partial())

    def _stop(self, link: Link) -> None:
        stopping = link.stop()
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        if self._closed:
            self._links.pop(link.hello.name, None)

    # --- workers -------------------------------------------------------------------------

    def _record(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        metadata: object,
        deadline_s: float | None,
    ) -> Record:
        if self._closed:
            raise ConfigError("rollout controller: submit needs an open controller, got closed")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {deadline_s}")
        self._next_task += 1
        record = Record(
            task_id=f"{self.incarnation}-{self._next_task}",
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            metadata=metadata,
            deadline_s=deadline_s,
            submitted_at=asyncio.get_running_loop().time(),
        )
        self._life.add(record)
        return record

    def _take(self, outcomes: Sequence[RolloutOutcome]) -> None:
        for outcome in outcomes:
            record = self._life.running(outcome.task_id, outcome.attempt)
            if record is None:
                self._book.counts.ignored += 1
                continue
            link = self._links.get(record.worker)
            if link is not None:
                link.release(record.task_id, record.attempt)
            self._life.end_attempt(record, outcome)
        self._pump_soon()

    def _take_back(self, record: Record) -> None:
        link = self._links.get(record.worker)
        if link is not None:
            link.cancel(record.task_id, record.attempt)

    # --- engines -------------------------------------------------------------------------

    def _engines_changed(self) -> None:
        if self._closed:
            return
        routable = {name: version for name, _, version in self._engines.routable()}
        for name in list(self._engine_timers):
            if name in routable:
                self._engine_timers.pop(name).cancel()
        loop = asyncio.get_running_loop()
        for name in self._book.by_engine:
            if name not in routable and name not in self._engine_timers:
                self._engine_timers[name] = loop.call_later(
                    self._config.engine_grace_s, self._evacuate, name
                )
        self.set_version(max(routable.values(), default=-1))
        self._pump_soon()

    def _evacuate(self, name: str) -> None:
        self._engine_timers.pop(name, None)
        for record in list(self._book.by_engine.get(name, {}).values()):
            self._take_back(record)
            self._life.retry(record, f"engine {name}: not routable any more", Partial())

    # --- dispatch --------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Dispatch once per turn of the loop, however many things happened in it."""
        if not self._pump_scheduled and not self._closed:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._closed:
            return
        engines = [] if self._paused else self._usable_engines()
        if engines:
            self._unpark()
        slots = sum(link.free_slots for link in self._links.values()) if engines else 0
        for _ in range(min(slots, MAX_DISPATCHES_PER_TURN)):
            record = self._next_record()
            if record is None:
                break
            if not self._dispatch(record, engines):
                # What stands behind it may still find a worker in the next turn.
                self._book.move(record, State.PARKED)
                self._pump_soon()
        else:
            if slots > MAX_DISPATCHES_PER_TURN:
                # Completions get their turn before the rest is dispatched.
                self._pump_soon()
        if self._room and self._policy.capacity() > len(self._book.waiting):
            for waiter in self._room:
                if not waiter.done():
                    waiter.set_result(None)

    def _next_record(self) -> Record | None:
        if self._book.queued:
            return next(iter(self._book.queued.values()))
        if not self._book.waiting or self._policy.capacity() < 1:
            return None
        record = next(iter(self._book.waiting.values()))
        self._life.admit(record)
        return record

    def _usable_engines(self) -> list[EngineTarget]:
        """Routable, and not so far behind the newest that its answers would be thrown away."""
        routable = self._engines.routable()
        newest = max((version for _, _, version in routable), default=-1)
        return [
            EngineTarget(name, url)
            for name, url, version in routable
            if version < 0 or newest - version <= self._policy.max_staleness
        ]

    def _unpark(self) -> None:
        """Queue as many parked records as workers that know their workflow have room."""
        for workflow, records in self._book.parked.items():
            room = sum(each.free_slots for each in self._links.values() if each.takes(workflow))
            for record in reversed(list(islice(records.values(), room))):
                self._book.move(record, State.QUEUED, front=True)

    def _dispatch(self, record: Record, engines: Sequence[EngineTarget]) -> bool:
        links = [link for link in self._links.values() if link.takes(record.workflow)]
        if not links:
            return False
        prefix = (
            (record.workflow, record.arguments)
            if record.workflow
            else record.prompt_ids[:PREFIX_TOKENS]
        )
        engine = self._choice.choose(
            engines, self._book.engine_load, hash(prefix), record.avoid_engine
        )
        link = min(links, key=lambda each: len(each.assigned) / each.hello.max_concurrent)
        deadline_s = self._life.start_attempt(record, engine.name, link.hello.name)
        link.enqueue(
            RolloutTask(
                task_id=record.task_id,
                attempt=record.attempt,
                prompt_ids=record.prompt_ids,
                sampling=record.sampling,
                engine=engine,
                deadline_s=deadline_s,
                on_abort=self._config.on_abort,
                partial=record.partial,
                workflow=record.workflow,
                arguments=record.arguments,
            )
        )
        return True


def _workflow_arguments(workflow: str, arguments: object) -> bytes:
    if not workflow:
        raise ConfigError("rollout: workflow must not be empty, got ''")
    return encode_value(f"workflow {workflow}: arguments", arguments)
