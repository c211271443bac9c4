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
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, final

import aiohttp

from windlass.errors import ConfigError, PeerTimeout, RolloutError, StaleMessage
from windlass.net.access import Access, role_token
from windlass.rollout._http import authorization
from windlass.rollout.directory import EngineDirectory
from windlass.rollout.dispatch import Dispatcher
from windlass.rollout.handles import (
    RolloutConfig,
    RolloutGroup,
    RolloutStats,
)
from windlass.rollout.journal import RolloutJournal
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.links import LOCAL_WORKER, Link, WorkerLink
from windlass.rollout.local import LocalLink
from windlass.rollout.messages import (
    AttemptKey,
    CompletionAck,
    CompletionBatch,
    Partial,
    RolloutOutcome,
    WorkerHello,
    WorkerWelcome,
)
from windlass.rollout.recovery import Recovered
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.submission import Submissions
from windlass.rollout.table import Record
from windlass.rollout.workflows import Workflow, check_workflows
from windlass.updates.changes import Changes

__all__ = ["RolloutController"]

logger = logging.getLogger(__name__)
MAX_REPLACED = 4096
"""Processes whose name another one has taken: the newest are known when they come back."""


@final
class RolloutController(Submissions):
    """Submits rollouts and delivers each exactly once; used as `async with`.

    All methods are called in the event loop in which it was entered.

    Args:
        engines: who may be given work; read, never locked.
        policy: admission and consumption bounds; the controller is its only user.
        token: the owner's secret; workers and engines are shown what is derived for them.
        config: limits.

    Attributes:
        recovered: what an earlier process on the same journal had left.
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
        self._journal = RolloutJournal(
            self._config.journal,
            keep_delivered=self._config.acknowledge,
            sync_s=self._config.journal_sync_s,
            compact_nbytes=self._config.journal_compact_nbytes,
        )
        self.recovered = Recovered()
        self._absent: dict[str, asyncio.TimerHandle] = {}
        life = Lifecycle(policy, self._config, self._take_back, self._pump_soon, self._journal)
        super().__init__(uuid.uuid4().hex[:12], life, self._pump_soon)
        self._book = life.book
        self._links: dict[str, Link] = {}
        self._dispatcher = Dispatcher(engines, self._links, life, policy, self._config)
        self._paused = False
        self._replaced: dict[tuple[str, str], None] = {}
        self._stopping: set[asyncio.Future[list[object]]] = set()
        self._engine_timers: dict[str, asyncio.TimerHandle] = {}
        self._session: aiohttp.ClientSession | None = None
        self._batch_turn = asyncio.Lock()
        self._room, self._worker_joined = Changes(), Changes()
        self._pump_scheduled = False

    async def __aenter__(self) -> Self:
        """Raises `ConfigError` when the journal cannot be used."""
        self.recovered = self._go_on(self._journal.open(self._policy.start_version), self._policy)
        self._expect_workers()
        self._session = aiohttp.ClientSession(
            headers=authorization(role_token(self._token, Access.WORKER) if self._token else ""),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._engines.subscribe(self._engines_changed)
        self._engines_changed()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel everything outstanding and let go of the workers. Idempotent.

        With a journal the next process goes on with what was outstanding.
        """
        if self._closed:
            return
        try:
            await self._journal.close()
        except OSError as error:  # the rest is closed all the same
            logger.error("what was added last is not in the journal: %s", error)  # noqa: TRY400
        for record in list(self._book.records.values()):
            self._life.cancel(record)
        self._closed = True
        for timer in (*self._engine_timers.values(), *self._absent.values()):
            timer.cancel()
        self._room.notify()
        self._worker_joined.notify()
        self._life.ready.set()
        for link in list(self._links.values()):
            self._stop(link)
        await asyncio.gather(*self._stopping, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- for the owner -----------------------------------------------------------------

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
        self._links[LOCAL_WORKER] = LocalLink(hello, known, self, self._token)
        self._pump_soon()

    async def next_batch(self, num_groups: int, *, deadline_s: float) -> tuple[RolloutGroup, ...]:
        """The next `num_groups` groups, in order of completion; none too old, unless `OnStale.TRAIN`.

        Concurrent callers are served in order of their calls.

        Raises:
            ConfigError: num_groups < 1, or the controller is closed, meanwhile too.
            PeerTimeout: there were not enough within `deadline_s`; none is taken.
            RolloutError: the journal cannot be written any more.
        """
        if num_groups < 1:
            raise ConfigError(f"next_batch: num_groups must be >= 1, got {num_groups}")
        try:
            async with asyncio.timeout(deadline_s), self._batch_turn:
                while len(self._book.ready) < num_groups:
                    self._check_open("next_batch")
                    self._journal.check()
                    self._life.ready.clear()
                    await self._life.ready.wait()
                self._journal.check()
                groups = tuple(self._life.hand_out() for _ in range(num_groups))
                self._journal.flush()
                return groups
        except TimeoutError as error:
            stats = self.stats()
            raise PeerTimeout(
                f"next_batch: {num_groups} groups within {deadline_s} s, got "
                f"{len(self._book.ready)} (running {stats.running}, waiting {stats.waiting}, "
                f"failed {stats.failed}, dropped {stats.dropped}, too old {stats.too_old}, stopped "
                f"early {stats.stopped_early}, workers {stats.workers}, engines {stats.engines})"
            ) from error

    def acknowledge(self, task_ids: Iterable[str]) -> None:
        """The owner has these rollouts for good; no later process delivers them. Idempotent.

        One task of a group stands for the group. Ids that are not known are ignored; what is
        outstanding, because an earlier process died before it could acknowledge, is withdrawn.

        Raises:
            RolloutError: the journal cannot be written any more.
        """
        for task_id in task_ids:
            self._life.acknowledge(task_id)
        self._journal.flush()

    async def wait_for_room(self, *, deadline_s: float) -> None:
        """Return once another submission would be admitted at once.

        A producer that waits here before each submission draws prompts exactly as fast
        as the staleness bound, the workers and the trainer allow.

        Args:
            deadline_s: longer than a step of the trainer takes, which is what makes room.

        Raises:
            PeerTimeout: no room within `deadline_s`; says what takes it.
            ConfigError: the controller is closed, meanwhile too.
        """

        def there() -> bool:
            self._check_open("wait_for_room")
            return self._policy.capacity() > len(self._book.waiting)

        def message() -> str:
            stats, policy = self.stats(), self._policy
            return (
                f"wait_for_room: none within {deadline_s} s (version {stats.version}, running "
                f"{stats.running}, waiting {stats.waiting}, accepted {policy.accepted}, consumed "
                f"{policy.consumed}, workers {stats.workers})"
            )

        await self._room.until(there, deadline_s, message)

    async def wait_for_workers(self, num_workers: int, *, deadline_s: float) -> None:
        """Return once `num_workers` workers are registered.

        Raises:
            PeerTimeout: fewer were registered after `deadline_s` seconds.
            ConfigError: the controller is closed, meanwhile too.
        """

        def there() -> bool:
            self._check_open("wait_for_workers")
            return len(self._links) >= num_workers

        await self._worker_joined.until(
            there,
            deadline_s,
            lambda: (
                f"wait_for_workers: {num_workers} workers within {deadline_s} s, "
                f"{len(self._links)} are registered ({', '.join(self._links) or 'none'})"
            ),
        )

    def set_version(self, version: int) -> None:
        """The consumer holds `version` now. `StalenessPolicy.on_stale` says what becomes of what grew too old.

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
        ended = counts.completed + counts.cancelled + counts.failed + counts.dropped
        return RolloutStats(
            submitted=counts.submitted,
            completed=counts.completed,
            cancelled=counts.cancelled,
            failed=counts.failed,
            dropped=counts.dropped,
            outstanding=found,
            lost=counts.submitted - ended - found,
            rejected=counts.rejected,
            too_old=counts.too_old,
            stopped_early=counts.stopped_early,
            wasted_tokens=counts.wasted_tokens,
            retried=counts.retried,
            ignored=counts.ignored,
            declined=counts.declined,
            waiting=len(book.waiting),
            parked=book.num_parked(),
            running=at_workers,
            held=len(book.held),
            workers=len(self._links),
            engines=len(self._dispatcher.usable_engines()),
            version=self._policy.version,
            capacity=self._policy.capacity(),
        )

    # --- for the routes ------------------------------------------------------------------

    def register_worker(self, hello: WorkerHello) -> WorkerWelcome:
        """A worker introduces itself, for the first time or again.

        Raises:
            RolloutError: the controller is closed; its successor may take the worker.
            ConfigError: the worker takes no work.
            StaleMessage: another process took over this worker's name.
        """
        if self._closed or self._session is None:
            raise RolloutError(
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
            self._replaced[hello.name, known.hello.incarnation] = None
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self.worker_lost(known, "another incarnation registered")
            known = None
        if known is None:
            self._links[hello.name] = WorkerLink(
                hello, self._session, self, self._config, self._left_with(hello.name)
            )
            self._worker_joined.notify()
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
            link.release(key.task_id, key.attempt)
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
        # Before the worker hears that it may forget them.
        self._journal.flush()
        self._pump_soon()

    def _expect_workers(self) -> None:
        """Workers of an earlier process have the usual time to come back with their attempts."""
        loop = asyncio.get_running_loop()
        for running in self._book.by_engine.values():
            for record in running.values():
                if record.worker not in self._absent:
                    self._absent[record.worker] = loop.call_later(
                        self._config.worker_grace_s, self._stayed_away, record.worker
                    )

    def _left_with(self, worker: str) -> dict[str, int]:
        """The attempts with which an earlier process had left this worker, asked for once."""
        timer = self._absent.pop(worker, None)
        if timer is None:
            return {}
        timer.cancel()
        return {
            record.task_id: record.attempt
            for running in self._book.by_engine.values()
            for record in running.values()
            if record.worker == worker
        }

    def _stayed_away(self, worker: str) -> None:
        for task_id, attempt in self._left_with(worker).items():
            record = self._life.running(task_id, attempt)
            if record is not None:
                reason = (
                    f"worker {worker}: not back {self._config.worker_grace_s} s after a restart"
                )
                self._life.retry(record, reason, Partial())

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
        if self._closed or self._journal.broken:
            return
        if not self._paused and self._dispatcher.turn():
            # Completions get their turn before the rest is dispatched.
            self._pump_soon()
        # Before a link sends anything of this turn.
        self._journal.flush()
        if self._room and self._policy.capacity() > len(self._book.waiting):
            self._room.notify()
