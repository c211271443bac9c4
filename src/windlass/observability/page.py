"""The controller's web page, its JSON and its event stream.

The page itself is public and holds no secret; it reads the token from the address's fragment
(`/#token=...`), which browsers never send, and presents it as a header like everybody else.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import final

import msgspec
from aiohttp import web

from windlass.errors import ProtocolError
from windlass.net.server import ControlServer

HEARTBEAT_S = 15.0
SEND_DEADLINE_S = 10.0
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def read_page() -> str:
    """The page as it is served: it asks for what it shows."""
    return files("windlass.observability").joinpath("page.html").read_text(encoding="utf-8")


def saved_page(overview: Mapping[str, object], taken: str) -> str:
    """The page with what it shows in it: one file that asks nobody, to be kept or sent.

    Addresses of engines are left out of it.

    Args:
        overview: as `/v1/overview` answers it.
        taken: when and of what, one line for a person.
    """
    engines = overview["engines"]
    if not isinstance(engines, list):
        raise ProtocolError(f"overview: engines must be a list, got {engines!r}")
    kept = {**overview, "engines": [{**engine, "url": ""} for engine in engines]}
    # No name of a peer may end the script: `<` stands nowhere in it as it is.
    content = msgspec.json.encode(kept).decode().replace("<", "\\u003c")
    saved = f'<script type="application/json" id="saved" data-taken="{html.escape(taken)}">{content}</script>'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    page = read_page().replace('<meta charset="utf-8">', f'<meta charset="utf-8">{policy}')
    return page.replace("<!--saved-->", saved)


def taken_at(source: str) -> str:
    """Say when a page was saved, now, and of what."""
    return f"{source}, saved {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


@final
class StatusPage:
    """Serves `/`, `/v1/overview` and `/v1/events`.

    Args:
        overview: what is known now, as JSON-encodable values; called in the loop.
    """

    def __init__(self, overview: Callable[[], dict[str, object]]) -> None:
        self._overview = overview
        self._changed: set[asyncio.Event] = set()
        self._html = read_page().encode()
        self.closed = False

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
        self.closed = True
        self.notify()

    async def _serve_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._html,
            content_type="text/html",
            charset="utf-8",
            headers={
                "Content-Security-Policy": f"{POLICY}; connect-src 'self'; frame-ancestors 'none'; "
                "base-uri 'none'"
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
                if self.closed:
                    break
                async with asyncio.timeout(SEND_DEADLINE_S):
                    await response.write(frame)
        except (ConnectionError, TimeoutError):
            pass  # the page was closed, or does not read
        finally:
            self._changed.discard(changed)
        return response
