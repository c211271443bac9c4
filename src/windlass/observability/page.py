"""The controller's web page, its JSON and its event stream.

The page itself is public and holds no secret; it reads the token from the address's fragment
(`/#token=...`), which browsers never send, and presents it as a header like everybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.resources import files
from typing import final

import msgspec
from aiohttp import web

from windlass.net.server import ControlServer

HEARTBEAT_S = 15.0
SEND_DEADLINE_S = 10.0


@final
class StatusPage:
    """Serves `/`, `/v1/overview` and `/v1/events`.

    Args:
        overview: what is known now, as JSON-encodable values; called in the loop.
    """

    def __init__(self, overview: Callable[[], dict[str, object]]) -> None:
        self._overview = overview
        self._changed: set[asyncio.Event] = set()
        self._html = files("windlass.observability").joinpath("page.html").read_bytes()
        self._closed = False

    def mount(self, server: ControlServer) -> None:
        """Add the routes to a server that has not started."""
        server.add_public_route("/", self._serve_page)
        server.add_routes(
            [
                web.get("/v1/overview", self._serve_overview),
                web.get("/v1/events", self._serve_events),
            ]
        )

    def notify(self) -> None:
        """Something changed: every open page gets the new state. Changes in between coalesce."""
        for event in self._changed:
            event.set()

    def close(self) -> None:
        """End the event streams. Idempotent."""
        self._closed = True
        self.notify()

    async def _serve_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._html,
            content_type="text/html",
            charset="utf-8",
            headers={
                "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
                "style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
            },
        )

    async def _serve_overview(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self._overview()), content_type="application/json"
        )

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        changed = asyncio.Event()
        changed.set()
        self._changed.add(changed)
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    frame = b": still here\n\n"
                else:
                    changed.clear()
                    frame = b"data: " + msgspec.json.encode(self._overview()) + b"\n\n"
                if self._closed:
                    break
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await response.write(frame)
        except (ConnectionError, TimeoutError):
            pass  # the page was closed, or does not read
        finally:
            self._changed.discard(changed)
        return response
