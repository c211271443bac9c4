"""The controller's page in a real browser, live and saved as one file."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from chromium import CHROMIUM, Browser, browser
from fake_engine import FakeEngine
from small_pair import connect_small_pair
from trained import report, sample
from windlass_command import command

import windlass
from windlass.control.engine_state import EngineState, EngineStatus
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.observability.history import FleetEvents
from windlass.observability.page import saved_page
from windlass.testing.resting_engine import RestingEngine

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium on PATH: apt-get install chromium"
)
TOKEN = "a-token"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
DEMO = Path(__file__).parent / "demo-overview.json"
"""Overview at the end of `windlass demo --steps 24 --kill-engine-at 6` on two cores."""


async def fits_a_phone(tab: Browser) -> None:
    await tab.call("Emulation.setDeviceMetricsOverride", **PHONE)
    assert await tab.value_of("document.documentElement.scrollWidth") <= PHONE["width"]


async def test_a_real_browser_shows_rounds_and_staleness_and_follows_them(
    tmp_path: Path,
) -> None:
    async with (
        windlass.Controller(token=TOKEN) as controller,
        asyncio.timeout(40),
        browser(tmp_path / "profile") as tab,
    ):
        controller.coordinator.reports.append(report(41))
        await controller.batches.put(0, [[sample(-1), sample(-3), sample(-3)]])
        await tab.call("Page.navigate", url=f"{controller.url}/#token={TOKEN}")
        page = await tab.html_with("no version published yet")
        assert '<p id="state">live</p>' in page
        assert "1,234,567" in page
        assert 'title="write 500.0 ms"' in page
        assert 'title="2 samples"' in page
        assert "<td>too old</td><td>0</td>" in page
        assert "<td>62.5 ms</td>" in page
        await controller.batches.put(1, [[sample(-8)]])
        assert 'title="1 samples"' in await tab.html_with("7: 1")
        await tab.call("Page.navigate", url="about:blank")
        await tab.call("Page.navigate", url=f"{controller.url}/#token=wrong")
        assert "1,234,567" not in await tab.html_with("wrong token")


HOSTILE = "<img src=x onerror=document.title='owned'>"


def of_engines(second: str) -> list[tuple[float, EngineState]]:
    """Return the engine states that belong to `story`, with their times."""
    first = EngineState("engine-a", "", -1, EngineStatus.WAITING, reason="")
    other = msgspec.structs.replace(first, name=second)
    why = f"its digest differs at {second}"

    def at(state: EngineState, version: int, reason: str = "") -> EngineState:
        status = EngineStatus.LEFT_OUT if reason else EngineStatus.SERVING
        return msgspec.structs.replace(state, version=version, status=status, reason=reason)

    def paused(state: EngineState) -> EngineState:
        return msgspec.structs.replace(at(state, 5), status=EngineStatus.WAITING)

    return [
        *((0.0, each) for each in (first, other)),
        *((10.0, at(each, 5)) for each in (first, other)),
        # The pause of an update does not end a stretch.
        *((20.0, paused(each)) for each in (first, other)),
        *((30.0, each) for each in (at(first, 6), at(other, 5, why))),
        *((60.0, at(each, 7)) for each in (first, other)),
        (80.0, at(first, 7)),
    ]


def story(second: str) -> list[UpdateReport]:
    """Return a short update, then one without an engine, and a long one with all engines."""
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


async def test_a_real_browser_draws_updates_on_one_scale(tmp_path: Path) -> None:
    """A bar of 25 ms has 25/1392 of the length of a bar of 1392 ms."""
    async with (
        windlass.Controller(token=TOKEN) as running,
        asyncio.timeout(40),
        browser(tmp_path / "profile") as tab,
    ):
        running.coordinator.reports.extend(story("engine-b"))
        await running.batches.put(0, [[sample(-1), sample(-2), sample(-2)]])
        await tab.call("Page.navigate", url=f"{running.url}/#token={TOKEN}")
        await tab.html_with("no version published yet")
        widths = await tab.value_of(
            "[...document.querySelectorAll('.bar')].map(b => [...b.children].reduce("
            "(w, s) => w + s.getBoundingClientRect().width, 0))"
        )
        assert len(widths) == 3
        assert widths[2] / widths[0] == pytest.approx(25 / 1392, rel=0.05)
        for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await tab.call("Emulation.setEmulatedMedia", features=[feature])
            shown = await tab.value_of("getComputedStyle(document.body).backgroundColor")
            assert shown == background
        await fits_a_phone(tab)


@pytest.mark.parametrize("second", [HOSTILE, "engine-b"])
async def test_a_real_browser_draws_engines_with_their_versions_over_time(
    tmp_path: Path, second: str
) -> None:
    """Bars have the lengths of the times, on one time axis. Names of peers stay text."""
    looks, events = of_engines(second), FleetEvents()
    for at_s in dict.fromkeys(at_s for at_s, _ in looks):
        events.compare(at_s, [each for when, each in looks if when == at_s])
    overview = msgspec.json.decode(DEMO.read_bytes(), type=dict[str, object])
    overview |= {"now_s": 100.0, "stretches": [asdict(each) for each in events.stretches]}
    kept = tmp_path / "report.html"
    kept.write_text(saved_page(overview, "engines over time"))
    async with asyncio.timeout(40), browser(tmp_path / "profile") as tab:
        await tab.call("Page.navigate", url=kept.as_uri())
        await tab.html_with("published version")
        lanes = await tab.value_of(
            "[...document.querySelectorAll('.track')].map(track => [...track.children].map(part => ["
            "part.title.split(': ').slice(1).join(': '), "
            "Math.round(100 * part.getBoundingClientRect().width / track.getBoundingClientRect().width)]))"
        )
        assert sorted(lanes) == sorted(
            [
                [
                    ["no version, waiting", 10],
                    ["version 5, serving", 20],
                    ["version 6, serving", 30],
                    ["version 7, serving", 40],
                ],
                [
                    ["no version, waiting", 10],
                    ["version 5, serving", 20],
                    [f"version 5, left out: its digest differs at {second}", 30],
                    ["version 7, serving, caught up", 20],
                    ["version 7, gone: its connections are gone", 20],
                ],
            ]
        )
        x, y = await tab.value_of(
            "(part => { part.scrollIntoView({block: 'center'}); const box = part.getBoundingClientRect(); "
            "return [box.left + 3, box.top + 3]; })(document.querySelector('.track .left-out'))"
        )
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        said = await tab.value_of("document.querySelector('#pointed').innerText")
        assert (
            said
            == f"{second}, 30 s to 1 min 0 s: version 5, left out: its digest differs at {second}"
        )
        assert await tab.value_of("document.querySelectorAll('img').length") == 0
        assert await tab.value_of("document.title") == "Windlass"
        assert second in await tab.value_of("document.querySelector('#lanes').innerText")
        await fits_a_phone(tab)


async def test_a_real_browser_shows_a_saved_page_of_a_real_update_and_real_rollouts(
    tmp_path: Path,
) -> None:
    """The saved file works without the controller: links, rates over time, and events of engines."""
    kept = tmp_path / "report.html"
    async with (
        asyncio.timeout(60),
        FakeEngine("a") as engine,
        windlass.Controller(token=TOKEN) as running,
    ):
        url = engine.url
        pair = await asyncio.to_thread(connect_small_pair, running.url, TOKEN, RestingEngine(), url)
        try:
            done = await asyncio.to_thread(pair.trainer.publish, 0, deadline_s=30)
            assert done.result().outcome is RoundOutcome.PUBLISHED
            running.rollouts.run_here({})
            sampling = windlass.SamplingParams(max_new_tokens=2)
            for _ in range(3):
                running.rollouts.submit_group((1,), 4, sampling)
                await running.rollouts.next_batch(1, deadline_s=30)
                running.observe_samples([sample(0)] * 4)
                await asyncio.sleep(0.5)
            running.coordinator.reports.append(story(f"</script>{HOSTILE}")[1])
            code, output, errors = await command(
                *(sys.executable, "-m", "windlass.cli.main", "report", running.url),
                *("--html", str(kept)),
                token=TOKEN,
            )
        finally:
            await asyncio.to_thread(pair.close)
    assert (code, errors) == (0, "")
    assert f"wrote {kept}" in output
    assert TOKEN not in kept.read_text()
    async with asyncio.timeout(40), browser(tmp_path / "profile") as tab:
        await tab.call("Page.navigate", url=kept.as_uri())
        page = await tab.html_with("published version 0")
        text = await tab.value_of("document.body.innerText")
        assert " % of 6 GB/s" in text
        assert "a: connected" in text
        shown = await tab.value_of("[...document.querySelectorAll('.track span')].at(-1).title")
        assert shown.endswith(": version 0, serving")
        assert "trainer/0\ta/0\tcma\t24\t" in text
        assert "completed 12" in text
        assert "saved 2" in text
        assert url not in page
        assert await tab.value_of("document.querySelectorAll('img').length") == 0
        assert await tab.value_of("document.title") == "Windlass"
        # The line of completed rollouts rises above the base at 58. Another line may be higher.
        highest = await tab.value_of(
            "Math.min(...document.querySelector('[data-name=completed]').getAttribute('points')"
            ".split(' ').map(point => Number(point.split(',')[1])))"
        )
        assert 4 <= round(highest, 9) < 58
        await fits_a_phone(tab)


async def test_a_real_browser_shows_the_values_under_the_pointer(tmp_path: Path) -> None:
    """Use a demo's page.

    If WINDLASS_SCREENSHOT names a folder, save the pictures of docs/operations.md.
    """
    kept = tmp_path / "report.html"
    overview = msgspec.json.decode(DEMO.read_bytes(), type=dict[str, object])
    kept.write_text(saved_page(overview, "a demo on two cores"))
    async with asyncio.timeout(60), browser(tmp_path / "profile") as tab:
        size = {"width": 1100, "height": 1950, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.call("Page.navigate", url=kept.as_uri())
        await tab.html_with("published version 24")
        assert "engine-b: its connections are gone" in await tab.value_of("document.body.innerText")
        said = "document.querySelector('#throughput figcaption').innerText"
        newest = await tab.value_of(said)
        x, y = await tab.value_of(
            "(box => [box.left + 2, box.top + 9])"
            "(document.querySelector('#throughput svg').getBoundingClientRect())"
        )
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert "at 0 s, version -1" in await tab.value_of(said)
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert await tab.value_of(said) == newest
        folder = os.environ.get("WINDLASS_SCREENSHOT")
        for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await tab.call("Emulation.setEmulatedMedia", features=[feature])
            assert (
                await tab.value_of("getComputedStyle(document.body).backgroundColor") == background
            )
            if folder:
                await keep_picture(tab, Path(folder) / f"page-{scheme}.png")
        await fits_a_phone(tab)


async def keep_picture(tab: Browser, path: Path) -> None:
    taken = await tab.call("Page.captureScreenshot")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(taken["data"]))
