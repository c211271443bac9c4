"""A rollout worker: runs attempts, keeps outcomes until the controller has them, answers routes.

`python -m windlass.rollout.worker --controller URL --name worker-0 [--port 0]`

The token is read from WINDLASS_TOKEN. The worker binds first and publishes the port that
it got, so there is no port to choose.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import aiohttp
import msgspec
from aiohttp import web

from windlass.envs import ENGINE_TOKEN_VARIABLE, control_token, secret_value
from windlass.errors import AuthenticationError, ConfigError, PeerUnreachable, ProtocolError
from windlass.net.access import Access, role_token
from windlass.net.addresses import check_url, own_address
from windlass.net.logs import configure_logging
from windlass.net.server import ControlServer
from windlass.net.sockets import open_http
from windlass.rollout.attempts import Attempts
from windlass.rollout.connection import (
    Connection,
    ConnectionRoutes,
    Outbox,
    post,
    read_body,
    reply,
)
from windlass.rollout.messages import (
    AttemptKey,
    CancelBatch,
    CompletionAck,
    CompletionBatch,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    TasksAccepted,
    WorkerHello,
    WorkerSnapshot,
    WorkerWelcome,
)
from windlass.rollout.workflows import Workflow, check_workflows

__all__ = ["WorkerRunner", "WorkerSettings", "run_rollout_worker", "run_worker"]

logger = logging.getLogger(__name__)
WORKER_ROUTES = dict.fromkeys(
    ("/rollouts", "/cancel", "/completions", "/health", "/watch"), (Access.WORKER,)
)
REMEMBERED_ATTEMPTS = 1 << 16
CALL_DEADLINE_S = 10.0
MAX_BACKOFF_S = 1.0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told.

    Attributes:
        controller: base URL of the controller.
        name: unique among the controller's workers.
        host: address to bind; empty for the one towards the controller. port: 0 lets the system
            choose.
        advertise_host: what the controller connects to; empty for `host`.
        max_concurrent: attempts at a time.
        heartbeat_s: between heartbeats on the watch connection.
        call_deadline_s: a delivery that is not acknowledged by then is sent again.
        controller_gone_s: exit when the controller cannot be reached this long.
        shutdown_s: on SIGTERM, time to hand over what is there.
    """

    controller: str
    name: str
    host: str = ""
    port: int = 0
    advertise_host: str = ""
    max_concurrent: int = 1024
    heartbeat_s: float = 5.0
    call_deadline_s: float = 10.0
    controller_gone_s: float = 60.0
    shutdown_s: float = 5.0


class WorkerRunner:
    """Runs attempts of one worker incarnation; call everything in one event loop.

    Args:
        settings: `controller` and times.
        hello: identity; the controller never has more than `max_concurrent` attempts here.
        controller_session: carries the control token.
        engine_session: carries the engines' token; no limit on connections.
        workflows: user code by name; `hello.workflows` are its keys.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        hello: WorkerHello,
        controller_session: aiohttp.ClientSession,
        engine_session: aiohttp.ClientSession,
        workflows: Mapping[str, Workflow] | None = None,
    ) -> None:
        self.hello = hello
        self._settings, self._controller_url = settings, settings.controller.rstrip("/")
        self._controller_session = controller_session
        self._controller = ""
        self._register_due = asyncio.Event()
        self._connection = Connection(
            controller_session, f"{self._controller_url}/v1/completions", CompletionAck
        )
        self._outbox = Outbox(self._deliver, self._register_due.set)
        self._attempts = Attempts(engine_session, check_workflows(workflows), hello, self._ended)
        self._remembered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._num_watchers = 0
        self._watch_opened = asyncio.Event()
        self._stopping = False

    # --- attempts --------------------------------------------------------------------------

    def accept(self, tasks: Iterable[RolloutTask]) -> int:
        """Start attempts that were never seen before; returns how many."""
        num_new = 0
        for task in tasks:
            key = (task.task_id, task.attempt)
            if key not in self._attempts.running and key not in self._remembered:
                num_new += 1
                self._attempts.start(task)
        return num_new

    def cancel(self, keys: Iterable[AttemptKey]) -> int:
        """Cancel attempts; unknown ones are ignored. Returns how many were running."""
        return sum([self._attempts.cancel(key.task_id, key.attempt) for key in keys])

    def snapshot(self, since: int) -> WorkerSnapshot:
        """What is kept after `since`, and what runs."""
        return WorkerSnapshot(
            worker=self.hello.name,
            incarnation=self.hello.incarnation,
            outcomes=self._outbox.since(since),
            running=tuple(AttemptKey(*key) for key in self._attempts.running),
        )

    def _ended(self, outcome: RolloutOutcome) -> None:
        """However the attempt ended, the controller hears of it, or it would wait in vain."""
        self._remembered[outcome.task_id, outcome.attempt] = None
        if len(self._remembered) > REMEMBERED_ATTEMPTS:
            self._remembered.popitem(last=False)
        self._outbox.add(outcome)

    # --- towards the controller ------------------------------------------------------------

    async def run(self) -> None:
        """Register, deliver, and register again whenever nobody watches.

        Returns when the controller could not be reached for `controller_gone_s`.

        Raises:
            AuthenticationError: the controller refuses the token.
            ConfigError: the controller refuses this worker.
        """
        delivery = asyncio.create_task(self._outbox.run(), name="rollout-outbox")
        try:
            while await self._register():
                await self._register_due.wait()
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            await self._connection.close()

    async def shut_down(self, deadline_s: float) -> None:
        """End running attempts with an error that makes the controller try them elsewhere.

        Returns once the controller has acknowledged all outcomes, or after `deadline_s`.
        """
        self._stopping = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._attempts.stop(deadline_s)
                await self._outbox.drained()
        except TimeoutError:
            return

    async def _register(self) -> bool:
        self._register_due.clear()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.controller_gone_s
        backoff, last_error = 0.02, "no try"
        while loop.time() < give_up_at:
            try:
                welcome = await post(
                    self._controller_session,
                    f"{self._controller_url}/v1/workers",
                    self.hello,
                    WorkerWelcome,
                    deadline_s=CALL_DEADLINE_S,
                )
                self._serve_controller(welcome.controller)
                # The controller opens the watch connection now; if it does not, it is asked again.
                async with asyncio.timeout(CALL_DEADLINE_S):
                    await self._watch_opened.wait()
            except (aiohttp.ClientError, TimeoutError, OSError, ProtocolError) as error:
                self._raise_refusal(error)
                last_error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
            else:
                return True
        logger.error("controller %s cannot be reached: %s", self._controller_url, last_error)
        return False

    def _serve_controller(self, incarnation: str) -> None:
        """Attempts of a controller process that is gone would only hold engines."""
        if self._controller not in {"", incarnation}:
            self._attempts.cancel_all()
        self._controller = incarnation

    def _raise_refusal(self, error: Exception) -> None:
        """Answers that asking again will not change."""
        if not isinstance(error, aiohttp.ClientResponseError):
            return
        if error.status in {401, 403}:
            raise AuthenticationError(
                f"worker {self.hello.name}: {self._controller_url} refuses the token"
            ) from error
        if error.status in {400, 409}:
            raise ConfigError(
                f"worker {self.hello.name}: {self._controller_url} refuses this worker "
                f"(HTTP {error.status}; 409: another process has its name)"
            ) from error

    async def _deliver(self, outcomes: tuple[RolloutOutcome, ...]) -> CompletionAck:
        batch = CompletionBatch(self.hello.name, self.hello.incarnation, outcomes)
        return await self._connection.call(batch, deadline_s=self._settings.call_deadline_s)

    # --- routes ----------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        """The worker's HTTP routes."""
        return [
            *ConnectionRoutes("/rollouts", TaskBatch, self._accept_tasks, status=202).routes(),
            web.post("/cancel", self._post_cancel),
            web.get("/completions", self._get_completions),
            web.get("/health", self._get_health),
            web.get("/watch", self._get_watch),
        ]

    def _accept_tasks(self, batch: TaskBatch) -> TasksAccepted:
        if self._stopping:
            raise web.HTTPServiceUnavailable(text="worker is shutting down")
        return TasksAccepted(self.hello.incarnation, self.accept(batch.tasks))

    async def _post_cancel(self, request: web.Request) -> web.Response:
        batch = await read_body(request, CancelBatch)
        return reply(TasksAccepted(self.hello.incarnation, self.cancel(batch.keys)))

    async def _get_completions(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdecimal():
            raise web.HTTPBadRequest(text=f"since must be an integer >= 0, got {since!r}")
        return reply(self.snapshot(int(since)))

    async def _get_health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "name": self.hello.name,
                "incarnation": self.hello.incarnation,
                "running": len(self._attempts.running),
                "unacknowledged": len(self._outbox.since(0)),
                "watched": self._num_watchers > 0,
            }
        )

    async def _get_watch(self, request: web.Request) -> web.StreamResponse:
        """A response that ends when this process does; a heartbeat tells a hang from a pause."""
        stream = web.StreamResponse(headers={"X-Incarnation": self.hello.incarnation})
        await stream.prepare(request)
        self._num_watchers += 1
        self._watch_opened.set()
        try:
            while True:
                await stream.write(b"\n")
                await asyncio.sleep(self._settings.heartbeat_s)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._watch_opened.clear()
                self._register_due.set()


async def run_worker(
    settings: WorkerSettings,
    token: str,
    workflows: Mapping[str, Workflow] | None = None,
    *,
    engine_token: str = "",
) -> bool:
    """Serve until SIGTERM or SIGINT, or until the controller has been gone too long.

    Args:
        settings: see there.
        token: the owner's secret, or the token of role worker.
        workflows: user code by name.
        engine_token: shown to engines; derived from `token`, for role client, when empty.

    Returns:
        True after a signal, False when the controller was gone.

    Raises:
        ConfigError: the address cannot be bound, the token is empty, or the controller
            refuses this worker.
        AuthenticationError: the controller refuses the token.
        PeerUnreachable: no address of this host leads to the controller.
    """
    check_url(settings.controller, "worker: controller")
    bound = settings.host or own_address(settings.controller)
    known = check_workflows(workflows)
    server = ControlServer(
        host=bound,
        port=settings.port,
        advertise_host=settings.advertise_host,
        token=token,
        routes=WORKER_ROUTES,
        cancel_handlers=True,  # a watch whose controller is gone must end at once
        shutdown_s=0.2,
        what="worker",
    )
    server.bind()
    hello = WorkerHello(
        name=settings.name,
        url=server.url,
        incarnation=uuid.uuid4().hex[:12],
        max_concurrent=settings.max_concurrent,
        workflows=tuple(sorted(known)),
    )
    async with (
        open_http(token) as controller_session,
        open_http(
            engine_token or role_token(token, Access.CLIENT), unbounded=True
        ) as engine_session,
    ):
        runner = WorkerRunner(settings, hello, controller_session, engine_session, known)
        server.add_routes(runner.routes())
        await server.start()
        logger.info("worker %s %s at %s", hello.name, hello.incarnation, hello.url)
        try:
            return await _serve(runner, settings.shutdown_s)
        finally:
            await server.close()


async def _serve(runner: WorkerRunner, shutdown_s: float) -> bool:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    life = asyncio.create_task(runner.run(), name="worker-life")
    stopped = asyncio.create_task(stop.wait(), name="worker-stop")
    await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        life.result()
        return False
    await runner.shut_down(shutdown_s)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    return True


def _settings(arguments: Sequence[str] | None) -> WorkerSettings:
    parser = argparse.ArgumentParser(prog="python -m windlass.rollout.worker", description=__doc__)
    for field in msgspec.structs.fields(WorkerSettings):
        flag = f"--{field.encode_name.replace('_', '-')}"
        parser.add_argument(flag, type=field.type, default=field.default, required=field.required)
    return msgspec.convert(vars(parser.parse_args(arguments)), type=WorkerSettings)


def run_rollout_worker(
    workflows: Mapping[str, Workflow], arguments: Sequence[str] | None = None
) -> int:
    """Be a worker process that knows these workflows; call it from your own `__main__`.

    Args:
        workflows: user code by the name under which it is submitted.
        arguments: as of `python -m windlass.rollout.worker`; the command line when omitted.

    Returns:
        0 after a signal, 1 when the controller was gone, 2 when it refused.
    """
    settings = _settings(arguments)
    try:
        configure_logging(settings.name)
        engine_token = secret_value(ENGINE_TOKEN_VARIABLE)
        served = run_worker(settings, control_token(), workflows, engine_token=engine_token)
        if asyncio.run(served):
            return 0
    except (AuthenticationError, ConfigError, PeerUnreachable) as error:
        logger.error("%s", error)  # noqa: TRY400  (one line is what the user needs)
        return 2
    logger.error("controller %s was gone for %s s", settings.controller, settings.controller_gone_s)
    return 1
