"""The controller's web page, as it is served, and as a file.

The page itself is public and holds no secret; it reads the token from the address's fragment
(`/#token=...`), which browsers never send, and presents it as a header like everybody else.
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
    """The page as it is served: it asks for what it shows."""
    return files("windlass.observability").joinpath("page.html").read_text(encoding="utf-8")


def saved_page(overview: Mapping[str, Any], source: str) -> str:
    """The page with what it shows in it: one file that asks nobody, to be kept or sent.

    Addresses of engines are left out of it.

    Args:
        overview: as `/v1/overview` answers it.
        source: whose it is, for a person; the page says when it was made, too.
    """
    taken = f"{source}, saved {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    kept = {**overview, "engines": [{**engine, "url": ""} for engine in overview["engines"]]}
    # No name of a peer may end the script: `<` stands nowhere in it as it is.
    content = msgspec.json.encode(kept).decode().replace("<", "\\u003c")
    saved = f'<script type="application/json" id="saved" data-taken="{html.escape(taken)}">{content}</script>'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    page = read_page().replace('<meta charset="utf-8">', f'<meta charset="utf-8">{policy}')
    return page.replace("<!--saved-->", saved)
