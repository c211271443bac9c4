"""Routers of other projects learn which engines are routable, and send requests to no others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_fleet import FakeFleet

from windlass import Controller
from windlass.cli.main import main
from windlass.config import ControlConfig, PhaseDeadlines, RouterConfig, RouterKind
from windlass.control.messages import Command, Pause
from windlass.control.report import RoundOutcome
from windlass.envs import temporary_values
from windlass.errors import ConfigError
from windlass.net.addresses import free_port
from windlass.rollout.routers import RouterUpdates

WITHIN_S = 40.0
ROUTERS_VARIABLE = "WINDLASS_ROUTERS"
"""Folder into which `pip install --target` put sglang-router and vllm-router."""
DEADLINES = PhaseDeadlines(connect_s=0.5, pause_s=0.5, prepare_s=0.5)


@contextlib.asynccontextmanager
async def serving(
    handlers: Mapping[str, Callable[[web.Request], Any]], port: int = 0
) -> AsyncIterator[str]:
    """Serve these routes for any method and yield the server's URL."""
    app = web.Application()
    app.add_routes([web.route("*", path, handler) for path, handler in handlers.items()])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def feeding(rig: FakeFleet, *routers: RouterConfig) -> AsyncIterator[RouterUpdates]:
    feed = RouterUpdates(rig.coordinator, routers)
    feed.start()
    try:
        yield feed
    finally:
        await feed.close()


class Hook:
    """Hook that records requests and answers with `status`."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.came = asyncio.Event()
        self.num_asked = 0
        self.status = 200

    async def serve(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.status == 200:
            self.told.append(await request.json())
        self.came.set()
        location = {"Location": "/elsewhere"} if self.status == 307 else {}
        return web.Response(status=self.status, headers=location)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                self.came.clear()
                await self.came.wait()

    def knows(self, version: int, **routable: bool) -> bool:
        if not self.told:
            return False
        newest = self.told[-1]
        found = {each["name"]: each["routable"] for each in newest["engines"]}
        return bool(newest["published_version"] == version and found == routable)


async def test_a_webhook_gets_left_out_engines_with_reasons_and_nothing_during_rounds() -> None:
    hook, is_stuck = Hook(), False

    def stuck(command: Command) -> None:
        if is_stuck and isinstance(command, Pause):
            raise RuntimeError("its scheduler is gone")

    async with (
        serving({"/fleet": hook.serve}) as url,
        FakeFleet(ControlConfig(deadlines=DEADLINES)) as rig,
    ):
        with temporary_values({"WINDLASS_ROUTER_TOKEN": "router secret"}):
            config = RouterConfig(url=f"{url}/fleet", kind=RouterKind.WEBHOOK)
            async with feeding(rig, config):
                await rig.start({"a": 1})
                await rig.add_engine("b", on_command=stuck)
                for version in range(4):
                    await rig.publish(version)
                    await hook.until(lambda: hook.knows(version, a=True, b=True))  # noqa: B023
                assert all(each["routable"] for told in hook.told for each in told["engines"])
                newest = {"version": 3, "routable": True, "state": "serving", "reason": ""}
                assert hook.told[-1]["engines"][1] == {"name": "b", "url": "http://b", **newest}
                is_stuck = True
                report = await rig.publish(4)
                assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",))
                await hook.until(lambda: hook.knows(4, a=True, b=False))
                assert "its scheduler is gone" in hook.told[-1]["engines"][1]["reason"]
                await asyncio.to_thread(rig.channels["a/0"].close)
                await hook.until(lambda: hook.knows(4, a=False, b=False))
                assert hook.told[-1]["engines"][0]["reason"] == "is not connected"
        assert hook.tokens == {"Bearer router secret"}


@pytest.mark.parametrize("status", [500, 307, 0], ids=["error", "redirect", "silent"])
async def test_a_failing_router_is_tried_a_few_times_and_delays_no_update(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook, elsewhere, released = Hook(), Hook(), asyncio.Event()
    hook.status = status or 200

    async def answer(request: web.Request) -> web.Response:
        if not status and not released.is_set():
            hook.num_asked += 1
            hook.came.set()
            await released.wait()
        return await hook.serve(request)

    async with (
        serving({"/fleet": answer, "/elsewhere": elsewhere.serve}) as url,
        FakeFleet() as rig,
    ):
        config = RouterConfig(
            url=f"{url}/fleet", kind=RouterKind.WEBHOOK, deadline_s=0.2, num_tries=3
        )
        async with feeding(rig, config):
            await rig.start({"a": 1})
            async with asyncio.timeout(WITHIN_S):
                for version in range(3):
                    await rig.publish(version)
                while "is not up to date after 3 tries" not in caplog.text:
                    hook.came.clear()
                    await asyncio.wait([asyncio.ensure_future(hook.came.wait())], timeout=0.2)
            hook.status = 200
            released.set()
            await rig.publish(3)
            await hook.until(lambda: hook.knows(3, a=True))
        assert not elsewhere.num_asked


async def test_a_webhook_gets_an_engine_that_moves_only_with_its_newest_address() -> None:
    hook = Hook()
    async with serving({"/fleet": hook.serve}) as url, FakeFleet() as rig:
        config = RouterConfig(url=f"{url}/fleet", kind=RouterKind.WEBHOOK)
        async with feeding(rig, config):
            await rig.start({"b": 1})
            for number in range(3):
                await rig.add_engine("a", address=f"a-{number}", incarnation=f"number-{number}")
                await rig.publish(number)
                await hook.until(lambda: hook.knows(number, a=True, b=True))  # noqa: B023
                assert hook.told[-1]["engines"][0]["url"] == f"http://a-{number}"
                await asyncio.to_thread(rig.channels["a/0"].close)
                await hook.until(lambda: hook.knows(number, a=False, b=True))  # noqa: B023
                assert hook.told[-1]["engines"][0]["url"] == f"http://a-{number}"
                assert len(hook.told[-1]["engines"]) == 2


def test_an_invalid_router_address_is_refused_before_any_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("ftp://router", "http://user:secret@router", "http://router?a=b"):
        config = ControlConfig(routers=(RouterConfig(url=url),))
        with pytest.raises(ConfigError, match="RouterConfig: url must be http"):
            Controller(token="t", config=config)
    with pytest.raises(ConfigError, match="kind"):
        RouterConfig(url="http://router", kind="nginx")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_tries"):
        RouterConfig(url="http://router", num_tries=0)
    monkeypatch.setenv("WINDLASS_TOKEN", "t")
    code = main(["serve", "--webhook", "ftp://router"])
    assert code != 0
    assert "RouterConfig: url must be http" in capsys.readouterr().err


# --- real routers --------------------------------------------------------------------------------


def _engine(name: str, asked: set[str]) -> dict[str, Callable[[web.Request], Any]]:
    """Return the engine routes that a router uses. `/generate` records which engine answered."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate":
            asked.add(name)
        return web.json_response(
            {"model_path": "m", "served_model_name": "m", "is_generation": True, "text": name}
        )

    return {"/{path:.*}": answer}


@pytest.fixture(params=["sglang_router", "vllm_router"])
def router(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Provide the package of a router and its folder."""
    package: str = request.param
    folder = str(Path(os.environ.get(ROUTERS_VARIABLE, "")).resolve())
    if not Path(folder, package).is_dir():
        pytest.skip(f"needs {package} in the folder that {ROUTERS_VARIABLE} names")
    return package, folder


@pytest.fixture
async def router_url(router: tuple[str, str], tmp_path: Path) -> AsyncIterator[str]:
    package, folder = router
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"{package}.launch_router", "--host", "127.0.0.1"),
            *("--port", str(port), "--prometheus-port", str(free_port())),
            *("--policy", "round_robin"),
            env={**os.environ, "PYTHONPATH": folder},
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def _until_it_sends_to(router_url: str, answered: set[str], *wanted: str) -> None:
    """Send requests to the router until the answers come from these engines and from no others."""
    async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession() as http:
        while True:
            answered.clear()
            for _ in range(6):
                with contextlib.suppress(aiohttp.ClientError):
                    question = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
                    async with http.post(f"{router_url}/generate", json=question) as got:
                        await got.read()
            if answered == set(wanted):
                return
            await asyncio.sleep(0.2)


@pytest.mark.engines
async def test_real_routers_send_requests_to_routable_engines_alone(router_url: str) -> None:
    is_stuck = False

    def stuck(command: Command) -> None:
        if is_stuck and isinstance(command, Pause):
            raise RuntimeError("stuck")

    answered: set[str] = set()
    async with (
        serving(_engine("a", answered)) as url_a,
        serving(_engine("b", answered)) as url_b,
        FakeFleet(ControlConfig(deadlines=DEADLINES)) as rig,
        feeding(rig, RouterConfig(url=router_url, num_tries=40)),
    ):
        # A scripted engine's name is also its address.
        a, b = (url.removeprefix("http://") for url in (url_a, url_b))
        await rig.start({a: 1})
        await rig.add_engine(b, on_command=stuck)
        await rig.publish(0)
        await _until_it_sends_to(router_url, answered, "a", "b")
        is_stuck = True
        await rig.publish(1)
        await _until_it_sends_to(router_url, answered, "a")
        is_stuck = False
        report = await rig.publish(2)
        assert set(report.engines) == {a, b}
        await _until_it_sends_to(router_url, answered, "a", "b")


@pytest.mark.engines
async def test_real_routers_leave_an_old_address_that_still_answers(router_url: str) -> None:
    answered: set[str] = set()
    async with (
        serving(_engine("old", answered)) as old,
        serving(_engine("new", answered)) as new,
        FakeFleet(ControlConfig(deadlines=DEADLINES)) as rig,
        feeding(rig, RouterConfig(url=router_url, num_tries=40)),
    ):
        await rig.start({})
        await rig.add_engine("pod-0", address=old.removeprefix("http://"))
        await rig.publish(0)
        await _until_it_sends_to(router_url, answered, "old")
        # The engine starts again on another host, under the same name.
        await asyncio.to_thread(rig.channels["pod-0/0"].close)
        await rig.add_engine("pod-0", address=new.removeprefix("http://"), incarnation="second")
        await rig.publish(1)
        await _until_it_sends_to(router_url, answered, "new")


@pytest.mark.engines
async def test_real_routers_leave_an_old_engine_beside_one_that_they_cannot_reach(
    router_url: str,
) -> None:
    is_stuck = False

    def stuck(command: Command) -> None:
        if is_stuck and isinstance(command, Pause):
            raise RuntimeError("stuck")

    answered: set[str] = set()
    async with (
        serving(_engine("a", answered)) as url_a,
        serving(_engine("b", answered)) as url_b,
        FakeFleet(ControlConfig(deadlines=DEADLINES)) as rig,
        feeding(rig, RouterConfig(url=router_url, num_tries=40, deadline_s=2.0)),
    ):
        await rig.start({})
        await rig.add_engine("a", address=url_a.removeprefix("http://"))
        await rig.add_engine("b", address=url_b.removeprefix("http://"), on_command=stuck)
        await rig.publish(0)
        await _until_it_sends_to(router_url, answered, "a", "b")
        # Nothing listens on this port.
        await rig.add_engine("aa", address=f"127.0.0.1:{free_port()}")
        is_stuck = True
        await rig.publish(1)
        await _until_it_sends_to(router_url, answered, "a")
