"""The rollout routes of the controller's HTTP server.

Their handlers await the request's body and, for batches, the batch; nothing else.
They take no lock and share none with weight updates, so an update that runs for minutes on
another route of the same server cannot delay a completion.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableSequence
from typing import Protocol

import msgspec
from aiohttp import web

from windlass.errors import (
    ConfigError,
    PeerTimeout,
    ProtocolError,
    RolloutError,
    StaleMessage,
)
from windlass.rollout.batches import BatchQueue
from windlass.rollout.connection import ConnectionRoutes, read_body, reply
from windlass.rollout.controller import RolloutController
from windlass.rollout.messages import CompletionBatch, WorkerHello

__all__ = ["MAX_BATCH_WAIT_S", "RouteHost", "mount_rollout_routes"]

MAX_BATCH_WAIT_S = 3600.0
MAX_DIGITS = 18


class RouteHost(Protocol):
    """What routes are mounted on: a `ControlServer`, or a plain `aiohttp.web.Application`.

    It authenticates; the routes do not.
    """

    def add_routes(self, routes: Iterable[web.AbstractRouteDef]) -> object:
        """Add routes before the server starts."""
        ...

    @property
    def on_shutdown(self) -> MutableSequence[Callable[[web.Application], Awaitable[object]]]:
        """Called when the server begins to close."""
        ...


def mount_rollout_routes(
    server: RouteHost, controller: RolloutController, batches: BatchQueue
) -> None:
    """Add the rollout routes; before the server starts.

    Args:
        server: must check the shared token on every route.
        controller: gets completions and workers.
        batches: answers trainer ranks.
    """
    routes = _Routes(controller, batches)
    completions = ConnectionRoutes("/v1/completions", CompletionBatch, controller.complete)
    server.on_shutdown.append(completions.close)
    server.add_routes(
        [
            *completions.routes(),
            web.post("/v1/workers", routes.workers),
            web.get("/v1/batches", routes.batches),
            web.get("/v1/rollouts/status", routes.status),
        ]
    )


class _Routes:
    def __init__(self, controller: RolloutController, batches: BatchQueue) -> None:
        self._controller = controller
        self._batches = batches

    async def workers(self, request: web.Request) -> web.Response:
        hello = await read_body(request, WorkerHello)
        try:
            return reply(self._controller.register_worker(hello))
        except StaleMessage as error:
            raise web.HTTPConflict(text=str(error)) from error
        except (ConfigError, ProtocolError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except RolloutError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error

    async def batches(self, request: web.Request) -> web.Response:
        try:
            batch = await self._batches.shard(
                _integer(request, "step"),
                _integer(request, "rank"),
                _integer(request, "world_size"),
                deadline_s=min(_seconds(request, "deadline_s"), MAX_BATCH_WAIT_S),
            )
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except StaleMessage as error:
            raise web.HTTPGone(text=str(error)) from error
        except PeerTimeout as error:
            raise web.HTTPGatewayTimeout(text=str(error)) from error
        return reply(batch)

    async def status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._controller.stats())
        return web.Response(body=body, content_type="application/json")


def _integer(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ConfigError(f"{name} must be an integer >= 0, got {text!r}")
    return int(text)


def _seconds(request: web.Request, name: str) -> float:
    text = request.query.get(name, "")
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be seconds, got {text!r}") from error
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be > 0 and finite, got {text!r}")
    return value
