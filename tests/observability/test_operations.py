"""What a controller shows of itself, over real HTTP, in a real terminal command and a real browser."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from fake_engine import FakeEngine

import windlass
from windlass.errors import RolloutError
from windlass.net.server import ControlServer
from windlass.observability.operations import Operations
from windlass.rollout import BatchQueue, RolloutController, StaticEngines
from windlass.rollout.messages import TrainingSample
from windlass.updates.coordinator import Coordinator
from windlass.updates.messages import RoundOutcome, UpdateReport

TOKEN = "a-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""


def sample(version: int) -> TrainingSample:
    return TrainingSample(
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        versions=(version,),
        reward=0.5,
        group_id=1,
        engine="e",
    )


def report(version: int) -> UpdateReport:
    return UpdateReport(
        version=version,
        outcome=RoundOutcome.PUBLISHED,
        reason="",
        engines=("engine-a",),
        left_out={},
        measures={
            "nbytes": 1_234_567.0,
            "wire_s": 0.5,
            "update_s": 0.75,
            "pause_s": 0.25,
            "pack_s": 0.0625,
        },
        phase_s={"prepare": 0.1, "write": 0.5, "verify": 0.15},
        digest_ok=True,
    )


@pytest.fixture
async def controller() -> AsyncIterator[windlass.Controller]:
    async with windlass.Controller(token=TOKEN) as running:
        running.coordinator.reports.append(report(41))
        await running.batches.put(0, [[sample(-1), sample(-3), sample(-3)]])
        yield running


async def test_the_page_stands_in_no_frame_and_nothing_says_what_serves_it(
    controller: windlass.Controller,
) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{controller.url}/") as page:
            assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
            assert "Server" not in page.headers
        async with http.get(f"{controller.url}/v1/status") as refused:
            assert (refused.status, refused.headers.get("Server")) == (401, None)


async def test_metrics_are_prometheus_text_and_need_the_token(
    controller: windlass.Controller,
) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{controller.url}/metrics") as refused:
            assert refused.status == 401
        async with session.get(f"{controller.url}/metrics", headers=HEADERS) as answer:
            text = await answer.text()
    assert "windlass_published_version -1.0" in text
    assert 'windlass_sample_staleness_versions_bucket{le="0.0"} 1.0' in text
    assert "windlass_sample_staleness_versions_count 3.0" in text
    assert 'windlass_rollouts{state="lost"} 0.0' in text


async def test_what_was_thrown_away_as_too_old_is_in_metrics_overview_and_status() -> None:
    policy = windlass.StalenessPolicy(1, 4, 4, on_stale=windlass.OnStale.DROP)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    async with (
        FakeEngine("a") as engine,
        RolloutController(StaticEngines([engine.entry]), policy, token=TOKEN) as rollouts,
    ):
        Operations(Coordinator(windlass.ControlConfig()), rollouts, BatchQueue()).mount(server)
        await server.start()
        rollouts.run_here({})
        engine.hold(1)
        group = rollouts.submit_group((1,), 4, windlass.SamplingParams(max_new_tokens=2))
        await engine.until_held(4)
        rollouts.set_version(2)
        with pytest.raises(RolloutError, match="dropped, too old for version 2"):
            await group
        try:
            async with aiohttp.ClientSession(headers=HEADERS) as session:
                answer = await session.get(f"{server.url}/metrics")
                text = await answer.text()
            status = (sys.executable, "-m", "windlass.cli.main", "status", server.url)
            code, output, errors = await command(*status)
        finally:
            await server.close()
    for state, count in {"too_old": 0, "stopped_early": 1, "dropped": 4}.items():
        assert f'windlass_rollouts{{state="{state}"}} {count}.0' in text
    assert (code, errors) == (0, "")
    assert "too old 0, stopped early 1, dropped 4, rejected 0, wasted tokens 0" in output


async def test_two_controllers_in_one_process_count_apart(controller: windlass.Controller) -> None:
    async with (
        windlass.Controller(token=TOKEN) as other,
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.get(f"{other.url}/metrics") as answer,
    ):
        assert "windlass_sample_staleness_versions_count 0.0" in await answer.text()


async def test_every_change_reaches_an_open_event_stream(controller: windlass.Controller) -> None:
    async with (
        asyncio.timeout(10),
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.get(f"{controller.url}/v1/events") as stream,
    ):
        first = await stream.content.readuntil(b"\n\n")
        assert msgspec.json.decode(first[6:])["staleness"] == {"0": 1, "2": 2}
        await controller.batches.put(1, [[sample(-2)]])
        second = await stream.content.readuntil(b"\n\n")
        assert msgspec.json.decode(second[6:])["staleness"] == {"0": 1, "1": 1, "2": 2}


async def test_an_open_event_stream_does_not_delay_the_end() -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with windlass.Controller(token=TOKEN) as running:
            stream = await session.get(f"{running.url}/v1/events")
            await stream.content.readuntil(b"\n\n")
            loop = asyncio.get_running_loop()
            began = loop.time()
        assert loop.time() - began < 1.5
        stream.close()


async def command(*argv: str, token: str = TOKEN) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "WINDLASS_TOKEN": token, "COLUMNS": "160"},
    )
    try:
        async with asyncio.timeout(60):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_status_prints_rounds_staleness_and_outstanding_work(
    controller: windlass.Controller,
) -> None:
    status = (sys.executable, "-m", "windlass.cli.main", "status", controller.url)
    code, output, errors = await command(*status)
    assert (code, errors) == (0, "")
    assert "published version -1" in output
    assert "1,234,567" in output
    assert re.search(r"pack ms .*\n.* 62\.5 ", output)
    assert "outstanding 0" in output
    assert "0: 1, 2: 2" in output
    code, _, errors = await command(*status, token="wrong")
    assert code == 2
    assert "AuthenticationError" in errors


async def test_report_compares_updates_with_the_ceiling(
    controller: windlass.Controller, tmp_path: Path
) -> None:
    files = (tmp_path / "report.json", tmp_path / "report.png")
    code, output, errors = await command(
        *(sys.executable, "-m", "windlass.cli.main", "report", controller.url),
        *("--ceiling-gbps", "2", "--links", "2"),
        *("--json", str(files[0]), "--plot", str(files[1])),
    )
    assert (code, errors) == (0, "")
    assert "of the limit" in output
    (update,) = msgspec.json.decode(files[0].read_bytes())
    assert update["limit_s"] == pytest.approx(1_234_567 / 4e9)
    assert sum(update["stages"].values()) == pytest.approx(update["update_s"])
    assert files[1].read_bytes().startswith(b"\x89PNG")


SEEN = """new Promise(seen => {
  // A page that is only just loading has no body yet.
  const look = () => document.body?.innerText.includes(TEXT) && seen(document.body.innerHTML);
  new MutationObserver(look).observe(document, {childList: true, subtree: true});
  look();
})"""


class Browser:
    """One tab of a headless Chromium, driven over its own debugging protocol."""

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
        """The page, once `text` is on it."""
        code = SEEN.replace("TEXT", repr(text))
        answer = await self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        return str(answer["result"]["value"])

    async def value_of(self, expression: str) -> Any:
        """What an expression gives, as JSON."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    process = await asyncio.create_subprocess_exec(
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
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


@pytest.mark.skipif(not BROWSER, reason="no chromium on PATH")
async def test_a_real_browser_shows_rounds_and_staleness_and_follows_them(
    controller: windlass.Controller, tmp_path: Path
) -> None:
    async with asyncio.timeout(40), browser(tmp_path / "profile") as tab:
        await tab.call("Page.navigate", url=f"{controller.url}/#token={TOKEN}")
        page = await tab.html_with("published version -1")
        assert '<p id="state">live</p>' in page
        assert "1,234,567" in page
        assert 'title="write 500.0 ms"' in page
        assert 'title="2 samples"' in page
        assert "thrown away: too old 0, stopped early 0, dropped 0, rejected by workflows 0" in page
        assert "<td>62.5 ms</td>" in page
        await controller.batches.put(1, [[sample(-8)]])
        assert 'title="1 samples"' in await tab.html_with("7: 1")
        await tab.call("Page.navigate", url="about:blank")
        await tab.call("Page.navigate", url=f"{controller.url}/#token=wrong")
        assert "1,234,567" not in await tab.html_with("wrong token")


HOSTILE = "<img src=x onerror=document.title='owned'>"
CAUGHT_UP = "version 7: caught up"


def story(second: str) -> list[UpdateReport]:
    """A short update, one that leaves an engine out, and a long one that has it again."""
    fields = {"outcome": RoundOutcome.PUBLISHED, "engines": ("engine-a", second)}
    times = {"prepare": 0.005, "write": 0.015, "verify": 0.005}
    short = {"update_s": 0.025, "wire_s": 0.015, "pause_s": 0.02, "nbytes": 6e7}
    long = {"prepare": 0.3, "write": 0.9, "verify": 0.192}
    return [
        UpdateReport(version=5, measures=short, phase_s=times, **fields),  # type: ignore[arg-type]
        UpdateReport(
            version=6,
            outcome=RoundOutcome.PUBLISHED,
            engines=("engine-a",),
            left_out={second: f"its digest differs at {second}"},
            measures=short,
            phase_s=times,
        ),
        UpdateReport(
            version=7,
            measures={"update_s": 1.392, "wire_s": 0.9, "pause_s": 1.3, "nbytes": 6e7},
            phase_s=long,
            **fields,  # type: ignore[arg-type]
        ),
    ]


@pytest.mark.parametrize("second", [HOSTILE, "engine-b"])
@pytest.mark.skipif(not BROWSER, reason="no chromium on PATH: apt-get install chromium")
async def test_a_real_browser_draws_updates_on_one_scale_and_what_happened_to_engines(
    tmp_path: Path, second: str
) -> None:
    """25 ms are drawn 25/1392 as long as 1392 ms; names of peers stay text; a phone need not scroll sideways.

    With WINDLASS_SCREENSHOT, a folder, it keeps what docs/operations.md shows.
    """
    async with (
        windlass.Controller(token=TOKEN) as running,
        asyncio.timeout(40),
        browser(tmp_path / "profile") as tab,
    ):
        running.coordinator.reports.extend(story(second))
        await running.batches.put(0, [[sample(-1), sample(-2), sample(-2)]])
        await tab.call("Page.navigate", url=f"{running.url}/#token={TOKEN}")
        page = await tab.html_with("published version -1")
        widths = await tab.value_of(
            "[...document.querySelectorAll('.bar')].map(b => [...b.children].reduce("
            "(w, s) => w + s.getBoundingClientRect().width, 0))"
        )
        assert len(widths) == 3
        assert widths[2] / widths[0] == pytest.approx(25 / 1392, rel=0.05)
        assert "left out: its digest differs" in page
        assert CAUGHT_UP in page
        assert await tab.value_of("document.querySelectorAll('img').length") == 0
        assert await tab.value_of("document.title") == "Windlass"
        assert second in await tab.value_of("document.body.innerText")
        for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await tab.call("Emulation.setEmulatedMedia", features=[feature])
            shown = await tab.value_of("getComputedStyle(document.body).backgroundColor")
            assert shown == background
            if (folder := os.environ.get("WINDLASS_SCREENSHOT")) and (scheme, second) == (
                "light",
                "engine-b",
            ):
                size = {"width": 1000, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await tab.call("Emulation.setDeviceMetricsOverride", **size)
                taken = await tab.call("Page.captureScreenshot")
                (Path(folder) / f"page-{scheme}.png").write_bytes(base64.b64decode(taken["data"]))
        await tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=844,
            deviceScaleFactor=2,
            mobile=True,
        )
        assert await tab.value_of("document.documentElement.scrollWidth") <= 390
