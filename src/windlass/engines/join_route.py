"""`POST /windlass/join`: orders a third-party engine's server to join the fleet of a controller.

The body is a `JoinOrder` in JSON. The header `Authorization: Bearer TOKEN` authenticates the caller. A launcher sends the
key of the server's private routes instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import final

import msgspec

from windlass.engines.private_routes import (
    App,
    Message,
    Receive,
    Refusal,
    Send,
    answer,
    read_json,
    route_path,
    shows_key,
)
from windlass.errors import ConfigError, ProtocolError, WindlassError
from windlass.net.access import Access, AccessGate

JOIN_PATH = "/windlass/join"
MAX_BODY_NBYTES = 1 << 16
_ROLES = (Access.OWNER, Access.ENGINE)
_log = logging.getLogger(__name__)


class JoinOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Order to join the fleet of a controller.

    Attributes:
        controller: URL of the controller.
        transport: name of the transport that receives weights, or the transport's configuration as JSON.
        token: token that the controller requires; if empty, the server uses its own token.
        name: name of the engine in the fleet; empty for HOST:PORT of the server.
        url: address at which peers reach the server; empty for the address that the server listens on.
        serves_own_weights: see `AgentSettings`.
        deadline_s: see `AgentSettings.join_deadline_s`; 0 for a deadline that depends on the size of the checkpoint.
        model: checkpoint folder that the server must have; empty for any.
    """

    controller: str
    transport: str = "auto"
    token: str = ""
    name: str = ""
    url: str = ""
    serves_own_weights: bool = True
    deadline_s: float = 0.0
    model: str = ""

    def __repr__(self) -> str:
        return f"JoinOrder({self.controller!r}, {self.transport!r})"

    def check_model(self, folder: Path) -> None:
        """Check that the order's folder, if given, is `folder`, the checkpoint folder of the server.

        Raises:
            ConfigError: the order names another folder.
        """
        if self.model and Path(self.model).resolve() != folder.resolve():
            raise ConfigError(
                f"--model must be {folder}, the model of the server that joins, got {self.model}"
            )


@final
class JoinRoute:
    """ASGI middleware in front of an engine's server. It serves `JOIN_PATH` and passes on all other requests.

    The request must carry the server's token, the token of role engine (derived from the server's token), or the
    server's key. The response is `{"name": ..., "controller": ...}` after every rank has joined. If the join fails, the
    response is `{"error": ...}` with status 400 (invalid order), 403 (neither token nor key), 405 (not POST), 409
    (another join is in progress), 413 (body above 64 KiB), or 502 (the controller or a rank failed).

    Args:
        app: application of the engine's server.
        token: token of the server. If the token is empty, this route accepts only the key.
        key: key of the server's private routes.
        join: function that orders every rank to join and returns the engine's name. It blocks, so this route
            calls it in a thread. It raises `ProtocolError` while another join is in progress.
    """

    def __init__(self, app: App, token: str, key: str, join: Callable[[JoinOrder], str]) -> None:
        self._app, self._key, self._join = app, key, join
        self._gate = AccessGate(token)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or route_path(scope) != JOIN_PATH:
            await self._app(scope, receive, send)
            return
        status, told = await self._carry_out(scope, receive)
        body = {"error": told} if isinstance(told, str) else told
        await answer(send, status, msgspec.json.encode(body))

    async def _carry_out(
        self, scope: Message, receive: Receive
    ) -> tuple[HTTPStatus, str | dict[str, str]]:
        """Carry out the order; return the status and either the response body or the reason for the refusal."""
        if scope["method"] != "POST":
            return HTTPStatus.METHOD_NOT_ALLOWED, f"{JOIN_PATH} takes POST"
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        role = self._gate.role_of(shown[0].decode("latin-1")) if len(shown) == 1 else None
        if role not in _ROLES and not shows_key(scope, self._key):
            roles = " or ".join(_ROLES)
            return (
                HTTPStatus.FORBIDDEN,
                f"{JOIN_PATH} requires a token of role {roles} or the server's key, got neither",
            )
        order = await read_json(receive, JoinOrder, MAX_BODY_NBYTES, "a join order")
        if isinstance(order, Refusal):
            return order
        try:
            name = await asyncio.to_thread(self._join, order)
        except WindlassError as error:
            reason = f"{type(error).__name__}: {error}"
            _log.error("%s: %s", JOIN_PATH, reason)
            return _status_of(error), reason
        return HTTPStatus.OK, {"name": name, "controller": order.controller}


def _status_of(error: WindlassError) -> HTTPStatus:
    """Return the HTTP status for an error of a join; see `JoinRoute`."""
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.CONFLICT if isinstance(error, ProtocolError) else HTTPStatus.BAD_GATEWAY
