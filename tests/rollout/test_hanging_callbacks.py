"""When user code or child processes do not end, waiting code continues after a deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from fake_engine import FakeEngine

from windlass.engines import launch
from windlass.engines.spec import ServerCommand
from windlass.errors import PeerTimeout
from windlass.jobs.config import load_config
from windlass.jobs.launch import room_deadline_s
from windlass.jobs.schedulers import base
from windlass.jobs.schedulers import ray as ray_scheduler
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.rollout import (
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    pool,
)
from windlass.rollout.messages import EngineTarget, RolloutTask, TaskBatch
from windlass.rollout.worker import RolloutWorker, WorkerSettings

DEADLINE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


class Stubborn:
    """Workflow that ignores cancellation until `release` is set."""

    def __init__(self) -> None:
        self.begun, self.release, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, _context: WorkflowContext) -> object:
        self.begun.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                continue
        self.ended.set()
        return None


async def test_closing_does_not_wait_for_a_workflow_that_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "STOP_DEADLINE_S", 0.2)
    workflow = Stubborn()
    async with asyncio.timeout(DEADLINE_S), FakeEngine("engine-a") as engine:
        controller = RolloutController(StaticEngines([engine.entry]), StalenessPolicy.unbounded(8))
        async with controller:
            controller.run_here({"stubborn": workflow})
            controller.submit_workflow("stubborn", None, SamplingParams(max_new_tokens=1))
            await workflow.begun.wait()
        workflow.release.set()
        await workflow.ended.wait()


async def test_a_worker_shuts_down_although_a_workflow_ignores_its_cancellation() -> None:
    workflow = Stubborn()
    task = RolloutTask(
        task_id="task-1",
        attempt=1,
        engine=EngineTarget("engine-a", "http://127.0.0.1:9"),
        prompt_ids=(),
        sampling=SamplingParams(max_new_tokens=1),
        deadline_s=60.0,
        workflow="stubborn",
        arguments=b"\xc0",
    )
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
        settings = WorkerSettings(controller="http://127.0.0.1:9", name="worker-0")
        worker = RolloutWorker(settings, "a-token", http, {"stubborn": workflow})
        worker.on_frame(TaskBatch(1, (task,)))
        await workflow.begun.wait()
        await worker.shut_down(0.2)
        workflow.release.set()
        await workflow.ended.wait()


def test_a_producer_waits_for_room_as_long_as_a_whole_step_may_take() -> None:
    config = load_config(ROOT / "examples" / "launch" / "job.toml")
    replace = msgspec.structs.replace
    config = replace(
        config,
        rollout=replace(config.rollout, batch_deadline_s=10.0, groups_per_step=4),
        trainer=replace(
            config.trainer, step_deadline_s=100.0, publish_deadline_s=1000.0, max_restarts=3
        ),
        start_deadline_s=10_000.0,
    )
    draw_s, score_s, tensors_s, train_s, save_s, publish_s = 10.0, 40.0, 100.0, 100.0, 100.0, 1000.0
    restart_s = 2 * 10_000.0 + publish_s
    step_s = draw_s + score_s + tensors_s + train_s + publish_s
    # After each of three restarts, the two steps since the checkpoint come first. The save after them may fail.
    assert config.trainer.save_every == 2
    assert room_deadline_s(config) == 7 * step_s + 4 * save_s + 3 * restart_s
    config = replace(config, trainer=replace(config.trainer, max_restarts=0))
    assert room_deadline_s(config) == step_s + save_s


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def serve(program: str, *options: str) -> int:
    words = ["--name", "a", "--model", "/m", "--host", "127.0.0.1", "--port", "9", *options]
    return launch.serve(
        launch.arguments("program", None).parse_args(words),
        ServerCommand((sys.executable, "-c", program)),
        ready_line="never said",
    )


@pytest.mark.usefixtures("handlers")
def test_an_engine_server_that_never_serves_is_ended_by_its_deadline(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert serve("import time; time.sleep(60)", "--start-deadline-s", "0.5") == 2
    said = "engine a: PeerTimeout: the server did not log 'never said' within 0.5 s"
    assert said in capfd.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_a_launcher_ends_although_a_detached_process_has_its_log_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "LOG_DEADLINE_S", 0.2)
    told = tmp_path / "left"
    left = "import time; time.sleep(60)"
    program = (
        "import os, subprocess, sys\n"
        f"left = subprocess.Popen([sys.executable, '-c', {left!r}], start_new_session=True)\n"
        f"open({str(told)!r}, 'w').write(str(left.pid))\n"
        "os._exit(3)\n"
    )
    try:
        assert serve(program) == 3
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)
    for thread in threading.enumerate():
        if thread.name == "log":
            thread.join(DEADLINE_S)


async def test_a_wait_for_a_killed_process_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(base, "END_DEADLINE_S", 0.1)
    above_all_numbers = 1 << 30
    stuck = SimpleNamespace(
        pid=above_all_numbers, returncode=None, wait=lambda: asyncio.Event().wait()
    )

    async def create(*_: object, **__: object) -> SimpleNamespace:
        return stuck

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    scheduler = LocalScheduler(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        await scheduler.start(base.ProcessSpec(name="stuck", command=("program",)))
        await scheduler.close(grace_s=0.05)


async def test_an_actor_that_does_not_answer_is_a_named_error() -> None:
    pytest.importorskip("ray")
    with pytest.raises(PeerTimeout, match=r"an actor gave no answer within 0\.05 s"):
        await ray_scheduler.answer_of(asyncio.Event().wait(), 0.05)
