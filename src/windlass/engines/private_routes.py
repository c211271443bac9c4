"""Protection of an engine server's private routes, which only its launcher and its own ranks may call.

Servers of vLLM and SGLang have routes that run methods in their ranks, unpickle tensors, pause, and read
weights. They do not authenticate the caller. `PrivateRoutes` wraps the server's ASGI application: routes that
generate or report health stay open (the engine's own `--api-key` closes them); every other route needs a key.
Each server has its own key, in a file that only its user can read and where a later `--attach` finds it. The
processes of a launched server get only the key's hash. A framework that calls private routes itself names
them in WINDLASS_OPEN_ROUTES.
"""

from __future__ import annotations

import hashlib
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

__all__ = ["PrivateRoutes"]  # named on the command line of a server

KEY_HEADER = "x-windlass-key"
HASH_VARIABLE = "WINDLASS_SERVER_KEY_SHA256"
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
_OPEN_PREFIX = "/v1/"
_LOADS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_RUN_CODE = frozenset(
    {
        *("/collective_rpc", "/update_weights_from_tensor", "/update_weights_from_ipc"),
        "/load_lora_adapter_from_tensors",
    }
)
"""Routes that run methods in ranks or unpickle the request; they cannot be opened."""


@contextmanager
def new_key(port: int) -> Iterator[str]:
    """Create the key of a server on this host and yield it; `saved_key` finds it until the block ends.

    Raises:
        ConfigError: the folder of keys does not belong to this user alone.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    require_own(folder)
    key, file = secrets.token_hex(32), folder / str(port)
    # A launcher that was killed may have left its file.
    file.unlink(missing_ok=True)
    with open(
        os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w"
    ) as new:
        new.write(key)
    try:
        yield key
    finally:
        file.unlink(missing_ok=True)


def saved_key(url: str) -> str:
    """Return the key of a running server on this host; empty if the server has no key. Raises as `new_key` does."""
    file = _folder() / str(urlsplit(url).port)
    if not file.exists():
        return ""
    require_own(file.parent)
    return file.read_text()


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"windlass-{os.getuid()}"


def require_own(folder: Path) -> None:
    """Check that a folder belongs to this user and that no other user can read it.

    Raises:
        ConfigError: the folder belongs to another user, or other users can access it.
        OSError: the folder does not exist.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a folder that this user alone can read")


def environment_of(key: str) -> dict[str, str]:
    """Return the environment variables that give `PrivateRoutes` the hash of the key."""
    return {HASH_VARIABLE: _hash(key.encode())}


def is_launched() -> bool:
    """Return whether a launcher started this server; the launcher then keeps the key and makes the ranks join."""
    return bool(environment_value(HASH_VARIABLE))


def opened_routes() -> frozenset[str]:
    """Return the private routes that WINDLASS_OPEN_ROUTES (`/a,/b`) opens to every client.

    Raises:
        ConfigError: an entry is not a path, or its route runs code for the caller.
    """
    words = environment_value(OPEN_ROUTES_VARIABLE).split(",")
    paths = frozenset(word.strip() for word in words if word.strip())
    for path in sorted(paths):
        if not path.startswith("/"):
            raise ConfigError(f"{OPEN_ROUTES_VARIABLE} must name paths like /a,/b, got {path!r}")
        if path in _RUN_CODE:
            raise ConfigError(
                f"{OPEN_ROUTES_VARIABLE} must not name {path}: it runs code for whoever calls it"
            )
    return paths


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


@final
class PrivateRoutes:
    """ASGI middleware that protects the private routes of an engine's server.

    `key` opens the private routes; None takes the hash that the launcher left in the environment.

    Raises:
        ConfigError: see `opened_routes`.
    """

    def __init__(self, app: App, key: str | None = None) -> None:
        self._app = app
        self._expected = environment_value(HASH_VARIABLE) if key is None else _hash(key.encode())
        self._open = _OPEN | opened_routes()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it (403)."""
        if scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            said = f"{scope['path']} is private to the launcher: {KEY_HEADER} is missing or wrong"
            await answer(send, 403, msgspec.json.encode({"error": said}))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: Message) -> bool:
        path = route_path(scope)
        if path in self._open or (path.startswith(_OPEN_PREFIX) and path not in _LOADS):
            return True
        given = [value for name, value in scope["headers"] if name == KEY_HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(_hash(given[0]), self._expected)


def route_path(scope: Message) -> str:
    """Return the path by which the server's router picks a route: without the server's root path.

    A server that is started with a root path (vLLM's `--root-path`, SGLang's `--fastapi-root-path`) answers a
    route both with and without this prefix. The rule is the one of Starlette's router.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    has_prefix = root and path.startswith(root) and path[len(root) :][:1] in {"", "/"}
    return path[len(root) :] if has_prefix else path


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send a whole answer in JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive, limit_nbytes: int) -> bytes:
    """Return the body of a request. If it is longer than `limit_nbytes`, return only its beginning, which is too."""
    body, more = bytearray(), True
    while more and len(body) <= limit_nbytes:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


class Refusal(NamedTuple):
    """The answer to a refused request."""

    status: HTTPStatus
    reason: str


async def read_json(receive: Receive, kind: type[T], limit_nbytes: int, what: str) -> T | Refusal:
    """Return the decoded body of a request, or a refusal: it is longer than `limit_nbytes`, or not `what` in JSON."""
    body = await body_of(receive, limit_nbytes)
    if len(body) > limit_nbytes:
        reason = f"body must be at most {limit_nbytes} bytes, got more"
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        return Refusal(HTTPStatus.BAD_REQUEST, f"body must be {what}: {error}")
