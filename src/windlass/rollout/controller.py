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
from collections.abc import Sequence
from types import TracebackType
from typing import Self, final

import aiohttp

from windlass.errors import ConfigError, PeerTimeout, StaleMessage
from windlass.rollout._http import authorization
from windlass.rollout.book import Group, Record
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
from windlass.rollout.links import WorkerLink
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

__all__ = ["RolloutController"]

logger = logging.getLogger(__name__)
MAX_DISPATCHES_PER_TURN = 256


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
        self._links: dict[str, WorkerLink] = {}
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
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        record = self._record(prompt_ids, sampling, metadata, deadline_s)
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
        return GroupHandle(group.group_id, future, lambda: self._life.cancel_group(group))

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
            len(book.waiting) + len(book.queued) + len(book.backoff) + len(book.held) + at_workers
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
            running=at_workers,
            held=len(book.held),
            workers=len(self._links),
            engines=len(self._engines.routable()),
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

    def outcomes_arrived(self, link: WorkerLink, outcomes: Sequence[RolloutOutcome]) -> None:
        """Outcomes that a callback has not delivered yet."""
        link.seen(outcomes)
        self._take(outcomes)

    def attempts_unknown(self, link: WorkerLink, keys: Sequence[AttemptKey]) -> None:
        """The worker forgot these: try them again."""
        for key in keys:
            record = self._life.running(key.task_id, key.attempt)
            if record is not None:
                self._life.retry(record, f"worker {link.hello.name}: attempt unknown", Partial())

    def worker_lost(self, link: WorkerLink, reason: str) -> None:
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

    def _stop(self, link: WorkerLink) -> None:
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
        if not prompt_ids:
            raise ConfigError("rollout: prompt_ids must not be empty")
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
        engines = [EngineTarget(name, url) for name, url, _ in self._engines.routable()]
        slots = sum(link.free_slots for link in self._links.values()) if engines else 0
        for _ in range(min(slots, MAX_DISPATCHES_PER_TURN)):
            record = self._next_record()
            if record is None:
                break
            self._dispatch(record, engines)
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

    def _dispatch(self, record: Record, engines: Sequence[EngineTarget]) -> None:
        others = [engine for engine in engines if engine.name != record.avoid_engine]
        engine = min(others or engines, key=lambda e: self._book.engine_load(e.name))
        free = (link for link in self._links.values() if link.free_slots > 0)
        link = min(free, key=lambda each: len(each.assigned) / each.hello.max_concurrent)
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
            )
        )
