"""Registry of rollout workers: their connections, the tasks sent to each worker, and the detection of lost workers.

A task (`RolloutTask`) is one attempt of a rollout, as it is sent to a worker.

A worker process needs no port: it opens a WebSocket to the controller (`net/rpc.py`), and opens another WebSocket
after the connection is lost. The controller keeps a task until the worker reports that the task has arrived, and the
worker keeps an outcome until the controller acknowledges the outcome. The worker's next batch of outcomes carries
the report, and the controller's next batch of tasks carries the acknowledgement. At the start of a connection, both
sides compare their state, and send again the frames that were lost with the previous connection.

A held tensor is a large tensor of an answer, whose elements stay in the worker's memory (`windlass.rollout.held`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from aiohttp import web

from windlass.control.changes import Changes
from windlass.errors import PeerTimeout, PeerUnreachable, ProtocolError, RolloutError
from windlass.net.access import Access, role_token
from windlass.net.clock import Deadline
from windlass.net.messages import Garbled, OwnerClosed, Reply, check_name, check_version
from windlass.net.rpc import Session
from windlass.net.rpc_server import serve
from windlass.net.sockets import close_socket, open_http
from windlass.rollout.chat.server import ChatServer, ChatSettings
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.held import References, TensorsWritten, WriteTensors
from windlass.rollout.messages import (
    LOCAL_WORKER,
    MAX_FRAME_NBYTES,
    MAX_UNSAID,
    WORKER_FRAMES,
    AttemptKey,
    CompletionBatch,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    WorkerFrame,
    WorkerHello,
    WorkerLeaving,
    WorkerWelcome,
    decode_outcomes,
)
from windlass.rollout.tensors import HeldTensor, SampleTensor
from windlass.rollout.text import load_text
from windlass.rollout.workflows import Attempts, Workflow

logger = logging.getLogger(__name__)
MAX_REPLACED = 4096
"""Number of replaced worker processes that the pool remembers, so that it can refuse them if they connect again."""
CLOSE_DEADLINE_S = 2.0
"""Longest time to close the connection of a worker."""
RECONNECT_S = 3.0
"""Seconds that a worker has to connect again after it closed its connection. After this time, the pool removes it."""
STOP_DEADLINE_S = 5.0
"""Longest time that cancelled attempts of the local worker have to end."""
MAX_TASKS_PER_BATCH = 64
"""Largest number of tasks in one message to a worker. A small message fits into the cache of the CPU core that decodes
it, and occupies the event loop only briefly."""
MAX_TOKENS_PER_BATCH = 1 << 20
"""Size of a message's tasks (number of tokens plus bytes of text) at which the controller stops adding tasks."""
GATHER_S = 0.005
"""Seconds between two batches to one worker. Tasks and acknowledgements that arise between the batches share the
second batch. Fewer batches leave the event loop more time for outcomes. The delay does not matter, because a rollout
takes seconds."""


class Worker(ABC):
    """One worker, and the attempts that the controller has assigned to the worker.

    Attributes:
        hello: first frame of the worker.
        assigned: task_id -> number of the assigned attempt.
        takes_no_more: whether the worker is ending, so that it must get no more attempts.
        limit: largest number of attempts at a time, see `max_running` of `WorkerPool`.
        has_answered: whether the worker has sent an outcome.
        is_silent: whether the worker exceeded the deadline of an attempt and has sent no outcome since.
        ending: cancelled attempts that have not ended, because their workflows still clean up.
    """

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.assigned: dict[str, int] = {}
        self.takes_no_more = False
        self.limit = hello.max_concurrent
        self.has_answered = self.is_silent = False
        self.ending: set[AttemptKey] = set()

    @property
    def free_slots(self) -> int:
        """Number of attempts that the controller may assign to the worker now."""
        return 0 if self.takes_no_more else max(self.limit - len(self.assigned), 0)

    def can_run(self, workflow: str) -> bool:
        """Return whether the worker has a free slot and knows the workflow; "" means a plain prompt."""
        return self.free_slots > 0 and (not workflow or workflow in self.hello.workflows)

    def release(self, task_id: str, attempt: int) -> bool:
        """Free the slot of an attempt; return False if the attempt is not assigned to this worker."""
        if self.assigned.get(task_id) != attempt:
            return False
        del self.assigned[task_id]
        return True

    def note_ended(self, outcome: RolloutOutcome) -> None:
        """Remove the attempt of this outcome from `ending`."""
        if self.ending:
            self.ending.discard(AttemptKey(outcome.task_id, outcome.attempt))

    @abstractmethod
    def enqueue(self, task: RolloutTask) -> None:
        """Queue a task for this worker."""

    @abstractmethod
    def withdraw(self, task_id: str, attempt: int) -> None:
        """Cancel an attempt if it is assigned to this worker."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the worker; it must not be used afterwards."""


@final
class LocalWorker(Worker):
    """Worker that runs attempts in the controller's own event loop.

    Use it for workflows with state that cannot move into another process. A workflow that blocks the event loop
    here also delays the outcomes of all other workers.

    Args:
        hello: name of the worker, and the number of attempts that may run at a time.
        workflows: name -> workflow.
        on_outcomes: called with outcomes. If it raises `RolloutError`, the worker keeps the outcomes, and
            `deliver` passes them again.
        on_end: called when an attempt has ended.
        token: secret of the job; the worker derives the token for engines and the token of agents from this secret.
        chat: settings of the endpoint for agents, and the tokenizer for prompts of text and messages.
    """

    def __init__(
        self,
        hello: WorkerHello,
        workflows: Mapping[str, Workflow],
        on_outcomes: Callable[[Sequence[RolloutOutcome]], bool],
        on_end: Callable[[], None],
        token: str,
        chat: ChatSettings,
    ) -> None:
        super().__init__(hello)
        self._on_end = on_end
        self._on_outcomes = on_outcomes
        self._kept: list[RolloutOutcome] = []
        self._session = open_http(
            role_token(token, Access.CLIENT), to_controller=False, many_connections=True
        )
        codec = load_text(chat.tokenizer) if chat.tokenizer else None
        server = ChatServer(chat, role_token(token, Access.AGENT), text=codec)
        self._attempts = Attempts(
            self._session, workflows, hello, self._ended, server, codec, _keep_inline
        )

    def enqueue(self, task: RolloutTask) -> None:
        """Record an attempt as assigned to this worker, and start the attempt in the event loop."""
        self.assigned[task.task_id] = task.attempt
        self._attempts.start(task)

    def withdraw(self, task_id: str, attempt: int) -> None:
        """Cancel an attempt, free its slot, and record it as ending. Ignore an attempt that this worker does not have."""
        if self.release(task_id, attempt):
            self.ending.add(AttemptKey(task_id, attempt))
            self._attempts.cancel(task_id, attempt)

    async def stop(self) -> None:
        """Cancel all attempts, wait for them at most `STOP_DEADLINE_S`, and close the connections to engines."""
        self.takes_no_more = True
        await self._attempts.stop(STOP_DEADLINE_S)
        await self._session.close()

    def deliver(self) -> None:
        """Pass all kept outcomes to `on_outcomes`. If `on_outcomes` raises `RolloutError`, keep the outcomes."""
        if self.takes_no_more or not self._kept:
            return
        with contextlib.suppress(RolloutError):
            self._on_outcomes(tuple(self._kept))
            self._kept.clear()

    def _ended(self, outcome: RolloutOutcome) -> None:
        """Record that an attempt has ended, keep its outcome, and call `deliver`."""
        self.note_ended(outcome)
        self._kept.append(outcome)
        self.deliver()
        self._on_end()


async def _keep_inline(tensors: Mapping[str, SampleTensor]) -> dict[str, SampleTensor]:
    """Return the tensors of a local workflow. They are in the controller's process, and `BatchQueue.put` holds them."""
    return dict(tensors)


@final
class RemoteWorker(Worker, Session[WriteTensors, TensorsWritten]):
    """Worker in a process of its own. The object stays the same when this process connects again.

    Args:
        hello: first frame of the worker.
        running: task_id -> number of the attempt that an earlier controller process assigned to this worker.

    Attributes:
        next_outcome: number of the first outcome that the controller has not used.
    """

    def __init__(self, hello: WorkerHello, running: Mapping[str, int]) -> None:
        Worker.__init__(self, hello)
        Session.__init__(self, f"worker {hello.name}", keeps_calls=True)
        self.assigned.update(running)
        self.lost_timer: asyncio.TimerHandle | None = None
        self.next_outcome = hello.oldest_outcome
        self._outbox: OrderedDict[str, RolloutTask] = OrderedDict()
        self._cancelled: list[AttemptKey] = []
        self._released: list[str] = []
        # Number of the outcome that the next batch acknowledges; 0 for none.
        self._acknowledged = 0
        self._num_sent = hello.received
        # Sent batches that the worker has not reported as received, by number.
        self._sent: dict[int, TaskBatch] = {}
        self._work = asyncio.Event()
        self._sender = asyncio.create_task(self._send_forever(), name=f"tasks of {hello.name}")

    @property
    def is_connected(self) -> bool:
        """Whether the worker process is connected now."""
        return self._socket is not None

    @property
    def free_slots(self) -> int:
        """Number of attempts that the controller may assign to the worker now; 0 without a connection."""
        return 0 if self._socket is None else super().free_slots

    def enqueue(self, task: RolloutTask) -> None:
        """Record an attempt as assigned to this worker, and queue its task for the next message to the worker."""
        self.assigned[task.task_id] = task.attempt
        self._outbox[task.task_id] = task
        self._work.set()

    def withdraw(self, task_id: str, attempt: int) -> None:
        """Cancel an attempt and free its slot. Ignore an attempt that this worker does not have.

        If the attempt's task is still unsent, drop the task. Otherwise record the attempt as ending, and queue its
        cancellation for the next message to the worker.
        """
        if self.release(task_id, attempt) and self._outbox.pop(task_id, None) is None:
            self.ending.add(AttemptKey(task_id, attempt))
            self._cancelled.append(AttemptKey(task_id, attempt))
            self._work.set()

    def acknowledge(self, last: int) -> None:
        """Acknowledge the worker's outcomes up to number `last` with the next message to the worker."""
        self.next_outcome = max(self.next_outcome, last + 1)
        self._acknowledged = self.next_outcome - 1
        self._work.set()

    def release_tensor(self, key: str) -> None:
        """Tell the worker with the next message that it may free a tensor."""
        self._released.append(key)
        self._work.set()

    def note_received(self, received: int) -> None:
        """Drop the kept batches up to number `received`, because the worker has received them. Wake a waiting sender."""
        # The sender waits while `2 * MAX_UNSAID` or more batches are unconfirmed.
        if len(self._sent) >= 2 * MAX_UNSAID:
            self._work.set()
        while (number := next(iter(self._sent), received + 1)) <= received:
            del self._sent[number]

    def compare(self, hello: WorkerHello) -> list[AttemptKey]:
        """Compare the attempts in the worker's first frame with the attempts that the controller has assigned to the worker.

        If the worker has an attempt that is not assigned to it, queue a cancellation of the attempt. Drop kept batches that
        the worker has received. Return assigned attempts that the worker does not have, except attempts that are still on
        their way to the worker.
        """
        self.note_received(hello.received)
        wanted = {AttemptKey(*item) for item in self.assigned.items()}
        # The worker may have unassigned attempts from an earlier controller process: that process ended before it sent
        # the cancellations, or before it wrote the assignments to the journal.
        self._cancelled += set(hello.attempts) - wanted
        if self._cancelled:
            self._work.set()
        coming = {task.task_id for batch in self._sent.values() for task in batch.tasks}
        coming.update(self._outbox)
        unknown = wanted.difference(hello.attempts)
        return [key for key in unknown if key.task_id not in coming]

    async def attach(self, socket: web.WebSocketResponse) -> None:
        """Use a new connection of the worker process. Send unconfirmed batches to the worker again."""
        self._socket, self.was_cut = socket, False
        for batch in list(self._sent.values()):
            await self.send(batch)
        self._work.set()

    def detach(self, socket: web.WebSocketResponse, reason: str) -> None:
        """Fail all calls that wait for a reply, because the connection has ended. Tasks wait for the next connection.

        Do nothing if the worker process has a newer connection already.
        """
        if self._socket is socket:
            self._socket = None
            self.fail_calls(reason)

    async def close(self) -> None:
        """Close the connection of the worker, if there is one."""
        if self._socket is not None:
            await close_socket(self._socket, deadline_s=CLOSE_DEADLINE_S)

    async def stop(self) -> None:
        """Stop sending tasks, send the last acknowledgement, and close the connection."""
        self.takes_no_more = True
        if self.lost_timer is not None:
            self.lost_timer.cancel()
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._outbox.clear()
        # Send the last acknowledgement, because the worker waits for it before it ends.
        if self._acknowledged or self._cancelled or self._released:
            with contextlib.suppress(PeerUnreachable):
                await self.send(self._next_batch())
        await self.close()

    async def _send_forever(self) -> None:
        """Send queued tasks, cancellations and acknowledgements in batches, at most one batch per `GATHER_S`."""
        clock, may_send_at = asyncio.get_running_loop().time, 0.0
        while True:
            await self._work.wait()
            if (early_s := may_send_at - clock()) > 0:
                # A full batch cannot take more tasks, so do not wait for more. `sleep(0)` lets other coroutines run.
                is_full = len(self._outbox) >= MAX_TASKS_PER_BATCH
                await asyncio.sleep(0 if is_full else early_s)
            self._work.clear()
            if self._socket is None or len(self._sent) >= 2 * MAX_UNSAID:
                continue
            if not (self._outbox or self._cancelled or self._acknowledged or self._released):
                continue
            may_send_at = clock() + GATHER_S
            # If `send` fails, `attach` sends the batch on the next connection.
            with contextlib.suppress(PeerUnreachable):
                await self.send(self._next_batch())
            if self._outbox:
                self._work.set()

    def _next_batch(self) -> TaskBatch:
        """Move queued tasks, cancellations, the acknowledgement, and the keys of released tensors into a new batch.

        Keep the batch until the worker reports that it has received the batch.
        """
        tasks: list[RolloutTask] = []
        num_tokens = 0
        while (
            self._outbox and len(tasks) < MAX_TASKS_PER_BATCH and num_tokens < MAX_TOKENS_PER_BATCH
        ):
            _, task = self._outbox.popitem(last=False)
            num_tokens += len(task.prompt_ids) + len(task.partial.output_ids) + len(task.arguments)
            num_tokens += len(task.prompt)
            tasks.append(task)
        self._num_sent += 1
        batch = TaskBatch(
            self._num_sent,
            tuple(tasks),
            tuple(self._cancelled),
            self._acknowledged,
            tuple(self._released),
        )
        self._sent[batch.number] = batch
        self._cancelled, self._acknowledged, self._released = [], 0, []
        return batch


@final
class WorkerPool:
    """The workers of one rollout controller, and the HTTP route to which they connect (as an `rpc.Owner`).

    Args:
        config: limits, for example the time that the pool waits for a lost worker.
        on_outcomes: called with outcomes; an outcome may be passed more than once. If `on_outcomes` raises
            RolloutError or returns False, the worker keeps the outcomes and sends them again.
        on_lost: called with attempts that no worker runs any more, and with the reason.
        on_change: called when a worker joins.
        max_running: largest number of attempts that run at a time, at all workers together. A worker that has
            sent no outcome yet gets at most an equal share of this number, and a silent worker gets one attempt.
            So a worker cannot get all attempts if it accepts all tasks and never answers.
        on_gone: called if the held tensors of a worker are lost. Its arguments are the worker's name, the incarnation of
            the process that has this name now (empty if there is none), and the reason.

    Attributes:
        workers: workers by name.
        workflows: names of all workflows that workers have registered since the start of this process.
    """

    def __init__(
        self,
        config: RolloutConfig,
        on_outcomes: Callable[[Sequence[RolloutOutcome]], bool],
        on_lost: Callable[[Iterable[AttemptKey], str], None],
        on_change: Callable[[], None],
        max_running: int,
        on_gone: Callable[[str, str, str], None],
    ) -> None:
        self._on_gone = on_gone
        self.references = References(self._release_tensor)
        self._members = Changes()
        # A later controller process must have a higher epoch, also after a restart without a journal.
        self._epoch, self._num_writes = time.time_ns() // 1_000_000, 0
        self._max_running = max_running
        self.workers: dict[str, Worker] = {}
        self.workflows: set[str] = set()
        self._config = config
        self._on_outcomes, self._on_lost, self._on_change = on_outcomes, on_lost, on_change
        self._ends = Changes()
        self._identity = ""
        self._absent: dict[str, dict[str, int]] = {}
        self._absent_timers: dict[str, asyncio.TimerHandle] = {}
        self._replaced: dict[tuple[str, str], None] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def open(
        self, identity: str, running: Iterable[tuple[str, AttemptKey]], holders: Iterable[str]
    ) -> None:
        """Start to admit workers.

        Args:
            identity: random id of the controller.
            running: worker name and attempt, for each attempt that ran when an earlier controller process ended.
                Each of these workers has `worker_grace_s` to connect again and report its attempts.
            holders: names of workers that hold tensors of answers that an earlier controller process accepted.
        """
        self._identity = identity
        loop = asyncio.get_running_loop()
        for worker, key in running:
            self._absent.setdefault(worker, {})[key.task_id] = key.attempt
        for worker in holders:
            self._absent.setdefault(worker, {})
        for worker in self._absent:
            self._absent_timers[worker] = loop.call_later(
                self._config.worker_grace_s, self._stayed_away, worker
            )

    async def close(self) -> None:
        """Disconnect all workers, and refuse workers that connect later."""
        self._identity = ""
        for timer in self._absent_timers.values():
            timer.cancel()
        for worker in list(self.workers.values()):
            self._remove(worker)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def wait_for_ends(self, deadline_s: float) -> int:
        """Wait at most `deadline_s` until all cancelled attempts have ended. Return the number of those that have not."""
        with contextlib.suppress(PeerTimeout):
            await self._ends.until(lambda: not self.num_ending, deadline_s, str)
        return self.num_ending

    def note_end(self) -> None:
        """Make `wait_for_ends` check again whether all cancelled attempts have ended."""
        self._ends.notify()

    @property
    def num_ending(self) -> int:
        """Number of cancelled attempts that have not ended, because their workflows still clean up."""
        return sum(len(worker.ending) for worker in self.workers.values())

    @property
    def num_running(self) -> int:
        """Number of assigned attempts, including attempts of workers that have not reconnected to this process."""
        held = (worker.assigned for worker in self.workers.values())
        return sum(map(len, held)) + sum(map(len, self._absent.values()))

    def add(self, worker: Worker) -> None:
        """Add a worker and its workflows, set the limits of all workers, and call `on_change`."""
        self.workers[worker.hello.name] = worker
        self.workflows.update(worker.hello.workflows)
        worker.has_answered |= isinstance(worker, LocalWorker)
        self._set_limits()
        self._members.notify()
        self._on_change()

    def note_unanswered(self, name: str) -> None:
        """Record that a worker sent no outcome before the deadline of an attempt."""
        if name in self.workers and not self.workers[name].is_silent:
            self.workers[name].is_silent = True
            self._set_limits()

    def _note_answer(self, worker: Worker) -> None:
        """Record that a worker has sent an outcome. If the pool had reduced the worker's limit, restore the limit."""
        if worker.is_silent or not worker.has_answered:
            worker.has_answered, worker.is_silent = True, False
            self._set_limits()
            self._on_change()

    def _set_limits(self) -> None:
        """Set the largest number of attempts of each worker; see `max_running`."""
        share = max(-(-self._max_running // max(len(self.workers), 1)), 1)
        for worker in self.workers.values():
            most = worker.hello.max_concurrent
            worker.limit = (
                1 if worker.is_silent else most if worker.has_answered else min(share, most)
            )

    def withdraw(self, name: str, task_id: str, attempt: int) -> None:
        """Cancel a worker's attempt.

        If the worker has not connected to this controller process yet, only record that the attempt is not assigned any
        more. `RemoteWorker.compare` then cancels the attempt when the worker connects.
        """
        if name in self.workers:
            self.workers[name].withdraw(task_id, attempt)
        else:
            self.release(name, task_id, attempt)

    def release(self, name: str, task_id: str, attempt: int) -> None:
        """Free the slot of a worker's attempt that has ended. Do nothing if the worker is unknown."""
        if name in self.workers:
            self.workers[name].release(task_id, attempt)
        elif name in self._absent:
            self._absent[name].pop(task_id, None)

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Answer `/v1/workers`."""
        return await serve(
            request,
            self,
            WORKER_FRAMES,
            heartbeat_s=self._config.worker_lease_s,
            max_nbytes=MAX_FRAME_NBYTES,
        )

    # --- rpc.Owner -----------------------------------------------------------------------

    async def admit(
        self,
        first: WorkerFrame,
        socket: web.WebSocketResponse,  # noqa: ARG002
    ) -> tuple[RemoteWorker, WorkerWelcome]:
        """Register the worker that sent a connection's first frame. Return the worker and its welcome.

        Raises:
            ProtocolError: the frame is not a Hello, or `register` refuses the worker.
            OwnerClosed: the controller is closed.
        """
        if not isinstance(first, WorkerHello):
            raise ProtocolError(
                f"worker: the first frame must be Hello, got {type(first).__name__}"
            )
        return self.register(first), WorkerWelcome(self._identity)

    async def admitted(self, session: RemoteWorker) -> None:  # noqa: ARG002
        """Wake callers that wait for a connected worker, and call `on_change`; see `rpc.Owner`."""
        self._members.notify()
        self._on_change()

    async def received(self, session: RemoteWorker, frame: WorkerFrame) -> None:
        """Use the outcomes in a worker's frame and acknowledge them; see `rpc.Owner`.

        Raises:
            Garbled: the worker sent a second Hello.
            ProtocolError: an entry of a batch is not an outcome.
        """
        match frame:
            case CompletionBatch():
                session.note_received(frame.received)
                if not frame.outcomes:
                    return
                outcomes = await decode_outcomes(frame)
                # If outcomes before this batch are missing, send no acknowledgement, because it would also acknowledge
                # the missing outcomes. The worker then sends all these outcomes again.
                if frame.first > session.next_outcome:
                    return
                try:
                    is_recorded = self._on_outcomes(outcomes)
                except RolloutError:
                    # Without an acknowledgement, the worker sends these outcomes again.
                    return
                self._note_answer(session)
                for outcome in outcomes:
                    session.note_ended(outcome)
                    # From `watch` on, the worker is told to free a tensor when the tensor's last object is freed. So watch
                    # only outcomes that were used: the worker sends unused outcomes again, and their tensors must still
                    # exist then.
                    if outcome.tensors:
                        self.references.watch(outcome.tensors)
                self._ends.notify()
                if is_recorded:
                    session.acknowledge(frame.last)
            case Reply():
                session.on_reply(frame.call_id, frame.result)
            case WorkerLeaving():
                session.takes_no_more = True
            case WorkerHello():
                raise Garbled(f"{session.peer}: Hello may be sent only once")

    async def lost(self, session: RemoteWorker, reason: str, *, ended: bool) -> None:
        """Start a timer. If the worker has not connected again when the timer ends, it counts as lost; see `rpc.Owner`.

        Remove a worker immediately if it is ending and runs no attempt.
        """
        if session.is_connected or self.workers.get(session.hello.name) is not session:
            return
        # If a worker is ending and has no assigned attempts, it does not connect again.
        if session.takes_no_more and not session.assigned:
            self._remove(session)
            self._on_gone(session.hello.name, "", f"worker {session.hello.name} has ended")
            return
        wait_s = RECONNECT_S if ended else self._config.worker_grace_s
        if session.lost_timer is not None:
            session.lost_timer.cancel()
        session.lost_timer = asyncio.get_running_loop().call_later(
            min(wait_s, self._config.worker_grace_s), self._lose, session, reason
        )

    def register(self, hello: WorkerHello) -> RemoteWorker:
        """Admit a worker process, on its first connection or a later one, and return its `RemoteWorker`.

        If a new process uses the name of an earlier process, the pool removes the earlier process, reports the attempts
        and held tensors of the earlier process as lost, and refuses its later connections. If the same process connects
        again, stop the timer after which it would count as lost. If attempts are assigned to the process but unknown to
        it, report these attempts as lost.

        Raises:
            OwnerClosed: the controller is closed; a restarted controller may admit the worker.
            ProtocolError: the protocol version differs, the worker's name is invalid or reserved for the
                controller, or a newer process has taken over the name.
        """
        if not self._identity:
            raise OwnerClosed("the rollout controller is closed")
        check_version(hello.protocol_version, "worker")
        check_name(hello.name, "worker: name")
        if hello.name == LOCAL_WORKER:
            raise ProtocolError(
                f"worker: name must not be {LOCAL_WORKER}, which the controller uses"
            )
        if (hello.name, hello.incarnation) in self._replaced:
            raise ProtocolError(f"worker {hello.name}: a newer process has taken over this name")
        known = self.workers.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self._replaced[hello.name, known.hello.incarnation] = None
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self._lose(known, "another process registered under this name")
        if isinstance(known, RemoteWorker) and known.hello.incarnation == hello.incarnation:
            worker = known
            # The Hello may name an outcome that this controller has used, because the acknowledgement was lost with the last
            # connection. `attach` sends this acknowledgement again, and the worker then continues after this outcome.
            worker.next_outcome = max(worker.next_outcome, hello.oldest_outcome)
            if worker.lost_timer is not None:
                worker.lost_timer.cancel()
        else:
            worker = RemoteWorker(hello, self._left_at(hello.name))
            self.add(worker)
            self._on_gone(
                hello.name, hello.incarnation, f"worker {hello.name} has ended, and another started"
            )
        unknown = worker.compare(hello)
        for key in unknown:
            worker.release(key.task_id, key.attempt)
        self._on_lost(unknown, f"worker {hello.name} connected again without this attempt")
        return worker

    # --- tensors -------------------------------------------------------------------------

    async def write_tensors(self, held: HeldTensor, command: WriteTensors) -> TensorsWritten:
        """Let a worker write tensors into the memory of a trainer rank.

        Args:
            held: one of the tensors; it names the worker.
            command: keys of the tensors, and the memory of the trainer rank.

        Returns:
            Result from the worker. If the connection is lost during the write, the result is an error, and bytes may
            still arrive in the memory of the trainer rank.

        Raises:
            PeerUnreachable: the worker process that held the tensors ended before it received this command.
            PeerTimeout: the worker did not answer in time. Bytes may still arrive in the memory of the trainer rank.
        """
        what = f"worker {held.holder}: write of {len(command.keys)} tensors"
        deadline = Deadline.after(command.deadline_s, what)

        def connected() -> bool:
            return self._holder(held).is_connected

        await self._members.until(
            connected,
            max(deadline.remaining_s, 0.001),
            lambda: f"{what}: the worker is not connected",
        )
        worker = self._holder(held)
        self._num_writes += 1
        call_id = self._epoch, self._num_writes, 0
        try:
            async with asyncio.timeout(max(deadline.remaining_s, 0.001)):
                return await (await worker.call(call_id, command))
        except TimeoutError as error:
            raise PeerTimeout(f"{what}: no answer within {command.deadline_s} s") from error
        except PeerUnreachable as error:
            return TensorsWritten(error=f"{what}: {error}")
        finally:
            worker.forget(call_id)

    def _holder(self, held: HeldTensor) -> RemoteWorker:
        """Return the worker that holds a tensor; raise `PeerUnreachable` if its process has ended."""
        worker = self.workers.get(held.holder)
        if not isinstance(worker, RemoteWorker) or worker.hello.incarnation != held.incarnation:
            raise PeerUnreachable(
                f"worker {held.holder}: the process that held the tensors has ended"
            )
        return worker

    def _release_tensor(self, held: HeldTensor) -> None:
        """Let the holder of a tensor free the tensor, because this process refers to it no longer."""
        with contextlib.suppress(PeerUnreachable):
            self._holder(held).release_tensor(held.key)

    # --- losses --------------------------------------------------------------------------

    def _lose(self, worker: Worker, reason: str) -> None:
        """Remove a worker and report its attempts as lost, so that other workers run them.

        Ignore a worker that was removed before, because another process may have registered under its name.
        """
        if self.workers.get(worker.hello.name) is not worker:
            return
        keys = [AttemptKey(*item) for item in worker.assigned.items()]
        worker.assigned.clear()
        self._remove(worker)
        name = worker.hello.name
        level = logging.WARNING if keys else logging.INFO
        hint = ""
        if keys and "PONG" in reason:
            hint = "; a workflow may have blocked the worker's event loop: see the worker's log"
        logger.log(level, "worker %s lost with %d rollouts: %s%s", name, len(keys), reason, hint)
        self._on_lost(keys, f"worker {name}: {reason}")
        self._on_gone(name, "", f"worker {name}: {reason}")

    def _remove(self, worker: Worker) -> None:
        """Remove a worker from the pool, and stop it in the background; `close` waits for this."""
        del self.workers[worker.hello.name]
        self._set_limits()
        self._members.notify()
        self._ends.notify()
        task = asyncio.create_task(worker.stop(), name=f"stop {worker.hello.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _left_at(self, name: str) -> dict[str, int]:
        """Remove and return the attempts that an earlier controller process had assigned to this worker."""
        timer = self._absent_timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        return self._absent.pop(name, {})

    def _stayed_away(self, name: str) -> None:
        """Report a worker's attempts and held tensors as lost, because it has not connected to this process in time."""
        keys = [AttemptKey(*item) for item in self._left_at(name).items()]
        grace_s = self._config.worker_grace_s
        reason = f"worker {name} did not connect within {grace_s} s after the controller's restart"
        self._on_lost(keys, reason)
        self._on_gone(name, "", reason)
