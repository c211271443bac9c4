"""A real Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

__all__ = ["CHROMIUM", "Browser", "browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""

SEEN = """new Promise(seen => {
  // A page that is only just loading has no body yet.
  const look = () => document.body?.innerText.includes(TEXT) && seen(document.body.innerHTML);
  new MutationObserver(look).observe(document, {childList: true, subtree: true});
  look();
})"""


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._last = socket, 0

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            answer: dict[str, Any] = await self._socket.receive_json()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    async def html_with(self, text: str) -> str:
        """Return the HTML of the page once `text` is on it."""
        code = SEEN.replace("TEXT", repr(text))
        answer = await self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        return str(answer["result"]["value"])

    async def value_of(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        address = ""
        while not address:
            line = (await process.stderr.readline()).decode()
            assert line, "chromium ended before it listened"
            address = line.partition("DevTools listening on ws://")[2].partition("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                tab = next(t for t in await answer.json() if t["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"]) as socket:
                yield Browser(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
