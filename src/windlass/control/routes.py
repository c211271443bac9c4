"""HTTP routes of a controller for weight updates: agents, status, and the routes of backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from aiohttp import web

from windlass.config import DRIVEN_BACKENDS
from windlass.control.backend import backend_of
from windlass.control.coordinator import Coordinator
from windlass.net.server import ControlServer


@runtime_checkable
class HasRoutes(Protocol):
    """Backend with HTTP routes, by which trainer ranks drive updates themselves (`control.driven`)."""

    def routes(self, coordinator: Coordinator) -> Iterable[web.RouteDef]:
        """Return the routes with which trainer ranks drive updates of this coordinator's engines."""
        ...


def mount_updates(coordinator: Coordinator, server: ControlServer) -> None:
    """Add `/v1/agents`, `/v1/status` and the routes of backends to a server that has not started."""

    async def serve_status(_request: web.Request) -> web.Response:
        return web.json_response(status_of(coordinator))

    agents = web.get("/v1/agents", coordinator.members.serve)
    status = web.get("/v1/status", serve_status)
    server.add_routes((agents, status))
    for config in (coordinator.config.backend, *DRIVEN_BACKENDS):
        backend = backend_of(config)
        if isinstance(backend, HasRoutes):
            server.add_routes(backend.routes(coordinator))


def status_of(coordinator: Coordinator) -> dict[str, object]:
    """Return the JSON object that the route `/v1/status` sends."""
    trainers = coordinator.fleet.trainers()
    return {
        "epoch": coordinator.run.round_id.epoch,
        "round": coordinator.run.round_id.round,
        "published_version": coordinator.fleet.published,
        "unserved": coordinator.fleet.unserved,
        "mode": coordinator.config.mode.value,
        "engines": coordinator.fleet.describe(),
        "refused": coordinator.members.describe_refused(),
        "trainers": [] if trainers is None else list(trainers.workers),
        "in_round": coordinator.in_round,
        "updates": coordinator.num_updates,
        "links": coordinator.connector.describe_links(),
    }
