"""The rollout worker's process.

`python -m windlass.rollout.worker --controller URL --name worker-0 [--port 0]`

The token is read from WINDLASS_TOKEN. The worker binds first and publishes the port that
it got, so there is no port to choose.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
from aiohttp import web

from windlass.envs import ENGINE_TOKEN_VARIABLE, check_token, control_token, environment_value
from windlass.errors import AuthenticationError, ConfigError, PeerUnreachable
from windlass.net.access import Access, role_token
from windlass.net.addresses import check_url, listen, own_address, published_host, url_of
from windlass.net.logs import configure_logging
from windlass.rollout._http import authorization, require_token
from windlass.rollout.messages import WorkerHello
from windlass.rollout.runner import WorkerRunner
from windlass.rollout.workflows import Workflow, check_workflows

__all__ = ["WorkerSettings", "main", "run_rollout_worker", "run_worker"]

logger = logging.getLogger(__name__)


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told.

    Attributes:
        controller: base URL of the controller.
        name: unique among the controller's workers.
        host: address to bind; empty for the one towards the controller. port: 0 lets the system
            choose.
        advertise_host: what the controller connects to; empty for `host`.
        max_concurrent: attempts at a time.
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
    check_token(token, "worker: token")
    check_url(settings.controller, "worker: controller")
    bound = settings.host or own_address(settings.controller)
    host = published_host(bound, settings.advertise_host, "worker")
    listener = listen(bound, settings.port, "worker")
    known = check_workflows(workflows)
    hello = WorkerHello(
        name=settings.name,
        url=url_of(host, listener.getsockname()[1]),
        incarnation=uuid.uuid4().hex[:12],
        max_concurrent=settings.max_concurrent,
        workflows=tuple(sorted(known)),
    )
    async with (
        aiohttp.ClientSession(headers=authorization(token)) as controller_session,
        aiohttp.ClientSession(
            headers=authorization(engine_token or role_token(token, Access.CLIENT)),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as engine_session,
    ):
        runner = WorkerRunner(
            hello,
            settings.controller.rstrip("/"),
            controller_session,
            engine_session,
            heartbeat_s=settings.heartbeat_s,
            controller_gone_s=settings.controller_gone_s,
            call_deadline_s=settings.call_deadline_s,
            workflows=known,
        )
        app = web.Application(middlewares=[require_token(token)])
        app.add_routes(runner.routes())
        # A watch whose controller is gone must end at once, not at the next heartbeat.
        server = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2
        )
        await server.setup()
        await web.SockSite(server, listener, backlog=1024).start()
        logger.info("worker %s %s at %s", hello.name, hello.incarnation, hello.url)
        try:
            return await _serve(runner, settings.shutdown_s)
        finally:
            await server.cleanup()


async def _run(settings: WorkerSettings, workflows: Mapping[str, Workflow] | None) -> bool:
    engine_token = environment_value(ENGINE_TOKEN_VARIABLE)
    return await run_worker(settings, control_token(), workflows, engine_token=engine_token)


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
    parser.add_argument("--controller", required=True, help="base URL of the controller")
    parser.add_argument("--name", required=True, help="unique among the controller's workers")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--advertise-host", default="")
    parser.add_argument("--max-concurrent", type=int, default=1024)
    parser.add_argument("--heartbeat-s", type=float, default=5.0)
    parser.add_argument("--call-deadline-s", type=float, default=10.0)
    parser.add_argument("--controller-gone-s", type=float, default=60.0)
    parser.add_argument("--shutdown-s", type=float, default=5.0)
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
    return main(arguments, workflows=workflows)


def main(
    arguments: Sequence[str] | None = None, *, workflows: Mapping[str, Workflow] | None = None
) -> int:
    """Entry point; 0 after a signal, 1 when the controller was gone, 2 when it was refused."""
    settings = _settings(arguments)
    try:
        configure_logging(settings.name)
        if asyncio.run(_run(settings, workflows)):
            return 0
    except (AuthenticationError, ConfigError, PeerUnreachable) as error:
        logger.error("%s", error)  # noqa: TRY400  (one line is what the user needs)
        return 2
    logger.error("controller %s was gone for %s s", settings.controller, settings.controller_gone_s)
    return 1


if __name__ == "__main__":
    sys.exit(main())
