"""`POST /windlass/join`: the server of somebody else's engine is told which controller's fleet to join.

The body is a `JoinOrder` in JSON, and the header `Authorization: Bearer TOKEN` shows who asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
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
)
from windlass.errors import ConfigError, ProtocolError, WindlassError
from windlass.net.access import Access, AccessGate

JOIN_PATH = "/windlass/join"
MAX_BODY_NBYTES = 1 << 16
_ROLES = (Access.OWNER, Access.ENGINE)
_log = logging.getLogger(__name__)


class JoinOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine belongs.

    Attributes:
        controller: address.
        transport: name of the transport that receives weights, or its configuration as JSON.
        token: to show to the controller; empty for the one that the server was started with.
    """

    controller: str
    transport: str = "auto"
    token: str = ""

    def __repr__(self) -> str:
        return f"JoinOrder({self.controller!r}, {self.transport!r})"


@final
class JoinRoute:
    """ASGI middleware in front of an engine's server; it answers one route, and passes on the others.

    Whoever asks must show the token that the server was started with, or the one of role engine that
    follows from it. The answer is `{"name": ..., "controller": ...}` once every rank has joined; else
    `{"error": ...}`, with 400 for what the order says, 403 for a stranger, 409 while the engine
    is on its way into a fleet, 413 for a body above 64 KiB, and 502 where a peer or a rank refused.

    Args:
        app: the engine's.
        token: of the server; empty for none, and then nobody is let in.
        join: has every rank join, and returns the engine's name. Blocks; called in a thread. Raises
            `ProtocolError` while it is at it.
    """

    def __init__(self, app: App, token: str, join: Callable[[JoinOrder], str]) -> None:
        self._app, self._join = app, join
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
        """Return the status, and the answer, or why there is none."""
        if scope["method"] != "POST":
            return HTTPStatus.METHOD_NOT_ALLOWED, f"{JOIN_PATH} takes POST"
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        role = self._gate.role_of(shown[0].decode("latin-1")) if len(shown) == 1 else None
        if role not in _ROLES:
            roles = " and ".join(_ROLES)
            return (
                HTTPStatus.FORBIDDEN,
                f"{JOIN_PATH} is for {roles}: the token of neither was shown",
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
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.CONFLICT if isinstance(error, ProtocolError) else HTTPStatus.BAD_GATEWAY
