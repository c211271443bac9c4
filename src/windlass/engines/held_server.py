"""Record of a server whose engine runs no step, because its weights may be of two versions.

The controller or a trainer may die while an update changes the weights. The engine then stays paused until an update has
filled all weights. Rank 0 writes the record into a file next to the key of the server's private routes, and removes the file
before the engine resumes. The API processes of the server read the file, and refuse requests with the reason. Without the
record, a request would wait for the engine without a limit, and `/health` would report no fault. A job would also end the
engine as one that hangs, because its loop is blocked and `ALIVE_PATH` gets no answer.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import final

import msgspec

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
_MAY_LEAVE = " may leave"
"""End of a record whose engine may join the fleet of another controller. No URL contains a space."""


def note_held(port: int, controller: str, is_held: bool, *, may_leave: bool = False) -> None:
    """Record that the engine of a server on this host stays paused, or delete this record. If this fails, log the error.

    A reader sees the whole record or none.

    Args:
        port: port of the server. With 0, the engine has no server, and this call only logs that the engine stays paused.
        controller: URL of the controller whose update has not ended.
        is_held: whether the engine stays paused.
        may_leave: whether the engine may join the fleet of another controller, because its weights are lost and its loop
            is not blocked.
    """
    if is_held:
        _log.warning("%s", held_reason(controller))
    if not port:
        return
    try:
        if not is_held:
            (key_folder() / _record(port)).unlink(missing_ok=True)
            return
        content = f"{controller}{_MAY_LEAVE if may_leave else ''}"
        write_file(own_folder() / _record(port), content.encode())
    except (ConfigError, OSError) as error:
        _log.warning("cannot update the record of whether this engine is held: %s", error)


def held_for(port: int) -> str:
    """Return the URL of the controller that must fill the engine's weights; empty if the engine is not held.

    `port` is the port of the engine's server on this host.
    """
    controller, _ = _read(_record(port))
    return controller


def may_leave(port: int) -> bool:
    """Return whether the record of a held engine says that the engine may join the fleet of another controller."""
    _, found = _read(_record(port))
    return found


def _read(record: str) -> tuple[str, bool]:
    """Return `controller` and `may_leave` of a record (see `note_held`); ("", False) if there is none or it cannot be read."""
    try:
        content = read_own(record)
    # For example, the folder belongs to another user.
    except (ConfigError, OSError):
        return "", False
    return content.removesuffix(_MAY_LEAVE), content.endswith(_MAY_LEAVE)


def held_reason(controller: str) -> str:
    """Return the error text for clients of a server whose engine is held until `controller` publishes a version."""
    return (
        f"the weights of this engine may be of two versions, because an update of the controller {controller} did not "
        "complete in this engine; publish a version from this controller, or restart the engine"
    )


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
        note_held(port, "", is_held=False)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asks = asks_whether_alive(scope)
        controller, _ = _read(self._record) if asks or _needs_engine(scope) else ("", False)
        if not controller:
            await self._app(scope, receive, send)
            return
        status, key = (HTTPStatus.OK, "held") if asks else (HTTPStatus.SERVICE_UNAVAILABLE, "error")
        await answer(send, status, msgspec.json.encode({key: held_reason(controller)}))


def _needs_engine(scope: Message) -> bool:
    """Return whether a request asks the engine to generate, or asks whether the engine is healthy."""
    if scope["type"] != "http":
        return False
    path = route_path(scope)
    generates = path in _GENERATES or path.startswith(_OPENAI)
    return path in _HEALTH or (generates and scope["method"] == "POST")
