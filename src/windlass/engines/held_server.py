"""File that tells a server why its engine stays paused (is held); `HoldCause` lists the reasons.

For example, the controller or a trainer may die while an update changes the weights. The engine then stays paused until an
update has filled all weights. Rank 0 writes the record into a file next to the key of the server's private routes, and
removes the file before the engine resumes. The API processes of the server read the file, and refuse requests with the
reason. Without the record, a request would wait for the engine without a limit, and `/health` would report no fault. A job
would also conclude that the engine hangs, and end it: while the engine's loop is blocked, nothing answers `ALIVE_PATH`.

An engine that sleeps while its trainer steps has no record: its requests wait for the next version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import final

import msgspec

from windlass.control.engine_state import HoldCause
from windlass.engines.private_routes import (
    App,
    Message,
    Receive,
    Send,
    answer,
    asks_whether_alive,
    key_folder,
    own_folder,
    read_own,
    route_path,
)
from windlass.errors import ConfigError
from windlass.files import write_file

_log = logging.getLogger(__name__)
_HEALTH = frozenset({"/health", "/health_generate", "/ready", "/ping"})
_GENERATES = frozenset({"/generate", "/inference/v1/generate", "/invocations"})
"""Routes that let the engine generate. Routes of OpenAI's API do so too."""
_OPENAI = "/v1/"
"""Beginning of the routes of OpenAI's API."""
_REASONS: Mapping[HoldCause, str] = {
    HoldCause.MIXED: "the weights of this engine may be of two versions, because an update of the controller {controller} "
    "did not complete in this engine; publish a version from this controller, or restart the engine",
    HoldCause.EMPTY: "this engine has no weights: it has slept, and no update of the controller {controller} has filled "
    "them since; publish a version from this controller, or restart the engine",
    HoldCause.NO_VERSION: "this engine has no version yet, because the first update of the controller {controller} did not "
    "complete in this engine; publish a version from this controller",
    HoldCause.NOT_RESUMED: "this engine did not resume after an update of the controller {controller}; see the engine's "
    "log, publish a version, or restart the engine",
}
"""Cause -> error text for clients of the server."""


class HeldRecord(msgspec.Struct, frozen=True):
    """Content of a record.

    Attributes:
        controller: URL of the controller of the engine's fleet.
        cause: reason why the engine stays paused.
        may_leave: whether the engine may join the fleet of another controller. It is True only if the weights cannot be
            of two versions and the engine's loop is not blocked. A blocked loop cannot carry out an order to join.
    """

    controller: str
    cause: HoldCause
    may_leave: bool = False

    @property
    def reason(self) -> str:
        """Error text for clients of the server."""
        return _REASONS[self.cause].format(controller=self.controller)


def note_held(port: int, held: HeldRecord | None) -> None:
    """Write the record of a server on this host, or delete it if `held` is None. If this fails, log the error.

    Readers never see a half-written record. `port` is the port of the server, or 0 if the engine has no server. With 0, do
    nothing.
    """
    if not port:
        return
    try:
        if held is None:
            (key_folder() / _record(port)).unlink(missing_ok=True)
            return
        write_file(own_folder() / _record(port), msgspec.json.encode(held))
    except (ConfigError, OSError) as error:
        _log.warning("cannot write or delete the record of the held engine: %s", error)


def held_for(port: int) -> HeldRecord | None:
    """Return the record of the server at this port of this host; None if its engine is not held."""
    return _read(_record(port))


def _read(record: str) -> HeldRecord | None:
    """Return the content of a record; None if there is none or it cannot be read."""
    try:
        content = read_own(record)
        return msgspec.json.decode(content, type=HeldRecord) if content else None
    # For example, the folder belongs to another user.
    except (ConfigError, OSError, msgspec.MsgspecError):
        return None


def _record(port: int) -> str:
    """Return the name of the record's file for the server on a port."""
    return f"{port}.held"


@final
class HeldRoutes:
    """ASGI middleware that refuses requests and health checks with the reason (status 503), while the engine is held.

    It then also answers `ALIVE_PATH` itself (status 200).

    Args:
        app: application of the engine's server, which has just started.
        port: port of the server on this host.
    """

    def __init__(self, app: App, port: int) -> None:
        self._app, self._record = app, _record(port)
        # An earlier server of this port may have ended while it was held.
        note_held(port, None)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asks = asks_whether_alive(scope)
        held = _read(self._record) if asks or _needs_engine(scope) else None
        if held is None:
            await self._app(scope, receive, send)
            return
        status, key = (HTTPStatus.OK, "held") if asks else (HTTPStatus.SERVICE_UNAVAILABLE, "error")
        await answer(send, status, msgspec.json.encode({key: held.reason}))


def _needs_engine(scope: Message) -> bool:
    """Return whether a request asks the engine to generate, or asks whether the engine is healthy."""
    if scope["type"] != "http":
        return False
    path = route_path(scope)
    generates = path in _GENERATES or path.startswith(_OPENAI)
    return path in _HEALTH or (generates and scope["method"] == "POST")
