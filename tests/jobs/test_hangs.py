"""Processes of a job that hang (SIGSTOP) are noticed and started again, or the job ends with the reason."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from flat_engine import flat_engine
from launched_jobs import EXAMPLE, launched, write

import windlass
from windlass.control.coordinator import Coordinator
from windlass.engines.private_routes import ALIVE_PATH
from windlass.jobs.silence import SilenceWatch
from windlass.net.access import Access
from windlass.net.addresses import free_port

TOKEN = "a-token"


def write_short(folder: Path, *, max_silence_s: float, steps: int = 6, engine: str = "") -> Path:
    """Write a job of one engine and one worker, whose connections are tested every 4 s."""
    config = write(
        folder,
        steps=steps,
        groups=16,
        rollout="batch_deadline_s = 90.0\nworker_lease_s = 4.0\nworker_grace_s = 4.0",
        top=f"max_silence_s = {max_silence_s}\nshutdown_s = 5.0",
    )
    text = config.read_text()
    text = text.replace('mode = "in_place"', 'mode = "in_place"\nheartbeat_s = 4.0')
    config.write_text(text.replace("[[engines]]", f"[[engines]]\n{engine}", 1))
    return config


NAMES = ["engine-0", pytest.param("worker-0", marks=pytest.mark.long)]


@pytest.mark.parametrize("name", NAMES)
def test_process_that_hangs_is_started_again(tmp_path: Path, name: str) -> None:
    with launched(write_short(tmp_path, max_silence_s=8.0)) as job:
        job.read_until("step 1:")
        (pid,) = job.children(name)
        os.kill(pid, signal.SIGSTOP)
        noticed = job.read_until(f"{name} does not answer: ")
        assert "the job starts it again after max_silence_s=8" in noticed
        said = job.read_until(f"{name} did not answer within max_silence_s=8: ")
        assert "after 0 restarts; starting it again" in said
        assert job.end() == 0, job.text
    assert "done: 6 steps, version 6 published" in job.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.long
def test_process_that_hangs_without_restarts_ends_the_job(tmp_path: Path) -> None:
    config = write_short(tmp_path, max_silence_s=8.0, engine="max_restarts = 0")
    with launched(config) as job:
        job.read_until("step 1:")
        (pid,) = job.children("engine-0")
        os.kill(pid, signal.SIGSTOP)
        assert job.end() == 2, job.text
    assert "engine-0 did not answer within max_silence_s=8: " in job.error, job.text


@pytest.mark.long
@pytest.mark.parametrize("name", ["engine-0", "worker-0"])
def test_process_that_continues_in_time_is_not_started_again(tmp_path: Path, name: str) -> None:
    with launched(write_short(tmp_path, max_silence_s=24.0, steps=200)) as job:
        job.read_until("step 1:")
        (pid,) = job.children(name)
        os.kill(pid, signal.SIGSTOP)
        job.read_until(f"{name} does not answer: ")
        os.kill(pid, signal.SIGCONT)
        job.read_until(f"{name} answers again")
        assert job.children(name) == [pid]
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130, job.text
    assert "starting it again" not in job.text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_trainer_rank_that_hangs_is_started_again_after_the_deadline_of_a_step(
    tmp_path: Path,
) -> None:
    config = write_short(tmp_path, max_silence_s=60.0, steps=2)
    text = config.read_text()
    config.write_text(
        text.replace("[trainer]", "[trainer]\nstep_deadline_s = 20.0\nsave_every = 1")
    )
    with launched(config) as job:
        job.read_until("step 1:")
        (pid,) = job.children(f"{EXAMPLE}/trainer.py")
        os.kill(pid, signal.SIGSTOP)
        said = job.read_until("starting the ranks again (restart 1 of at most 3)")
        assert "no answer from trainer-0 within 20.0 s" in said
        assert job.end() == 0, job.text
    assert "done: 2 steps" in job.text


@asynccontextmanager
async def watched(served_at: str) -> AsyncIterator[SilenceWatch]:
    """Provide the watch of a controller that has an engine with this URL."""
    async with windlass.Controller(token=TOKEN) as controller:
        with ThreadPoolExecutor(1) as pool, ExitStack() as connected:
            loop = asyncio.get_running_loop()
            engine = flat_engine(controller.url, TOKEN, {"p": torch.zeros(2)}, served_at=served_at)
            await loop.run_in_executor(pool, connected.enter_context, engine)
            await controller.wait_for_fleet(num_trainers=0, engines=["engine"], deadline_s=20)
            yield SilenceWatch(controller, TOKEN, start_deadline_s=20.0, max_silence_s=0.4)
            await loop.run_in_executor(pool, connected.close)


@asynccontextmanager
async def served_engine(
    answer: Callable[[web.Request], Awaitable[web.Response]],
) -> AsyncIterator[tuple[SilenceWatch, str]]:
    """Provide the watch of a controller whose engine has an HTTP server, and the server's URL."""
    app = web.Application()
    app.add_routes([web.get("/{any:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with watched(url) as watch:
            yield watch, url
    finally:
        await runner.cleanup()


async def test_engine_whose_server_answers_no_request_is_silent() -> None:
    may_answer = asyncio.Event()
    may_answer.set()

    async def answer(_: web.Request) -> web.Response:
        await may_answer.wait()
        # An engine of a plugin need not have the path.
        raise web.HTTPNotFound

    async with served_engine(answer) as (watch, url):
        silent = asyncio.create_task(watch.until_silent("engine", Access.ENGINE))
        done, _ = await asyncio.wait([silent], timeout=1.5)
        assert not done
        may_answer.clear()
        async with asyncio.timeout(20):
            reason = await silent
        assert "engine did not answer within max_silence_s=0.4: " in reason
        assert f"GET {url}/windlass/alive: no answer within 0.1 s" in reason
        may_answer.set()


async def test_engine_whose_server_says_that_its_core_is_dead_is_silent() -> None:
    status = 200

    async def answer(request: web.Request) -> web.Response:
        # A server's own health route may answer although its core does not.
        return web.Response(status=status if request.path == ALIVE_PATH else 200)

    async with served_engine(answer) as (watch, url):
        silent = asyncio.create_task(watch.until_silent("engine", Access.ENGINE))
        done, _ = await asyncio.wait([silent], timeout=1.5)
        assert not done
        status = 503
        async with asyncio.timeout(20):
            assert f"GET {url}/windlass/alive: status 503" in await silent


async def test_engine_that_an_update_blocks_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, in_round = asyncio.Event(), False
    may_answer.set()
    monkeypatch.setattr(Coordinator, "in_round", property(lambda _: in_round))

    async def answer(_: web.Request) -> web.Response:
        await may_answer.wait()
        return web.Response()

    async with served_engine(answer) as (watch, _):
        silent = asyncio.create_task(watch.until_silent("engine", Access.ENGINE))
        await asyncio.sleep(0.5)
        in_round = True
        may_answer.clear()
        done, _ = await asyncio.wait([silent], timeout=1.5)
        assert not done
        in_round = False
        async with asyncio.timeout(20):
            assert "no answer within 0.1 s" in await silent
        may_answer.set()


async def test_engine_whose_server_the_controller_cannot_reach_is_not_silent() -> None:
    """Only rollout workers need a route to the servers of engines."""
    async with watched(f"http://127.0.0.1:{free_port()}") as watch:
        silent = asyncio.create_task(watch.until_silent("engine", Access.ENGINE))
        done, _ = await asyncio.wait([silent], timeout=1.5)
        assert not done
        silent.cancel()


@pytest.mark.parametrize("role", [Access.ENGINE, Access.WORKER])
async def test_process_that_never_connects_is_silent_after_the_deadline_of_its_start(
    role: Access,
) -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        watch = SilenceWatch(controller, TOKEN, start_deadline_s=0.3, max_silence_s=0.4)
        async with asyncio.timeout(20):
            reason = await watch.until_silent("absent", role)
    assert reason == "absent did not answer within start_deadline_s=0.3: it is not connected"
