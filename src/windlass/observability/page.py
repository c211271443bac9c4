"""The controller's web page, as served and as a saved file.

The page itself is public and contains no secret. It reads the token from the address's fragment
(`/#token=...`), which browsers never send, and sends it as a header like every other client.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import msgspec

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def read_page() -> str:
    """Return the HTML page that the controller serves. The page requests its data from the controller."""
    return files("windlass.observability").joinpath("page.html").read_text(encoding="utf-8")


def saved_page(overview: Mapping[str, Any], source: str) -> str:
    """Return the page and its data as one HTML file that sends no requests and omits the engines' addresses.

    Args:
        overview: answer of `/v1/overview`.
        source: name or address of the controller, which the page shows with the time of saving.
    """
    taken = f"{source}, saved {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    kept = {**overview, "engines": [{**engine, "url": ""} for engine in overview["engines"]]}
    # Escape `<`: an engine named `</script>` would otherwise end the script element.
    content = msgspec.json.encode(kept).decode().replace("<", "\\u003c")
    saved = f'<script type="application/json" id="saved" data-taken="{html.escape(taken)}">{content}</script>'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    page = read_page().replace('<meta charset="utf-8">', f'<meta charset="utf-8">{policy}')
    return page.replace("<!--saved-->", saved)
