"""How controller and rollout workers reach each other.

`Connection` and `ConnectionRoutes` are the two ends of one route: requests of one kind, answered one after
another over a WebSocket that stays open, with the same bodies as the plain POST on that route. It exists
because a POST costs both sides several hundred microseconds of HTTP. Where an upgrade is refused (a proxy,
another worker) it posts; whoever uses it sees no difference.

Nothing depends on a connection: bodies are idempotent, and what was sent when it broke is sent again, tasks
by `RemoteWorker`, outcomes by `Outbox`. A watch connection, which the worker keeps open with heartbeats,
ends when the worker's process ends; whenever it was (re)opened, both sides compare what they know.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Generic, Protocol, final

import aiohttp
import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from windlass.errors import ProtocolError
from windlass.net.access import Access, role_token
from windlass.net.sockets import close_socket, open_http
from windlass.rollout.attempts import Attempts
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import (
    CONTENT_TYPE,
    AttemptKey,
    Body,
    BodyT,
    CancelBatch,
    CompletionAck,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    TasksAccepted,
    WorkerHello,
    WorkerSnapshot,
    decode,
    encode,
)
from windlass.rollout.workflows import Workflow

__all__ = [
    "Connection",
    "ConnectionRoutes",
    "LocalWorker",
    "Outbox",
    "RemoteWorker",
    "WorkerConnection",
    "WorkerOwner",
    "post",
    "read_body",
    "reply",
]

MAX_BODY_NBYTES = 1 << 28
CALL_DEADLINE_S = 10.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.02, 1.0
UPGRADE_AGAIN_S = 10.0
CLOSE_S = 0.1
MAX_REASON_NBYTES = 120
# Few enough to stay in the cache of the core that decodes and uses them; the loop is free again soon.
MAX_TASKS_PER_POST = 64
MAX_OUTCOMES_PER_POST = 64
MAX_TOKENS_PER_POST = 1 << 20
GATHER_S = 0.005
STOP_DEADLINE_S = 5.0
_UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError, ProtocolError)
"""What a call raises when the peer cannot be reached or talks nonsense: it is tried again."""


async def read_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Read and decode a body, whatever the app's own limit is: completions are large.

    Raises:
        web.HTTPBadRequest: not such a body.
        web.HTTPRequestEntityTooLarge: over `MAX_BODY_NBYTES`.
    """
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_NBYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_NBYTES, len(data))
    try:
        return decode(bytes(data), kind)
    except ProtocolError as error:
        raise web.HTTPBadRequest(text=str(error)) from error


def reply(body: Body, *, status: int = 200) -> web.Response:
    """A response that carries a body."""
    return web.Response(body=encode(body), content_type=CONTENT_TYPE, status=status)


async def post(
    session: aiohttp.ClientSession, url: str, body: Body, answer: type[BodyT], *, deadline_s: float
) -> BodyT:
    """POST a body and decode the answer.

    Raises:
        aiohttp.ClientError: no connection, or a status of 400 and above.
        TimeoutError: no answer within `deadline_s`.
        ProtocolError: an answer of another kind.
    """
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    async with session.post(
        url, data=encode(body), headers={"Content-Type": CONTENT_TYPE}, timeout=timeout
    ) as response:
        response.raise_for_status()
        return decode(await response.read(), answer)


@final
class Connection(Generic[BodyT]):
    """The side that asks; one call at a time.

    Args:
        session: carries the token; closing it ends the connection.
        url: of the route.
        answer: kind of the answers.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, answer: type[BodyT]) -> None:
        self._session = session
        self._url = url
        self._answer = answer
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._upgrade_at = 0.0

    async def call(self, body: Body, *, deadline_s: float) -> BodyT:
        """Send a body and return the answer.

        Raises:
            aiohttp.ClientError: no connection, or the peer refused.
            TimeoutError: no answer within `deadline_s`.
            ProtocolError: an answer of another kind.
        """
        async with asyncio.timeout(deadline_s):
            socket = self._socket or await self._upgrade()
            if socket is None:
                return await post(
                    self._session, self._url, body, self._answer, deadline_s=deadline_s
                )
            try:
                await socket.send_bytes(encode(body))
                return decode(_data(await socket.receive()), self._answer)
            except BaseException:
                # An answer that is still under way would be taken for that of the next call.
                await self.close()
                raise

    async def close(self) -> None:
        """Close the connection. Idempotent; a later call opens another one."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await close_socket(socket, deadline_s=2 * CLOSE_S)

    async def _upgrade(self) -> aiohttp.ClientWebSocketResponse | None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._upgrade_at:
            return None
        try:
            self._socket = await self._session.ws_connect(
                self._url,
                max_msg_size=MAX_BODY_NBYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError:
            # A POST says whether only the upgrade was refused.
            self._upgrade_at = loop.time() + UPGRADE_AGAIN_S
        return self._socket


def _data(message: aiohttp.WSMessage) -> bytes:
    if message.type is not WSMsgType.BINARY:
        raise aiohttp.ClientConnectionError(
            f"connection closed: {message.type.name} {message.data} {message.extra or ''}"
        )
    data: bytes = message.data
    return data


@final
class ConnectionRoutes(Generic[BodyT]):
    """The side that answers: one route, for POSTs and for connections.

    Args:
        path: of the route.
        kind: of the requests.
        handle: makes the answer at once; may raise `web.HTTPException`.
        status: of the answer to a POST.
    """

    def __init__(
        self, path: str, kind: type[BodyT], handle: Callable[[BodyT], Body], *, status: int = 200
    ) -> None:
        self._path = path
        self._kind = kind
        self._handle = handle
        self._status = status
        self._open: set[asyncio.BaseTransport] = set()

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application that authenticates."""
        return [web.post(self._path, self._on_post), web.get(self._path, self._on_upgrade)]

    async def close(self, _: web.Application) -> None:
        """End all connections, so that the server need not wait for them; for `on_shutdown`."""
        for transport in self._open:
            transport.close()

    async def _on_post(self, request: web.Request) -> web.Response:
        return reply(self._handle(await read_body(request, self._kind)), status=self._status)

    async def _on_upgrade(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_BODY_NBYTES, compress=False)
        await socket.prepare(request)
        transport = request.transport
        if transport is None:
            return socket
        self._open.add(transport)
        try:
            async for message in socket:
                await self._on_message(socket, message)
        except ConnectionError:
            pass  # the peer left before its answer; it asks again
        finally:
            self._open.discard(transport)
        return socket

    async def _on_message(self, socket: web.WebSocketResponse, message: aiohttp.WSMessage) -> None:
        if message.type is not WSMsgType.BINARY:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA)
            return
        try:
            answer = self._handle(decode(message.data, self._kind))
        except ProtocolError as error:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=_reason(str(error)))
        except web.HTTPException as error:
            await socket.close(
                code=WSCloseCode.TRY_AGAIN_LATER, message=_reason(error.text or error.reason)
            )
        else:
            await socket.send_bytes(encode(answer))


def _reason(text: str) -> bytes:
    return text.encode("ascii", "replace")[:MAX_REASON_NBYTES]


class WorkerOwner(Protocol):
    """What a worker connection reports to; every call is made in the event loop and must not block."""

    def outcomes_arrived(
        self, worker: WorkerConnection, outcomes: Sequence[RolloutOutcome]
    ) -> None:
        """Outcomes that the worker had kept, or that ended in this process."""
        ...

    def attempts_unknown(self, worker: WorkerConnection, keys: Sequence[AttemptKey]) -> None:
        """The worker took these attempts and knows nothing of them."""
        ...

    def worker_lost(self, worker: WorkerConnection, reason: str) -> None:
        """The worker is gone; the connection is closed."""
        ...


class WorkerConnection(ABC):
    """The controller's side of one incarnation of a worker, and the attempts that it was handed.

    Attributes:
        hello: how the worker introduced itself.
        assigned: task_id -> attempt that the worker is responsible for.
    """

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.assigned: dict[str, int] = {}
        self._last_seq = 0
        self._closed = False

    @property
    def free_slots(self) -> int:
        """How many more attempts the worker takes."""
        return 0 if self._closed else self.hello.max_concurrent - len(self.assigned)

    def can_run(self, workflow: str) -> bool:
        """Whether it has a slot now and knows the workflow; "" is a plain prompt."""
        return self.free_slots > 0 and (not workflow or workflow in self.hello.workflows)

    def release(self, task_id: str, attempt: int) -> bool:
        """The attempt ended; returns whether it was assigned here."""
        if self.assigned.get(task_id) != attempt:
            return False
        del self.assigned[task_id]
        return True

    def advance_ack(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """Remember how far outcomes have arrived without a gap."""
        for outcome in outcomes:
            if outcome.seq == self._last_seq + 1:
                self._last_seq = outcome.seq

    @abstractmethod
    def enqueue(self, task: RolloutTask) -> None:
        """Have the worker run a task."""

    @abstractmethod
    def cancel(self, task_id: str, attempt: int) -> None:
        """Withdraw an attempt."""

    @abstractmethod
    def stop(self) -> asyncio.Future[list[object]]:
        """End everything; the future is done when it has ended. Idempotent."""


@final
class LocalWorker(WorkerConnection):
    """A worker without a process: attempts run in the controller's own event loop.

    For workflows that hold what cannot be moved into another process. Code that blocks here delays
    completions; a worker process keeps that apart.

    Args:
        hello: identity and limit; its url is empty.
        workflows: user code by name.
        owner: gets the outcomes.
        token: the owner's secret; engines are shown the one that it gives rollout clients.
    """

    def __init__(
        self, hello: WorkerHello, workflows: Mapping[str, Workflow], owner: WorkerOwner, token: str
    ) -> None:
        super().__init__(hello)
        self._owner = owner
        self._session = open_http(role_token(token, Access.CLIENT), unbounded=True)
        self._attempts = Attempts(self._session, workflows, hello, self._ended)

    def enqueue(self, task: RolloutTask) -> None:
        """Start the attempt."""
        self.assigned[task.task_id] = task.attempt
        self._attempts.start(task)

    def cancel(self, task_id: str, attempt: int) -> None:
        """Withdraw an attempt."""
        if self.release(task_id, attempt):
            self._attempts.cancel(task_id, attempt)

    def stop(self) -> asyncio.Future[list[object]]:
        """Cancel what runs; the future is done when it has ended."""
        self._closed = True
        return asyncio.ensure_future(self._stop())

    async def _stop(self) -> list[object]:
        await self._attempts.stop(STOP_DEADLINE_S)
        await self._session.close()
        return []

    def _ended(self, outcome: RolloutOutcome) -> None:
        if not self._closed:
            self._owner.outcomes_arrived(self, (outcome,))


@final
class RemoteWorker(WorkerConnection):
    """A worker process. Tasks go out in coalesced, idempotent batches, one in flight.

    Args:
        hello: how it introduced itself.
        session: carries the control token.
        owner: gets outcomes, and is told when the worker is gone.
        config: limits.
        running: attempts that an earlier controller process had sent; it is asked for them.
    """

    def __init__(
        self,
        hello: WorkerHello,
        session: aiohttp.ClientSession,
        owner: WorkerOwner,
        config: RolloutConfig,
        running: Mapping[str, int],
    ) -> None:
        super().__init__(hello)
        self.assigned.update(running)
        self._session = session
        self._owner = owner
        self._config = config
        self._connection = Connection(session, f"{hello.url}/rollouts", TasksAccepted)
        self._outbox: OrderedDict[str, RolloutTask] = OrderedDict()
        self._unconfirmed: dict[str, int] = {}
        self._cancels: list[AttemptKey] = []
        self._work = asyncio.Event()
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
        """Withdraw an attempt: unsent ones never leave, others are cancelled at the worker."""
        if not self.release(task_id, attempt):
            return
        if self._outbox.pop(task_id, None) is None:
            self._cancels.append(AttemptKey(task_id, attempt))
            self._work.set()

    def stop(self) -> asyncio.Future[list[object]]:
        """End both connections; the future is done when they have ended. Idempotent."""
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
            await self._connection.close()

    async def _send_all(self) -> None:
        backoff = FIRST_BACKOFF_S
        while self._outbox or self._cancels:
            try:
                await self._send_once()
                backoff = FIRST_BACKOFF_S
                if len(self._outbox) < MAX_TASKS_PER_POST:
                    # What is dispatched meanwhile shares the next message. A rollout takes
                    # seconds; the loop's time belongs to completions.
                    await asyncio.sleep(GATHER_S)
            except _UNREACHABLE:
                # The watch connection decides whether the worker is gone; until then the same
                # idempotent batch is sent again.
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
            self._check(await self._connection.call(TaskBatch(batch), deadline_s=CALL_DEADLINE_S))
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
        last_contact, backoff = loop.time(), FIRST_BACKOFF_S
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CALL_DEADLINE_S, sock_read=self._config.worker_lease_s
        )
        while True:
            try:
                async with self._session.get(f"{self.hello.url}/watch", timeout=timeout) as stream:
                    stream.raise_for_status()
                    await self._reconcile()
                    last_contact, backoff = loop.time(), FIRST_BACKOFF_S
                    async for _ in stream.content.iter_any():
                        last_contact = loop.time()
            except _UNREACHABLE as error:
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


@final
class Outbox:
    """A worker's outcomes, kept until the controller has them: delivered at least once, in order of `seq`, one batch in flight.

    An outcome is sent at once when nothing is in flight; those that end meanwhile form
    the next batch. So the batch grows with the load and nobody waits for a timer.

    Args:
        send: delivers a batch and returns what may be forgotten.
        unregistered: called when the controller does not know this worker.
    """

    def __init__(
        self,
        send: Callable[[tuple[RolloutOutcome, ...]], Awaitable[CompletionAck]],
        unregistered: Callable[[], None],
    ) -> None:
        self._send = send
        self._unregistered = unregistered
        self._kept: OrderedDict[int, RolloutOutcome] = OrderedDict()
        self._next_seq = 1
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, outcome: RolloutOutcome) -> None:
        """Keep an outcome; its `seq` is set here."""
        self._kept[self._next_seq] = msgspec.structs.replace(outcome, seq=self._next_seq)
        self._next_seq += 1
        self._empty.clear()
        self._work.set()

    def since(self, seq: int) -> tuple[RolloutOutcome, ...]:
        """What is kept after `seq`."""
        return tuple(outcome for number, outcome in self._kept.items() if number > seq)

    async def drained(self) -> None:
        """Return once everything was acknowledged."""
        await self._empty.wait()

    async def run(self) -> None:
        """Deliver until cancelled."""
        backoff = FIRST_BACKOFF_S
        while True:
            await self._work.wait()
            self._work.clear()
            while self._kept:
                try:
                    ack = await self._send(self._next_batch())
                except _UNREACHABLE:
                    # The outcomes stay; whether the controller is gone for good is decided
                    # by the worker's registration, not here.
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, MAX_BACKOFF_S)
                    continue
                backoff = FIRST_BACKOFF_S
                for seq in ack.seqs:
                    self._kept.pop(seq, None)
                if not ack.registered:
                    self._unregistered()
            self._empty.set()

    def _next_batch(self) -> tuple[RolloutOutcome, ...]:
        batch: list[RolloutOutcome] = []
        num_tokens = 0
        for outcome in self._kept.values():
            num_tokens += outcome.num_tokens()
            if batch and num_tokens > MAX_TOKENS_PER_POST:
                break
            batch.append(outcome)
            if len(batch) == MAX_OUTCOMES_PER_POST:
                break
        return tuple(batch)
