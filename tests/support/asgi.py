"""Requests to ASGI applications, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from windlass.engines.private_routes import App, Message


async def request(
    app: App,
    method: str,
    path: str,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    root_path: str = "",
) -> tuple[int, Any]:
    """Return the status and the decoded JSON of the answer. The body arrives in two pieces."""
    sent: list[Message] = []
    pieces = [(body[:7], True), (body[7:], False)]

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        piece, more = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": more}

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    await app({**scope, "root_path": root_path}, receive, send)
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])
