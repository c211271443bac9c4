"""Rollout workers as processes: few descriptors, strangers, tokens, redirects, and silent peers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from test_rollout_loop import SOURCE, TOKEN, Rig, assert_right, finished
from test_rollout_reconcile import PlayedWorker

from windlass.errors import RolloutError
from windlass.net.access import Access, role_environment
from windlass.rollout import (
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
)

SAMPLING = SamplingParams(max_new_tokens=6)
WITHIN_S = 60.0
TOOL = "import os; print(sorted(name for name in os.environ if 'WINDLASS_' in name))"
WORKER = f"""
import os, subprocess, sys
from windlass.rollout import run_rollout_worker

async def call_tool(context):
    said = subprocess.run([sys.executable, "-c", {TOOL!r}], capture_output=True, text=True)
    here = sorted(name for name in os.environ if "WINDLASS" in name and "TOKEN" in name)
    return {{"here": here, "tool": said.stdout.strip()}}

sys.exit(run_rollout_worker({{"call_tool": call_tool}}))
"""


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


async def test_a_worker_with_forty_descriptors_fails_no_rollout_despite_strangers(rig: Rig) -> None:
    await rig.start()
    engine = await rig.engine("a", token_s=0.005)
    rig.route(engine)
    bash = shutil.which("bash") or "bash"
    command = f"ulimit -n 40 && exec {sys.executable} -m windlass.rollout.worker"
    worker = await asyncio.create_subprocess_exec(
        *(bash, "-c", f"{command} --name w --controller {rig.server.url}"),
        env={**os.environ, "PYTHONPATH": SOURCE, "WINDLASS_TOKEN": TOKEN},
    )
    rig.stack.push_async_callback(rig.reap, worker)
    port = int(rig.server.url.rsplit(":", 1)[1])
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
    assert_right(await finished(rig.submit(300)))
    stats = rig.controller.stats()
    assert (stats.failed, stats.retried) == (0, 0)
    for _, writer in strangers:
        writer.close()
    rig.assert_balanced(completed=300)


async def test_workflows_and_their_tools_find_no_token_in_their_environment(
    rig: Rig, tmp_path: Path
) -> None:
    await rig.start()
    rig.route(await rig.engine("a"))
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    tokens = role_environment(TOKEN, Access.WORKER)
    assert len(tokens) == 3
    others = {name: value for name, value in os.environ.items() if "WINDLASS" not in name}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), "--name", "w", "--controller", rig.server.url),
        env={**others, "PYTHONPATH": SOURCE, **tokens},
    )
    rig.stack.push_async_callback(rig.reap, worker)
    handle = rig.controller.submit_workflow("call_tool", None, SAMPLING)
    (rollout,) = await rig.controller.wait([handle], deadline_s=WITHIN_S)
    assert rollout.value == {"here": [], "tool": "[]"}


async def test_a_worker_follows_no_redirect_of_an_engine(rig: Rig) -> None:
    rig.config = RolloutConfig(max_attempts=2, retry_backoff_s=0.001)
    await rig.start()
    reached: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"http://{request.host}/latest/meta-data/")

    async def note(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", redirect), web.route("*", "/{path:.*}", note)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    rig.stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    rig.engines.set([("a", f"http://127.0.0.1:{runner.addresses[0][1]}", 0)])
    await rig.worker("w")
    with pytest.raises(RolloutError, match=r"redirects to .*, which is not followed"):
        await rig.controller.submit((1, 5), SAMPLING)
    assert reached == []


async def test_the_controller_ends_a_connection_without_answers_to_pings(rig: Rig) -> None:
    rig.config = RolloutConfig(worker_lease_s=0.2, worker_grace_s=0.3)
    await rig.start()
    worker = PlayedWorker(rig.stack, rig.server.url)
    await worker.connect()
    await rig.controller.wait_for_workers(1, deadline_s=WITHIN_S)
    # A worker that does not read answers no ping.
    worker.reader.cancel()
    async with asyncio.timeout(WITHIN_S):
        while rig.controller.stats().workers:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_rollouts_recovered_from_a_journal_do_not_count_as_lost(
    rig: Rig, tmp_path: Path
) -> None:
    rig.config = RolloutConfig(journal=tmp_path / "journal")
    await rig.start()
    worker = PlayedWorker(rig.stack, rig.server.url)
    rig.engines.set([("a", "http://127.0.0.1:9", 0)])
    await worker.connect()
    for number in range(3):
        rig.controller.submit((number + 1,), SAMPLING)
        await worker.task()
    copy = tmp_path / "of a process that was killed"
    copy.write_bytes((tmp_path / "journal").read_bytes())
    async with RolloutController(
        StaticEngines(), StalenessPolicy.unbounded(9), config=RolloutConfig(journal=copy)
    ) as successor:
        stats = successor.stats()
        assert (stats.submitted, stats.lost, stats.outstanding, stats.running) == (3, 0, 3, 3)
        for handle in successor.recovered.rollouts.values():
            handle.cancel()
        stats = successor.stats()
        assert (stats.cancelled, stats.lost, stats.outstanding, stats.running) == (3, 0, 0, 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--max-concurrent", "0"), r"max_concurrent must be in \[1, 262144\], got 0"),
        (("--name", "a\nb"), r"a name must be 1 to 255 bytes of printable characters"),
    ],
)
async def test_a_worker_with_impossible_options_ends_with_the_reason(
    options: tuple[str, ...], reason: str
) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "windlass.rollout.worker", "--name", "w"),
        *("--controller", "http://127.0.0.1:9", *options),
        env={**os.environ, "PYTHONPATH": SOURCE, "WINDLASS_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(worker.communicate(), WITHIN_S)
    assert worker.returncode == 2
    assert re.search(reason, said.decode()), said
