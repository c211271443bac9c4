"""A rollout worker process: runs attempts, and keeps their outcomes until the controller acknowledges them.

`python -m windlass.rollout.worker --controller URL --name worker-0`

The worker reads its token from WINDLASS_TOKEN; processes that workflows start do not inherit this variable.
The worker connects to the controller. It listens on a port only for agents (`windlass.rollout.chat`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import aiohttp
import msgspec

from windlass.envs import AGENT_TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE, control_token, secret_value
from windlass.errors import AuthenticationError, ConfigError, PeerUnreachable, ProtocolError
from windlass.net.access import Access, role_token
from windlass.net.logs import configure_logging
from windlass.net.messages import PROTOCOL_VERSION, Envelope, check_name, encode
from windlass.net.rpc_client import Client
from windlass.net.sockets import open_http
from windlass.rollout.blocked import BlockWatch
from windlass.rollout.chat.agent import agent_workflow
from windlass.rollout.chat.server import ChatServer, ChatSettings
from windlass.rollout.held import (
    INLINE_NBYTES,
    LEASE_S,
    TensorStore,
    TensorsWritten,
    WriteTensors,
)
from windlass.rollout.messages import (
    CONTROLLER_FRAMES,
    MAX_ATTEMPTS,
    MAX_FRAME_NBYTES,
    MAX_OUTCOMES,
    MAX_UNSAID,
    AttemptKey,
    CompletionBatch,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    TaskBatch,
    WorkerHello,
    WorkerLeaving,
    WorkerWelcome,
    decode_outcome,
)
from windlass.rollout.text import load_text
from windlass.rollout.workflows import Attempts, Workflow, check_workflows

logger = logging.getLogger(__name__)
REMEMBERED_ATTEMPTS = 1 << 16
"""Number of newest ended attempts that a worker remembers, so that it does not run them again if it gets a task twice."""
MAX_BATCH_NBYTES = 16 << 20
"""Largest size of the outcomes in one batch, unless a single outcome is larger."""
MAX_IN_FLIGHT = 8
"""Largest number of batches of outcomes that were sent and not acknowledged. The controller acknowledges a batch
a few milliseconds later, in its next `TaskBatch`."""
HAND_OVER_S = 5.0
"""Seconds that an ending worker waits for the controller to acknowledge its outcomes."""
MAX_OUTCOME_NBYTES = MAX_FRAME_NBYTES - (1 << 20)
"""Largest size of an outcome. The worker reports a larger outcome as an error."""
CHECKED_NBYTES = 1 << 20
"""Size above which the worker decodes an encoded outcome as a check before it sends the outcome. Without the check,
the controller would refuse an invalid outcome each time, and the worker would resend the outcome for ever."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker process.

    Attributes:
        controller: base URL of the controller.
        name: name of the worker, unique among the controller's workers.
        max_concurrent: largest number of attempts at a time.
        call_deadline_s: seconds after which the worker sends unacknowledged outcomes again.
        controller_gone_s: seconds without a reachable controller after which the worker exits.
        shutdown_s: seconds that workflows have to clean up after SIGTERM or SIGINT.
        tokenizer: folder with the model's tokenizer and chat template, for prompts of text and messages, and for agents;
            empty for a worker without text.
        chat_host, chat_port, chat_advertise_host: address of the endpoint for agents, see `ChatSettings`.
        tool_format: format in which the model writes tool calls, see `ChatSettings`.
        max_context: number of tokens of prompt and answer together that the engines accept, see `ChatSettings`.
        inline_nbytes: size up to which the elements of a workflow's tensor travel with its outcome. The worker keeps larger
            tensors, and writes them into the memory of a trainer rank.
        tensor_lease_s: longest time in seconds that the worker keeps a tensor.
        tensor_transport: name or JSON of the transport for tensors.
    """

    controller: str
    name: str
    max_concurrent: int = 1024
    call_deadline_s: float = 10.0
    controller_gone_s: float = 60.0
    shutdown_s: float = 5.0
    tokenizer: str = ""
    chat_host: str = "127.0.0.1"
    chat_port: int = 0
    chat_advertise_host: str = ""
    tool_format: str = "hermes"
    max_context: int = 0
    inline_nbytes: int = INLINE_NBYTES
    tensor_lease_s: float = LEASE_S
    tensor_transport: str = "auto"

    @property
    def chat(self) -> ChatSettings:
        """Settings of the endpoint for agents."""
        return ChatSettings(
            tokenizer=self.tokenizer,
            host=self.chat_host,
            port=self.chat_port,
            advertise_host=self.chat_advertise_host,
            tool_format=self.tool_format,
            max_context=self.max_context,
        )


@final
class RolloutWorker(Client[WriteTensors, TensorsWritten, WorkerWelcome | TaskBatch]):
    """Rollout worker of this process: runs attempts and delivers outcomes. Call all methods in one event loop.

    The worker sends each outcome at least once, in the order in which the attempts end. It sends a new outcome
    immediately if fewer than `MAX_IN_FLIGHT` batches are unacknowledged. Otherwise new outcomes wait for an
    acknowledgement, and then share a batch. So batches grow with the load, and no outcome waits for a timer.

    Args:
        settings: addresses, name and limits of the worker.
        token: token for the connection to the controller.
        engine_session: HTTP session for requests to engines, with their token and no limit on connections.
        workflows: name -> workflow, in addition to the built-in ones.
        agent_token: second token for agents that claim rollouts. The first one is derived from `token`.

    Raises:
        ConfigError, ProtocolError: an address, token, number or name is invalid, or there is no such tokenizer.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        token: str,
        engine_session: aiohttp.ClientSession,
        workflows: Mapping[str, Workflow] | None = None,
        *,
        agent_token: str = "",
    ) -> None:
        super().__init__(
            settings.controller,
            "/v1/workers",
            token,
            CONTROLLER_FRAMES,
            loop=asyncio.get_running_loop(),
            give_up_s=settings.controller_gone_s,
        )
        known = check_workflows(workflows)
        for name in (settings.name, *known):
            check_name(name, "worker: a name")
        if not 1 <= settings.max_concurrent <= MAX_ATTEMPTS:
            raise ConfigError(
                f"worker: max_concurrent must be in [1, {MAX_ATTEMPTS}], got {settings.max_concurrent}"
            )
        self._settings = settings
        self._hello = WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=settings.name,
            incarnation=uuid.uuid4().hex[:12],
            max_concurrent=settings.max_concurrent,
            workflows=tuple(sorted(known)),
        )
        codec = load_text(settings.tokenizer) if settings.tokenizer else None
        self._chat = ChatServer(
            settings.chat, agent_token, role_token(token, Access.AGENT), text=codec
        )
        self._tensors = TensorStore(
            settings.name,
            self._hello.incarnation,
            towards=settings.controller,
            transport=settings.tensor_transport,
            lease_s=settings.tensor_lease_s,
        )
        self._attempts = Attempts(
            engine_session,
            known,
            self._hello,
            self._ended,
            self._chat,
            codec,
            partial(self._tensors.hold, inline_nbytes=settings.inline_nbytes),
        )
        self._controller = ""
        self._remembered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._kept: OrderedDict[int, tuple[tuple[str, int], bytes]] = OrderedDict()
        self._num_outcomes = self._num_sent = 0
        # Number of the last outcome in each unacknowledged batch.
        self._in_flight: deque[int] = deque()
        # Numbers of the newest received task batch, and of the newest batch reported as received.
        self._received = self._said = 0
        self._send_again_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._work, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()

    # --- net.rpc_client.Client -----------------------------------------------------------------

    def hello(self) -> WorkerHello:
        """Return the first frame of a connection; see `Client`.

        The frame names all running attempts and all attempts with unacknowledged outcomes. It also reports all received
        task batches, so record these batches as reported.
        """
        self._said = self._received
        there = [*self._attempts.running, *(key for key, _ in self._kept.values())]
        return msgspec.structs.replace(
            self._hello,
            attempts=tuple(AttemptKey(*key) for key in there),
            received=self._received,
            oldest_outcome=self._oldest_outcome,
        )

    def execute(self, call: Envelope[WriteTensors]) -> TensorsWritten:
        """Write held tensors into the memory of a trainer rank, as the controller asked; see `Client`."""
        return self._tensors.write(call.command)

    def failed(self, error: Exception, command: WriteTensors | None) -> TensorsWritten:  # noqa: ARG002
        """Return the reply for a command that raised; see `Client`."""
        return TensorsWritten(error=f"{self._settings.name}: {type(error).__name__}: {error}")

    def on_frame(self, frame: WorkerWelcome | TaskBatch) -> None:
        """Handle a task batch or a welcome.

        If the welcome comes from a new controller, cancel all attempts that the old controller had assigned.
        """
        if isinstance(frame, TaskBatch):
            self._take(frame)
            return
        # If another controller answers at the address, the controller that assigned the attempts has ended.
        if self._controller not in {"", frame.controller}:
            self._attempts.cancel_all()
        self._controller = frame.controller

    async def on_connected(self) -> None:
        """Send unacknowledged outcomes again; see `Client`."""
        self._send_again()

    def on_lost(self) -> None:
        """Stop waiting for acknowledgements, which need a connection; see `Client`."""
        self._send_again_at = None

    def _take(self, batch: TaskBatch) -> None:
        """Start the new attempts of a batch, and cancel the attempts in `batch.cancelled`.

        Ignore tasks of attempts that run or have ended recently. Drop acknowledged outcomes, and free tensors that the
        controller released. Wake `_deliver` if many received batches are unreported.
        """
        self._received = batch.number
        self._forget(batch.acknowledged)
        self._tensors.release(batch.released)
        running, remembered = self._attempts.running, self._remembered
        for task in batch.tasks:
            key = (task.task_id, task.attempt)
            if key not in running and key not in remembered:
                self._attempts.start(task)
        for cancelled in batch.cancelled:
            self._attempts.cancel(cancelled.task_id, cancelled.attempt)
        if self._received - self._said >= MAX_UNSAID:
            self._work.set()

    # --- outcomes ------------------------------------------------------------------------------

    def _ended(self, outcome: RolloutOutcome) -> None:
        """Keep an attempt's outcome until the controller acknowledges it, record the attempt as ended, wake `_deliver`."""
        key = (outcome.task_id, outcome.attempt)
        self._remembered[key] = None
        if len(self._remembered) > REMEMBERED_ATTEMPTS:
            self._remembered.popitem(last=False)
        self._num_outcomes += 1
        self._kept[self._num_outcomes] = key, encode_for_controller(outcome)
        self._empty.clear()
        self._work.set()

    @property
    def _oldest_outcome(self) -> int:
        """Number of the oldest unacknowledged outcome; the number of the next outcome if all are acknowledged."""
        return next(iter(self._kept), self._num_outcomes + 1)

    def _forget(self, last: int) -> None:
        """Drop the outcomes up to number `last`, because the controller has acknowledged them, and wake `_deliver`.

        If unacknowledged outcomes are left, restart the deadline after which they are sent again; else stop the deadline.
        """
        if last < self._oldest_outcome:
            return
        while self._kept and self._oldest_outcome <= last:
            self._num_sent = max(self._num_sent, self._kept.popitem(last=False)[0])
        while self._in_flight and self._in_flight[0] <= last:
            self._in_flight.popleft()
        self._send_again_at = None
        if self._in_flight:
            self._wait_for_acknowledgement()
        if not self._kept:
            self._empty.set()
        self._work.set()

    def _wait_for_acknowledgement(self) -> None:
        """Set the deadline of the next acknowledgement, and start its timer unless the timer runs already."""
        self._send_again_at = self._loop.time() + self._settings.call_deadline_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._send_again_at, self._look)

    def _look(self) -> None:
        """Send unacknowledged outcomes again if the deadline of the next acknowledgement has passed."""
        self._timer = None
        if self._send_again_at is None:
            return
        if self._loop.time() < self._send_again_at:
            self._timer = self._loop.call_at(self._send_again_at, self._look)
            return
        logger.info("the controller did not acknowledge outcomes in time; they are sent again")
        self._send_again()

    def _send_again(self) -> None:
        """Mark all unacknowledged outcomes as unsent, and wake `_deliver`, which sends them again."""
        self._num_sent = self._oldest_outcome - 1
        self._in_flight.clear()
        self._send_again_at = None
        self._work.set()

    async def _deliver(self) -> None:
        """Send unsent outcomes in batches, and report received task batches, until this task is cancelled; see the class."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._num_sent < self._num_outcomes and len(self._in_flight) < MAX_IN_FLIGHT:
                batch = self._next_batch()
                if not self._in_flight:
                    self._wait_for_acknowledgement()
                self._in_flight.append(batch.last)
                self._num_sent = batch.last
                if not await self.send(batch):
                    self._send_again_at = None
                    # `on_connected` sends unacknowledged outcomes again on the next connection.
                    break
            if self._received - self._said >= MAX_UNSAID:
                self._said = self._received
                await self.send(CompletionBatch(self._num_sent, (), self._received))

    def _next_batch(self) -> CompletionBatch:
        """Return the next unsent outcomes (at most `MAX_OUTCOMES`), and the number of the newest received task batch.

        Record this number as reported. The caller records the outcomes as sent.
        """
        batch: list[bytes] = []
        nbytes, last = 0, self._num_sent
        for number in range(self._num_sent + 1, self._num_outcomes + 1):
            _, outcome = self._kept[number]
            nbytes += len(outcome)
            if batch and (nbytes > MAX_BATCH_NBYTES or len(batch) == MAX_OUTCOMES):
                break
            batch.append(outcome)
            last = number
        self._said = self._received
        return CompletionBatch(last, tuple(batch), self._received)

    # --- the process ---------------------------------------------------------------------------

    async def listen_for_agents(self) -> None:
        """Start the endpoint for agents if it has a fixed port, because agents may connect before the first rollout begins.

        Raises:
            ConfigError: there is no tokenizer, or the address cannot be bound.
        """
        if self._settings.chat_port:
            await self._chat.start()

    async def run(self) -> None:
        """Stay connected to the controller and deliver outcomes.

        Return when the controller refuses the worker, or when no controller was reachable for `controller_gone_s`.
        The future `ended` then has the reason as its exception.
        """
        delivery = asyncio.create_task(self._deliver(), name="outcomes")
        watch = BlockWatch(self._loop, f"worker {self._settings.name}")
        try:
            await super().run()
        finally:
            watch.close()
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            await self._chat.close()
            await self._tensors.end()

    async def shut_down(self, deadline_s: float) -> None:
        """Cancel all running attempts, so that the controller runs their rollouts at other workers.

        The attempts have `deadline_s` to end. The controller then has `HAND_OVER_S` to acknowledge all outcomes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                await self.send(WorkerLeaving())
        await self._attempts.stop(deadline_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                await self._empty.wait()


def encode_for_controller(outcome: RolloutOutcome) -> bytes:
    """Encode an outcome. If it cannot be sent, or the controller would refuse it, encode an outcome with an error instead."""
    try:
        encoded = encode(outcome)
        if len(encoded) <= CHECKED_NBYTES:
            return encoded
        if len(encoded) <= MAX_OUTCOME_NBYTES:
            decode_outcome(encoded)
            return encoded
        reason = f"it must have at most {MAX_OUTCOME_NBYTES} bytes, got {len(encoded)}"
    # The turns of a workflow may contain values that msgpack cannot encode.
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        reason = str(error)
    return encode(
        msgspec.structs.replace(
            outcome,
            status=OutcomeStatus.ERROR,
            result=Partial(),
            finish_reason="",
            turns=(),
            value=b"",
            tensors={},
            error=f"worker {outcome.worker}: the outcome cannot be sent: {reason}",
        )
    )


async def run_worker(
    settings: WorkerSettings,
    token: str,
    workflows: Mapping[str, Workflow] | None = None,
    *,
    engine_token: str = "",
    agent_token: str = "",
) -> bool:
    """Run a worker until SIGTERM or SIGINT, or until no controller was reachable for `controller_gone_s`.

    `token` is the secret of the job, or the token of the worker role. `engine_token` is the token for requests to
    engines; if `engine_token` is empty, the worker derives the token of the client role from `token`. Agents may claim
    rollouts with `agent_token`, and with the token of the agent role that is derived from `token`.

    Returns:
        True after a signal, False if the controller was unreachable.

    Raises:
        ConfigError: the token is empty, or an address or a name is invalid.
        AuthenticationError: the controller refuses the token.
        ProtocolError: the controller refuses this worker.
    """
    engine_token = engine_token or role_token(token, Access.CLIENT)
    async with open_http(
        engine_token, to_controller=False, many_connections=True
    ) as engine_session:
        worker = RolloutWorker(settings, token, engine_session, workflows, agent_token=agent_token)
        await worker.listen_for_agents()
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        life = asyncio.create_task(worker.run(), name="worker")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await worker.shut_down(settings.shutdown_s)
        for task in (life, stopped):
            task.cancel()
        await asyncio.gather(life, stopped, return_exceptions=True)
        if stop.is_set():
            return True
        try:
            worker.ended.result(0)
        except PeerUnreachable as error:
            logger.error("%s", error)  # noqa: TRY400  (one line is what the user needs)
        return False


def _settings(arguments: Sequence[str] | None) -> WorkerSettings:
    """Parse the command line of a worker. Each field of `WorkerSettings` has an option of the same name."""
    parser = argparse.ArgumentParser(prog="python -m windlass.rollout.worker", description=__doc__)
    for field in msgspec.structs.fields(WorkerSettings):
        flag = f"--{field.encode_name.replace('_', '-')}"
        parser.add_argument(flag, type=field.type, default=field.default, required=field.required)
    return msgspec.convert(vars(parser.parse_args(arguments)), type=WorkerSettings)


def run_rollout_worker(
    workflows: Mapping[str, Workflow], arguments: Sequence[str] | None = None
) -> int:
    """Run a worker process that knows these workflows; call this from your own `__main__`.

    Args:
        workflows: name used in submissions -> workflow. The worker removes its tokens from the environment, so
            that workflows and the processes that they start cannot read the tokens there.
        arguments: options of `python -m windlass.rollout.worker`; by default `sys.argv[1:]`.

    Returns:
        0 after a signal, 1 if the controller was unreachable, 2 if a setting is invalid or the controller
        refused the worker.
    """
    settings = _settings(arguments)
    try:
        configure_logging(settings.name)
        token, engine_token = control_token(), secret_value(ENGINE_TOKEN_VARIABLE)
        agent_token = secret_value(AGENT_TOKEN_VARIABLE)
        served = asyncio.run(
            run_worker(
                settings, token, workflows, engine_token=engine_token, agent_token=agent_token
            )
        )
    except (AuthenticationError, ConfigError, ProtocolError) as error:
        logger.error("%s", error)  # noqa: TRY400  (one line is what the user needs)
        return 2
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(run_rollout_worker({"agent": agent_workflow()}))
