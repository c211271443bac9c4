"""The controller's side of one rollout worker.

Work goes out in coalesced, idempotent batches, one in flight. A watch connection, which
the worker keeps open with heartbeats, ends when the worker's process ends; whenever it
was (re)opened, both sides compare what they know, so nothing depends on a callback
having arrived.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

import aiohttp

from windlass.errors import ProtocolError
from windlass.rollout._http import post
from windlass.rollout.connections import Lane
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import (
    AttemptKey,
    CancelBatch,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    TasksAccepted,
    WorkerHello,
    WorkerSnapshot,
    decode,
)

__all__ = ["LOCAL_WORKER", "Link", "LinkOwner", "WorkerLink"]

LOCAL_WORKER = "controller"
"""Name of the worker that is the controller's own event loop."""
# Few enough to stay in the cache of the core that decodes and starts them.
MAX_TASKS_PER_POST = 64
GATHER_S = 0.005
CALL_DEADLINE_S = 10.0
MAX_BACKOFF_S = 1.0


class LinkOwner(Protocol):
    """What a link reports to; every call is made in the event loop and must not block."""

    def outcomes_arrived(self, link: Link, outcomes: Sequence[RolloutOutcome]) -> None:
        """Outcomes found while reconciling."""
        ...

    def attempts_unknown(self, link: Link, keys: Sequence[AttemptKey]) -> None:
        """The worker took these attempts and knows nothing of them."""
        ...

    def worker_lost(self, link: Link, reason: str) -> None:
        """The worker is gone; the link is closed."""
        ...


class Link(ABC):
    """Work handed to one incarnation of a worker.

    Attributes:
        hello: how the worker introduced itself.
        assigned: task_id -> attempt that the worker is responsible for.
    """

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.assigned: dict[str, int] = {}
        self._closed = False

    @property
    def free_slots(self) -> int:
        """How many more attempts the worker takes."""
        return 0 if self._closed else self.hello.max_concurrent - len(self.assigned)

    def takes(self, workflow: str) -> bool:
        """Whether it has a slot now and knows the workflow; "" is a plain prompt."""
        return self.free_slots > 0 and (not workflow or workflow in self.hello.workflows)

    def release(self, task_id: str, attempt: int) -> bool:
        """The attempt ended; returns whether it was assigned here."""
        if self.assigned.get(task_id) != attempt:
            return False
        del self.assigned[task_id]
        return True

    @abstractmethod
    def enqueue(self, task: RolloutTask) -> None:
        """Have the worker run a task."""

    @abstractmethod
    def cancel(self, task_id: str, attempt: int) -> None:
        """Take an attempt back."""

    @abstractmethod
    def seen(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """These outcomes have arrived."""

    @abstractmethod
    def stop(self) -> asyncio.Future[list[object]]:
        """End everything; the future is done when it has ended. Idempotent."""


class WorkerLink(Link):
    """The link to a worker process.

    Args:
        hello: how it introduced itself.
        session: carries the control token.
        owner: gets outcomes, and is told when the worker is gone.
        config: limits.
        left_with: attempts that an earlier controller process had sent; it is asked for them.
    """

    def __init__(
        self,
        hello: WorkerHello,
        session: aiohttp.ClientSession,
        owner: LinkOwner,
        config: RolloutConfig,
        left_with: Mapping[str, int],
    ) -> None:
        super().__init__(hello)
        self.assigned.update(left_with)
        self._session = session
        self._owner = owner
        self._config = config
        self._lane = Lane(session, f"{hello.url}/rollouts", TasksAccepted)
        self._outbox: OrderedDict[str, RolloutTask] = OrderedDict()
        self._unconfirmed: dict[str, int] = {}
        self._cancels: list[AttemptKey] = []
        self._work = asyncio.Event()
        self._last_seq = 0
        self._jobs = [
            asyncio.create_task(self._send_forever(), name=f"rollout-send-{hello.name}"),
            asyncio.create_task(self._watch_forever(), name=f"rollout-watch-{hello.name}"),
        ]

    def enqueue(self, task: RolloutTask) -> None:
        """Send a task with the next batch."""
        self.assigned[task.task_id] = task.attempt
        self._outbox[task.task_id] = task
        self._work.set()

    def cancel(self, task_id: str, attempt: int) -> None:
        """Take an attempt back: unsent ones never leave, others are cancelled at the worker."""
        if not self.release(task_id, attempt):
            return
        if self._outbox.pop(task_id, None) is None:
            self._cancels.append(AttemptKey(task_id, attempt))
            self._work.set()

    def seen(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """Remember how far outcomes have arrived without a gap."""
        for outcome in outcomes:
            if outcome.seq == self._last_seq + 1:
                self._last_seq = outcome.seq

    def stop(self) -> asyncio.Future[list[object]]:
        """End both lanes; the future is done when they have ended. Idempotent."""
        self._closed = True
        current = asyncio.current_task()
        jobs = [job for job in self._jobs if job is not current]
        for job in jobs:
            job.cancel()
        return asyncio.gather(*jobs, return_exceptions=True)

    # --- sending -----------------------------------------------------------------------

    async def _send_forever(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._send_all()
        finally:
            await self._lane.close()

    async def _send_all(self) -> None:
        backoff = 0.02
        while self._outbox or self._cancels:
            try:
                await self._send_once()
                backoff = 0.02
                if len(self._outbox) < MAX_TASKS_PER_POST:
                    # What is dispatched meanwhile shares the next message. A rollout takes
                    # seconds; the loop's time belongs to completions.
                    await asyncio.sleep(GATHER_S)
            except (aiohttp.ClientError, TimeoutError, OSError, ProtocolError):
                # The watch lane decides whether the worker is gone; until then the
                # same idempotent batch is sent again.
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _send_once(self) -> None:
        if self._cancels:
            keys = tuple(self._cancels)
            url = f"{self.hello.url}/cancel"
            self._check(
                await post(
                    self._session, url, CancelBatch(keys), TasksAccepted, deadline_s=CALL_DEADLINE_S
                )
            )
            del self._cancels[: len(keys)]
        batch = tuple(islice(self._outbox.values(), MAX_TASKS_PER_POST))
        if not batch:
            return
        for task in batch:
            self._unconfirmed[task.task_id] = task.attempt
            del self._outbox[task.task_id]
        try:
            self._check(await self._lane.call(TaskBatch(batch), deadline_s=CALL_DEADLINE_S))
        except BaseException:
            for task in reversed(batch):
                if self.assigned.get(task.task_id) == task.attempt:
                    self._outbox[task.task_id] = task
                    self._outbox.move_to_end(task.task_id, last=False)
            raise
        finally:
            for task in batch:
                self._unconfirmed.pop(task.task_id, None)

    def _check(self, answer: TasksAccepted) -> None:
        if answer.incarnation != self.hello.incarnation:
            raise ProtocolError(f"worker {self.hello.name}: another incarnation answers")

    # --- watching ----------------------------------------------------------------------

    async def _watch_forever(self) -> None:
        loop = asyncio.get_running_loop()
        last_contact, backoff = loop.time(), 0.02
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CALL_DEADLINE_S, sock_read=self._config.worker_lease_s
        )
        while True:
            try:
                async with self._session.get(f"{self.hello.url}/watch", timeout=timeout) as stream:
                    stream.raise_for_status()
                    await self._reconcile()
                    last_contact, backoff = loop.time(), 0.02
                    async for _ in stream.content.iter_any():
                        last_contact = loop.time()
            except (aiohttp.ClientError, TimeoutError, OSError, ProtocolError) as error:
                gone = _nobody_listens(error) or isinstance(error, ProtocolError)
                if gone or loop.time() - last_contact > self._config.worker_grace_s:
                    self._closed = True
                    self._owner.worker_lost(self, f"{type(error).__name__}: {error}")
                    return
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def _reconcile(self) -> None:
        in_transit = set(self._outbox) | set(self._unconfirmed)
        before = {k: v for k, v in self.assigned.items() if k not in in_transit}
        url = f"{self.hello.url}/completions?since={self._last_seq}"
        timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE_S)
        async with self._session.get(url, timeout=timeout) as response:
            response.raise_for_status()
            snapshot = decode(await response.read(), WorkerSnapshot)
        if snapshot.incarnation != self.hello.incarnation:
            raise ProtocolError(f"worker {self.hello.name}: another incarnation answers")
        self._owner.outcomes_arrived(self, snapshot.outcomes)
        running = {(key.task_id, key.attempt) for key in snapshot.running}
        unknown = [
            AttemptKey(task_id, attempt)
            for task_id, attempt in before.items()
            if self.assigned.get(task_id) == attempt and (task_id, attempt) not in running
        ]
        if unknown:
            self._owner.attempts_unknown(self, unknown)
        # A cancellation, or the knowledge of the attempt, was lost with a controller process.
        self._cancels += [
            key for key in snapshot.running if self.assigned.get(key.task_id) != key.attempt
        ]
        if self._cancels:
            self._work.set()


def _nobody_listens(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
