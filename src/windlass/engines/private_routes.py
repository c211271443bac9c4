"""The routes of an engine's server that only its launcher and its own ranks may call.

Servers of vLLM and SGLang have routes that run methods in their ranks, unpickle tensors, pause and read
weights, and ask nobody who they are. `PrivateRoutes` stands in front of all of them: what generates and
what reports health is open as ever (`--api-key` of the engine closes that), everything else wants a key.
The key follows from the token that the launcher was started with, so that a later `--attach` knows it;
the server's processes are given its hash alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, final

import msgspec

from windlass.envs import environment_value

__all__ = [
    "KEY_HEADER",
    "App",
    "Message",
    "PrivateRoutes",
    "Receive",
    "Send",
    "answer",
    "environment_of",
    "key_of",
]

KEY_HEADER = "x-windlass-key"
HASH_VARIABLE = "WINDLASS_SERVER_KEY_SHA256"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_OPEN = frozenset(
    {
        *("/generate", "/inference/v1/generate", "/tokenize", "/detokenize"),
        *("/health", "/health_generate", "/ready", "/ping", "/load", "/metrics", "/metrics/"),
        *("/version", "/model_info", "/get_model_info"),
        "/freeze_gc",  # SGLang's server calls it itself, once it is warm
    }
)
_OPEN_PREFIX = "/v1/"
_LOADS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def key_of(token: str) -> str:
    """Return what opens the private routes of servers that were launched with `token`.

    Without a token it is one that nobody else knows: such a server cannot be attached to.
    """
    if not token:
        return secrets.token_hex(32)
    return hmac.new(token.encode(), b"windlass key of private routes", hashlib.sha256).hexdigest()


def environment_of(key: str) -> dict[str, str]:
    """Return the variables by which `PrivateRoutes` knows the key."""
    return {HASH_VARIABLE: _hash(key.encode())}


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


@final
class PrivateRoutes:
    """ASGI middleware in front of an engine's server.

    Args:
        app: the engine's.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = environment_value(HASH_VARIABLE)

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
        path: str = scope["path"]
        if path in _OPEN or (path.startswith(_OPEN_PREFIX) and path not in _LOADS):
            return True
        given = [value for name, value in scope["headers"] if name == KEY_HEADER.encode()]
        return len(given) == 1 and hmac.compare_digest(_hash(given[0]), self._expected)


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send a whole answer in JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
