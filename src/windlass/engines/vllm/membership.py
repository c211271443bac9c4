"""Membership of a vLLM server that was started with WINDLASS_CONTROLLER.

    WINDLASS_CONTROLLER=http://TRAINER:8000 WINDLASS_TOKEN_FILE=token vllm serve MODEL ...

Windlass's launcher starts the same server with WINDLASS_CONTROLLER=wait, and orders it to join.

`prepare` completes the server's options before vLLM reads them: the weight-transfer backend, the development routes
that pause the server, `POST /generate`, and the middleware `Membership`. The middleware protects the private routes,
serves `POST /windlass/join`, and orders the ranks to join the controller's fleet when the server has started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, final

from windlass.engines.held_server import HeldRoutes
from windlass.engines.join_route import JoinOrder, JoinRoute
from windlass.engines.member import WAIT, Member, keep_key
from windlass.engines.private_routes import (
    App,
    Message,
    PrivateRoutes,
    Receive,
    Send,
    saved_key,
)
from windlass.engines.versions import check_installed
from windlass.engines.vllm.api_server import join_ranks, note_port, settings_of
from windlass.engines.vllm.backend import BACKEND
from windlass.engines.vllm.engine_core import SCHEDULER, stamps_tokens
from windlass.engines.vllm.spec import RELEASES, generate_route, require_backend
from windlass.envs import (
    CONTROLLER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    control_token,
    environment_value,
    has_certificate,
    secret_value,
    set_values,
)
from windlass.errors import ConfigError, WindlassError
from windlass.net.addresses import check_url

MEMBERSHIP = "windlass.engines.vllm.membership.Membership"
HELD = "windlass.engines.vllm.membership.Held"
ALIVE = "/is_paused"
"""vLLM's route that waits for an answer of every EngineCore. vLLM has it only with VLLM_SERVER_DEV_MODE."""
_log = logging.getLogger(__name__)


def prepare(args: Any) -> None:
    """Add options to the parsed options of a vLLM server, if WINDLASS_CONTROLLER is set. vLLM's API server calls this.

    Also remove the token from the environment variables of this process, save the key of the server's private routes, and
    set VLLM_SERVER_DEV_MODE.

    If a server has several API servers, their parent process calls this first and passes the options to them.

    Raises:
        ConfigError: an option or an environment variable contradicts WINDLASS_CONTROLLER, a token is required and
            missing, or the installed release of vLLM lacks a required feature.
    """
    if not environment_value(CONTROLLER_VARIABLE):
        return
    from vllm.config import WeightTransferConfig

    # Remove the token from the environment, so that no child process inherits it.
    secret_value(TOKEN_VARIABLE)
    transfer = args.weight_transfer_config
    if transfer is None:
        args.weight_transfer_config = transfer = WeightTransferConfig(backend=BACKEND)
    # If the variable is `wait`, allow other backends, because the server may never get an order to join.
    if environment_value(CONTROLLER_VARIABLE) != WAIT:
        require_backend(transfer.backend)
    if stamps_tokens() and args.scheduler_cls is None:
        args.scheduler_cls = SCHEDULER
    if vars(args).get("nnodes", 1) > 1:
        _require_token_file()
    if vars(args).get("headless", False) or MEMBERSHIP in args.middleware:
        return
    for warning in check_installed(RELEASES):
        _log.warning("%s", warning)
    if not args.port or vars(args).get("uds"):
        raise ConfigError(
            f"--port must be > 0, and --uds must not be given, if {CONTROLLER_VARIABLE} is set, because the controller "
            f"connects to the port; got --port {args.port} and --uds {vars(args).get('uds')}"
        )
    controller = environment_value(CONTROLLER_VARIABLE)
    if controller != WAIT:
        check_url(controller, CONTROLLER_VARIABLE)
    control_token()
    if secret_value(TOKEN_VARIABLE) and (vars(args).get("api_server_count") or 1) > 1:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must not be set for a server with {args.api_server_count} API servers, because they do "
            f"not inherit the token; write it to a file and set {TOKEN_FILE_VARIABLE}, or use --api-server-count 1"
        )
    keep_key(args.port)
    # vLLM has the routes `/pause` and `/resume` only in this mode.
    set_values({"VLLM_SERVER_DEV_MODE": "1"})
    if (route := generate_route()).endswith(".GenerateRoute"):
        args.enable_scale_out = True
    args.middleware = [*args.middleware, MEMBERSHIP, route]


def refuse_while_held(args: Any) -> None:
    """Add the middleware `Held` to the options of a server that has Windlass's backend and a port.

    Call this only for a server without `Membership`, because `Membership` refuses requests in the same way.
    """
    known = vars(args)
    transfer, middleware = known.get("weight_transfer_config"), known.get("middleware")
    is_ours = transfer is not None and transfer.backend == BACKEND
    if is_ours and middleware is not None and known.get("port") and HELD not in middleware:
        args.middleware = [*middleware, HELD]


def _require_token_file() -> None:
    """Check that the ranks on this host can authenticate themselves, by a TLS certificate or by a token from a file.

    Every host of a server over several hosts calls this. vLLM's channels between hosts are not encrypted, so no host sends
    the token to another.

    Raises:
        ConfigError: this process has neither a certificate nor a file with the token; or the token cannot be used, see
            `control_token`.
    """
    control_token()
    if not environment_value(TOKEN_FILE_VARIABLE) and not has_certificate():
        raise ConfigError(
            f"{TOKEN_FILE_VARIABLE} must be set on every host of a server over several hosts, because the ranks on each "
            "host read the token from this file"
        )


@final
class Membership:
    """ASGI middleware in front of vLLM's API server. It protects private routes and serves `POST /windlass/join`.

    When the server has started, this middleware orders the ranks to join the fleet of WINDLASS_CONTROLLER, if this is a
    URL.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._behind: App | None = None
        self._joins_at_start: VllmMember | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or handle the start of the server (scope `lifespan`)."""
        if self._behind is None:
            try:
                # vLLM sets `state` before the server starts.
                self._behind = self._protect(scope["app"].state)
            except WindlassError as error:
                _log.error("%s: %s", type(error).__name__, error)
                if scope["type"] != "lifespan":
                    raise
                # uvicorn ends the server after this message.
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return

        async def join_when_started(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete" and self._joins_at_start is not None:
                self._joins_at_start.join_at_start()

        await self._behind(scope, receive, join_when_started)

    def _protect(self, state: Any) -> App:
        """Return the application, wrapped in the middleware for private routes and joins. `state` comes from vLLM's server.

        Create the `VllmMember`. If WINDLASS_CONTROLLER is a URL and this is the first API server, record that this member
        joins when the server starts.

        Raises:
            WindlassError: see `VllmMember`.
        """
        member = VllmMember(state.engine_client, state.args)
        note_port(state.args.port)
        # If there are several API servers, only the first orders the ranks to join.
        if member.controller != WAIT and not state.engine_client.engine_core.client_index:
            self._joins_at_start = member
        routes = PrivateRoutes(self._app, member.key, alive=ALIVE)
        held = HeldRoutes(routes, state.args.port)
        return JoinRoute(held, member.token, member.key, member.join)


@final
class Held:
    """`HeldRoutes` in front of vLLM's API server, for a server without `Membership`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._behind: App | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._behind is None:
            # vLLM sets `state` before the server starts.
            port = scope["app"].state.args.port
            note_port(port)
            self._behind = HeldRoutes(self._app, port)
        await self._behind(scope, receive, send)


@final
class VllmMember(Member):
    """`Member` for a vLLM server. Create this object in the event loop of the API server.

    Args:
        engine: vLLM's `AsyncLLM`.
        args: options of the server.

    Raises:
        ConfigError, PeerUnreachable: see `Member`.
    """

    def __init__(self, engine: Any, args: Any) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        super().__init__(
            args.host or "0.0.0.0",  # noqa: S104 - vLLM's own default
            args.port,
            key=saved_key(f"http://localhost:{args.port}"),
            spans_hosts=engine.vllm_config.parallel_config.nnodes > 1,
            transport="pull" if engine.vllm_config.model_config.enable_sleep_mode else "auto",
        )

    def _have_ranks_join(self, order: JoinOrder) -> None:
        """Order all ranks of the server to capture their layouts and to join the controller's fleet; wait until they have joined."""
        # vLLM's channels to other hosts are not encrypted, so each rank reads the token on its own host.
        token = "" if self._spans_hosts else order.token or self.token
        require_backend(self._engine.vllm_config.weight_transfer_config.backend)
        settings = settings_of(self._engine, order)
        asyncio.run_coroutine_threadsafe(
            join_ranks(self._engine, settings, token, pauses_itself=True), self._loop
        ).result()

    def _end_server(self) -> None:
        """Shut down vLLM's engine, and end this process with status 2."""
        self._engine.shutdown()
        os._exit(2)
