"""HTTP server of a controller, a rollout worker or an engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import final
from weakref import WeakSet

from aiohttp import WSCloseCode, web
from aiohttp.typedefs import Middleware

from windlass.envs import check_token
from windlass.errors import ConfigError
from windlass.net.access import ROUTES, Access, AccessGate, refusal_of
from windlass.net.addresses import listen, published_host, url_of
from windlass.net.listener import NO_ROOM, Listener, request_log
from windlass.net.sockets import PartJoiner, close_socket, raise_file_limit
from windlass.net.tls import server_context

CALLER = ContextVar("CALLER", default=Access.OWNER)
"""Role of the caller's token, set in the asyncio task that handles a request."""

FIRST_FRAMES = web.AppKey("FIRST_FRAMES", set[PartJoiner])
"""Incomplete first frames of all connections, see `net.rpc_server`."""
OPEN_SOCKETS = web.AppKey("OPEN_SOCKETS", WeakSet[web.WebSocketResponse])
"""WebSockets of the application, including those without a welcome yet; the server ends them when it closes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@final
class ControlServer:
    """HTTP server whose routes need a token, except public pages. It can bind its address before it starts.

    If this process requires TLS (`net.tls`), the server accepts only TLS, and a client certificate
    may replace the token.

    Args:
        host: address to bind.
        port: port to bind; 0 lets the system choose.
        advertise_host: address that peers connect to; empty for `host`.
        token: the owner's secret, or the token of a role. Tokens that `role_token` derives from it
            are accepted too.
        routes: roles that may call a route besides the owner. Only the owner may call other routes.
        extra_token: another token, and its role.
        middlewares: middlewares that run after the check of the token.
        max_body_nbytes: largest size of a request body; a larger one is refused with status 413.
        what: name of the process, for errors.

    Raises:
        ConfigError: a header cannot carry the token, the port is invalid, `host` is a wildcard
            address and `advertise_host` is empty; or TLS is required, but the certificate is
            missing or a file cannot be used.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        token: str,
        advertise_host: str = "",
        routes: Mapping[str, Collection[Access]] = ROUTES,
        extra_token: tuple[str, Access] = ("", Access.CLIENT),
        middlewares: Iterable[Middleware] = (),
        max_body_nbytes: int = 64 << 20,
        what: str = "ControlServer",
    ) -> None:
        check_token(token, f"{what}: token")
        if port not in range(65536):
            raise ConfigError(f"{what}: port must be an integer in [0, 65535], got {port!r}")
        self._host, self._port, self._what = host, port, what
        self._published_host = published_host(host, advertise_host, what)
        self._tls = server_context()
        self._routes = routes
        self._gate = AccessGate(token, extra_token)
        self._app = web.Application(
            middlewares=[self._authenticate, *middlewares], client_max_size=max_body_nbytes
        )
        self._app[OPEN_SOCKETS], self._app[FIRST_FRAMES] = WeakSet(), set()
        self._app.on_shutdown.append(_end_sockets)
        self._app.on_response_prepare.append(_hide_software)
        self._runner: web.AppRunner | None = None
        self._bound: socket.socket | None = None
        self._listener: Listener | None = None
        self._public: set[str] = set()
        self._mounted: set[tuple[str, str]] = set()

    @property
    def url(self) -> str:
        """URL that peers connect to; valid after `bind`."""
        scheme = "http" if self._tls is None else "https"
        return url_of(self._published_host, self._port, scheme=scheme)

    def add_routes(self, routes: Iterable[web.AbstractRouteDef]) -> None:
        """Add routes. Call this before `start`.

        Raises:
            ConfigError: a route with the method and path of one of `routes` exists already. No route is added.
        """
        added = list(routes)
        keys = [(r.method, r.path) for r in added if isinstance(r, web.RouteDef)]
        taken = self._mounted.intersection(keys)
        if taken:
            names = ", ".join(sorted(f"{method} {path}" for method, path in taken))
            raise ConfigError(f"ControlServer: routes must not exist already, got {names}")
        self._mounted.update(keys)
        self._app.add_routes(added)

    def add_public_route(self, path: str, handler: Handler) -> None:
        """Add a GET route that needs no token, for pages without secrets. Call this before `start`."""
        self._public.add(path)
        self._app.add_routes([web.get(path, handler)])

    def bind(self) -> socket.socket:
        """Bind the address and return the bound socket, so that `url` is known before `start`. Idempotent.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if self._bound is None:
            self._bound = listen(self._host, self._port, self._what)
            self._port = self._bound.getsockname()[1]
        return self._bound

    async def start(self) -> None:
        """Bind the address and begin to answer requests. Also raise this process's soft limit of open files.

        Raises:
            ConfigError: the address cannot be bound.
        """
        bound = self.bind()
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=2.0, logger=request_log
        )
        await self._runner.setup()
        raise_file_limit()
        self._listener = Listener(self._runner, bound, tls=self._tls)
        await self._listener.start()

    async def stop_listening(self) -> None:
        """Accept no new connections; existing connections continue. Idempotent.

        Call this before you disconnect peers. A disconnected peer connects again at once. If aiohttp accepted this new
        connection while it closes the old ones, it would never close the new connection.
        """
        if self._listener is not None:
            await self._listener.stop()

    async def close(self) -> None:
        """Accept no new connections, and close all existing connections. Idempotent."""
        await self.stop_listening()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the route's handler if the caller's role may call the route; else answer 401, 403 or 503.

        The role comes from the request's token or, if there is no token, from the client certificate. Before the call,
        admit the connection (see `Listener.admit`), and set `CALLER` to the role. A GET request for a public route
        needs no role.
        """
        if request.method == "GET" and request.path in self._public:
            return await handler(request)
        role = self._gate.role_of(
            request.headers.get("Authorization", ""), request.get_extra_info("peercert")
        )
        if role is None:
            return web.json_response({"error": "missing or wrong token"}, status=401)
        if self._listener is not None and not self._listener.admit(request):
            refused = web.json_response({"error": NO_ROOM}, status=503)
            refused.force_close()
            return refused
        resource = request.match_info.route.resource
        route = request.path if resource is None else resource.canonical
        refusal = refusal_of(role, request.method, route, self._routes.get(route, ()))
        if refusal:
            return web.json_response({"error": refusal}, status=403)
        CALLER.set(role)
        try:
            return await handler(request)
        except ConnectionError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            # The caller has disconnected, so this response is never sent.
            return web.Response(status=499)


async def _hide_software(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the `Server` header, which names the software and its version, from a response."""
    response.headers.popall("Server", None)


async def _end_sockets(app: web.Application) -> None:
    """Close every open WebSocket of the application, including WebSockets of peers that are not admitted yet.

    The application calls this when the server closes. Otherwise, an agent that connects at this time would stay connected.
    """
    sockets = app[OPEN_SOCKETS]
    await asyncio.gather(*(close_socket(s, code=WSCloseCode.GOING_AWAY) for s in list(sockets)))
