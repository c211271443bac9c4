"""Protection of an engine server's private routes, which only the server's launcher and ranks may call.

vLLM's and SGLang's servers have routes that run methods in their ranks, unpickle tensors, pause the engine, and
return weights. These routes do not authenticate the caller. `PrivateRoutes` wraps the server's ASGI application.
Routes that generate text or report health stay open, unless the engine's own `--api-key` protects them. Every other
route is private: a request must carry the server's key. The key is a random text in a file that only this user can
read; the server's ranks and its launcher read the file. If a framework calls private routes itself, the user lists
these routes in WINDLASS_OPEN_ROUTES.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final
from urllib.parse import urlsplit

import msgspec

from windlass.envs import environment_value
from windlass.errors import ConfigError

KEY_HEADER = "x-windlass-key"
ALIVE_PATH = "/windlass/alive"
"""Route that an engine's server answers only after the processes behind it, which compute answers, have answered. While the
engine is held, `HeldRoutes` answers."""
OPEN_ROUTES_VARIABLE = "WINDLASS_OPEN_ROUTES"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
T = TypeVar("T")

_OPEN = frozenset(
    {
        *("/generate", "/inference/v1/generate", "/tokenize", "/detokenize"),
        *("/health", "/health_generate", "/ready", "/ping", "/load", "/metrics", "/metrics/"),
        *("/version", "/model_info", "/get_model_info"),
        # SGLang's server calls this route itself at the end of its warm-up.
        "/freeze_gc",
    }
)
"""Routes that every client may call."""
_OPEN_PREFIX = "/v1/"
"""Prefix of more routes that every client may call. The routes in `_LOADS` are exceptions."""
_LOADS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_RUN_CODE = frozenset(
    {
        *("/collective_rpc", "/update_weights_from_tensor", "/update_weights_from_ipc"),
        "/load_lora_adapter_from_tensors",
    }
)
"""Routes that run methods in ranks or unpickle the request. WINDLASS_OPEN_ROUTES cannot open them."""


@contextmanager
def new_key(port: int) -> Iterator[str]:
    """Create and yield the key of a server on this host. Save the key for `saved_key` until the `with` block ends.

    Raises:
        ConfigError: another user owns the folder of the keys, or can read it.
    """
    key, file = secrets.token_hex(32), own_folder() / str(port)
    # Delete the file of an earlier server that was killed.
    remove_key(port)
    with open(
        os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w"
    ) as new:
        new.write(key)
    try:
        yield key
    finally:
        remove_key(port)


def remove_key(port: int) -> None:
    """Remove the key of a server on this host that has ended. Idempotent."""
    (key_folder() / str(port)).unlink(missing_ok=True)


def saved_key(url: str) -> str:
    """Return the saved key of a running server on this host; empty if there is none. Raises as `new_key` does."""
    return read_own(str(urlsplit(url).port))


def key_folder() -> Path:
    """Return the folder of this user that contains one key per port of a running server on this host.

    The name of the folder contains the host's name, because several hosts may share the folder of temporary files.
    """
    return Path(tempfile.gettempdir()) / f"windlass-{os.getuid()}-{os.uname().nodename}"


def own_folder() -> Path:
    """Create the folder of the keys if it is missing, check it, and return it. Raises as `require_own` does."""
    folder = key_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    require_own(folder)
    return folder


def read_own(name: str) -> str:
    """Return the content of a file in the folder of the keys; empty if there is no such file.

    Raises:
        ConfigError: see `require_own`.
        OSError: the file cannot be read.
    """
    folder = key_folder()
    try:
        require_own(folder)
        return (folder / name).read_text()
    # No server has written the file, or its server has removed it.
    except FileNotFoundError:
        return ""


def require_own(folder: Path) -> None:
    """Check that this user owns a folder and that no other user can access the folder.

    Raises:
        ConfigError: another user owns the folder or can access it.
        OSError: the folder does not exist.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a folder that this user alone can read")


def opened_routes() -> frozenset[str]:
    """Return the private routes that WINDLASS_OPEN_ROUTES (a list like `/a,/b`) opens to every client.

    Raises:
        ConfigError: an entry is not a path, or is a route that runs code for the caller.
    """
    words = environment_value(OPEN_ROUTES_VARIABLE).split(",")
    paths = frozenset(word.strip() for word in words if word.strip())
    for path in sorted(paths):
        if not path.startswith("/"):
            raise ConfigError(f"{OPEN_ROUTES_VARIABLE} must name paths like /a,/b, got {path!r}")
        if path in _RUN_CODE:
            raise ConfigError(
                f"{OPEN_ROUTES_VARIABLE} must not name {path}: this route runs the caller's code"
            )
    return paths


def shows_key(scope: Message, key: str) -> bool:
    """Return whether a request has exactly one header with the server's key. An empty key is never accepted."""
    given = [value for name, value in scope["headers"] if name == KEY_HEADER.encode()]
    return bool(key) and len(given) == 1 and hmac.compare_digest(given[0], key.encode())


@final
class PrivateRoutes:
    """ASGI middleware that protects the private routes of an engine's server, and serves `ALIVE_PATH` to every client.

    Args:
        app: application of the engine's server.
        key: key that a request for a private route must carry. If the key is empty, all these requests are refused.
        alive: path of the engine's own route that serves `GET` requests for `ALIVE_PATH`.

    Raises:
        ConfigError: see `opened_routes`.
    """

    def __init__(self, app: App, key: str, *, alive: str) -> None:
        self._app, self._key, self._alive = app, key, alive
        self._open = _OPEN | opened_routes()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse the request with status 403."""
        if asks_whether_alive(scope):
            path = scope.get("root_path", "") + self._alive
            inner = {**scope, "path": path, "raw_path": path.encode()}
            await self._app(inner, receive, send)
        elif scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            said = f"{scope['path']} is private to the launcher: {KEY_HEADER} is missing or wrong"
            await answer(send, 403, msgspec.json.encode({"error": said}))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: Message) -> bool:
        """Return whether a request may pass: its route is open, or the request shows the server's key."""
        path = route_path(scope)
        if path in self._open or (path.startswith(_OPEN_PREFIX) and path not in _LOADS):
            return True
        return shows_key(scope, self._key)


def asks_whether_alive(scope: Message) -> bool:
    """Return whether a request is a `GET` request for `ALIVE_PATH`."""
    return scope["type"] == "http" and scope["method"] == "GET" and route_path(scope) == ALIVE_PATH


def route_path(scope: Message) -> str:
    """Return the path of a request without the server's root path, as Starlette's router does.

    A server with a root path (vLLM's `--root-path`, SGLang's `--fastapi-root-path`) serves each route both with and
    without this prefix.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    has_prefix = root and path.startswith(root) and path[len(root) :][:1] in {"", "/"}
    return path[len(root) :] if has_prefix else path


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send a complete response with a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive, limit_nbytes: int) -> bytes:
    """Return the body of a request. Stop reading once the body is longer than `limit_nbytes`."""
    body, more = bytearray(), True
    while more and len(body) <= limit_nbytes:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


class Refusal(NamedTuple):
    """Status and reason in the response to a refused request."""

    status: HTTPStatus
    reason: str


async def read_json(receive: Receive, kind: type[T], limit_nbytes: int, what: str) -> T | Refusal:
    """Return the decoded JSON body of a request, or a refusal with the reason.

    A body is refused if it is longer than `limit_nbytes` or cannot be decoded as `kind`. `what` names the expected body
    in the reason.
    """
    body = await body_of(receive, limit_nbytes)
    if len(body) > limit_nbytes:
        reason = f"body must be at most {limit_nbytes} bytes, got more"
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        return Refusal(HTTPStatus.BAD_REQUEST, f"body must be {what}: {error}")
