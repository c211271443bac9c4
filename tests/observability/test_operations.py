"""A controller's pages and data over real HTTP, in a terminal command and in a browser."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from fake_engine import FakeEngine
from trained import report, sample
from windlass_command import command

import windlass
from windlass.control.coordinator import Coordinator
from windlass.errors import RolloutError
from windlass.net.server import ControlServer
from windlass.observability import operations
from windlass.observability.metrics import ControllerMetrics
from windlass.observability.operations import Operations
from windlass.rollout import BatchQueue, RolloutController, StaticEngines

TOKEN = "a-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def controller() -> AsyncIterator[windlass.Controller]:
    async with windlass.Controller(token=TOKEN) as running:
        running.coordinator.reports.append(report(41))
        await running.batches.put(0, [[sample(-1), sample(-3), sample(-3)]])
        yield running


async def test_the_page_refuses_frames_and_does_not_name_its_server(
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


def test_links_are_counted_by_their_transport() -> None:
    metrics = ControllerMetrics()
    for version in range(2):
        metrics.observe_round(report(version))
    text = metrics.render(version=1, engines=(), rollouts={}).decode()
    assert 'windlass_link_bytes_total{transport="cma"} 2.469134e+06' in text
    assert 'windlass_link_wire_seconds_total{transport="cma"} 0.5' in text


async def test_metrics_overview_and_status_count_rollouts_dropped_as_too_old() -> None:
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
        with pytest.raises(RolloutError, match="dropped because it is too old for version 2"):
            await group
        try:
            async with aiohttp.ClientSession(headers=HEADERS) as session:
                answer = await session.get(f"{server.url}/metrics")
                text = await answer.text()
            status = (sys.executable, "-m", "windlass.cli.main", "status", server.url)
            code, output, errors = await command(*status, token=TOKEN)
        finally:
            await server.close()
    for state, count in {"too_old": 0, "stopped_early": 1, "dropped": 4}.items():
        assert f'windlass_rollouts{{state="{state}"}} {count}.0' in text
    assert (code, errors) == (0, "")
    assert "too old 0, stopped early 1, dropped 4, rejected 0, wasted tokens 0" in output


async def test_two_controllers_in_one_process_have_separate_metrics(
    controller: windlass.Controller,
) -> None:
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


async def test_events_are_encoded_once_for_all_streams_and_few_times_a_second(
    controller: windlass.Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 200 streams an update of 0.2 s took 21 s, because each stream encoded every phase again."""
    num_encoded = 0

    def overview(self: Operations) -> dict[str, object]:
        nonlocal num_encoded
        num_encoded += 1
        return {"number": num_encoded}

    monkeypatch.setattr(Operations, "overview", overview)
    async with asyncio.timeout(20), aiohttp.ClientSession(headers=HEADERS) as session:
        streams = [
            await session.get(f"{controller.url}/v1/events") for _ in range(operations.MAX_STREAMS)
        ]
        async with session.get(f"{controller.url}/v1/events") as one_more:
            assert (one_more.status, "at most 64 streams" in await one_more.text()) == (503, True)
        loop = asyncio.get_running_loop()
        for stream in streams:
            await stream.content.readuntil(b"\n\n")
        before, began_s = num_encoded, loop.time()
        for step in range(1, 201):
            await controller.batches.put(step, [[sample(-2)]])
            await asyncio.sleep(0)
        for stream in streams:
            assert (await stream.content.readuntil(b"\n\n")).startswith(b"data: ")
        took_s = loop.time() - began_s
        assert num_encoded - before <= 2 + took_s / operations.FRAME_PERIOD_S
        for stream in streams:
            stream.close()


async def test_an_open_event_stream_does_not_delay_the_end() -> None:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        async with windlass.Controller(token=TOKEN) as running:
            stream = await session.get(f"{running.url}/v1/events")
            await stream.content.readuntil(b"\n\n")
            loop = asyncio.get_running_loop()
            began = loop.time()
        assert loop.time() - began < 1.5
        stream.close()


async def test_an_event_stream_ends_with_the_last_state() -> None:
    async with asyncio.timeout(30), aiohttp.ClientSession(headers=HEADERS) as session:
        async with windlass.Controller(token=TOKEN) as running:
            stream = await session.get(f"{running.url}/v1/events")
            await stream.content.readuntil(b"\n\n")
            # The controller ends before the next event is due.
            running.observe_samples([sample(-3)])
        *_, last, end = (await stream.content.read()).split(b"\n\n")
    assert end == b""
    assert msgspec.json.decode(last.removeprefix(b"data: "))["staleness"] == {"2": 1}


async def test_status_prints_rounds_staleness_and_outstanding_work(
    controller: windlass.Controller,
) -> None:
    status = (sys.executable, "-m", "windlass.cli.main", "status", controller.url)
    code, output, errors = await command(*status, token=TOKEN)
    assert (code, errors) == (0, "")
    assert "no version published yet" in output
    assert re.search(r" bytes .* pack\n.* 1\.23 MB .* 62\.5\n.*in milliseconds", output)
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
        token=TOKEN,
    )
    assert (code, errors) == (0, "")
    assert "of the limit" in output
    assert "  cma: 0.001 GB, links: 2, 0.00 GB/s each; the slowest:\n" in output
    assert "    trainer/0 -> engine-a/1 125.00 ms, 0.01 GB/s\n" in output
    (update,) = msgspec.json.decode(files[0].read_bytes())
    assert update["limit_s"] == pytest.approx(1_234_567 / 4e9)
    assert update["wire"]["cma"]["slowest"][0]["wire_s"] == 0.125
    assert sum(update["stages"].values()) == pytest.approx(update["update_s"])
    assert files[1].read_bytes().startswith(b"\x89PNG")
