"""Workflows in a real worker process clean up after every kind of end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from windlass.errors import PeerTimeout, RolloutError
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)

TOKEN = "a-token"
SAMPLING = SamplingParams(max_new_tokens=2)
NUM_RUNS = 8
WORKER = """
import asyncio, os, sys
from pathlib import Path
from windlass.rollout import run_rollout_worker
async def sandbox(context):
    here = Path(os.environ["SANDBOXES"], f"{context.task_id}-{context.attempt}")
    here.with_suffix(".opened").touch()
    try:
        os.write(int(os.environ["OPENED"]), b"o")
        if context.task_id.endswith(f"-{context.arguments}"):
            await asyncio.sleep(0.5)
            raise RuntimeError("tests failed")
        await asyncio.sleep(100)
    finally:
        await asyncio.sleep(SECONDS)
        here.with_suffix(".closed").touch()
sys.exit(run_rollout_worker({"sandbox": sandbox}))
"""


class Rig:
    """A controller and a worker process. Each run writes to a pipe when it begins."""

    def __init__(
        self, folder: Path, controller: RolloutController, worker: asyncio.subprocess.Process
    ) -> None:
        self.controller, self.worker, self._folder = controller, worker, folder
        self.begun = asyncio.Semaphore(0)

    def count(self, what: str) -> int:
        """Return how many sandboxes were opened or closed."""
        return len(list(self._folder.glob(f"*.{what}")))

    def note_begun(self, reader: int) -> None:
        """Count the runs that have written to the pipe."""
        for _ in os.read(reader, 64):
            self.begun.release()

    async def until_begun(self) -> None:
        """Wait until all runs have opened their sandboxes."""
        async with asyncio.timeout(30):
            for _ in range(NUM_RUNS):
                await self.begun.acquire()


@asynccontextmanager
async def started(
    folder: Path, config: RolloutConfig, *, seconds: float = 1.0, shutdown_s: float = 20.0
) -> AsyncIterator[Rig]:
    (folder / "worker.py").write_text(WORKER.replace("SECONDS", str(seconds)))
    reader, writer = os.pipe()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine("engine"))
        engines = StaticEngines()
        engines.set([engine.entry])
        controller = await stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=TOKEN, config=config)
        )
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()
        stack.push_async_callback(server.close)
        log = stack.enter_context((folder / "log").open("w"))
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, str(folder / "worker.py"), "--name", "worker"),
            *("--controller", server.url, "--shutdown-s", str(shutdown_s)),
            env={
                **os.environ,
                "WINDLASS_TOKEN": TOKEN,
                "SANDBOXES": str(folder),
                "OPENED": str(writer),
            },
            pass_fds=[writer],
            stderr=log,
        )
        rig = Rig(folder, controller, worker)
        loop = asyncio.get_running_loop()
        loop.add_reader(reader, rig.note_begun, reader)
        try:
            yield rig
        finally:
            loop.remove_reader(reader)
            os.close(reader)
            os.close(writer)
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


@pytest.mark.parametrize(
    "event", ["sibling", "handle", "deadline", "attempt_deadline", "end", "end_and_sigterm"]
)
async def test_a_workflow_closes_its_resources_for_every_kind_of_end(
    tmp_path: Path, event: str
) -> None:
    config = RolloutConfig(
        max_attempts=1, attempt_deadline_s=2.0 if event == "attempt_deadline" else 600.0
    )
    fails = 1 if event == "sibling" else 0
    async with started(tmp_path, config) as rig:
        handle = rig.controller.submit_workflow_group(
            "sandbox",
            fails,
            NUM_RUNS,
            SAMPLING,
            deadline_s=2.0 if event == "deadline" else None,
        )
        await rig.until_begun()
        if event == "handle":
            handle.cancel()
        elif event.startswith("end"):
            handle.add_done_callback(lambda _: None)
        else:
            with pytest.raises(PeerTimeout if event == "deadline" else RolloutError):
                await handle
        ended = asyncio.create_task(rig.controller.cancel_all(deadline_s=20))
        if event == "end_and_sigterm":
            # The cancellation has reached the worker. Its clean-up takes longer than this sleep.
            await asyncio.sleep(0.3)
            rig.worker.send_signal(signal.SIGTERM)
            assert await rig.worker.wait() == 0
        assert await ended == 0
        assert (rig.count("opened"), rig.count("closed")) == (NUM_RUNS, NUM_RUNS)


async def test_a_worker_asked_to_end_lets_workflows_clean_up(tmp_path: Path) -> None:
    async with started(tmp_path, RolloutConfig(max_attempts=1)) as rig:
        rig.controller.submit_workflow_group("sandbox", 0, NUM_RUNS, SAMPLING)
        await rig.until_begun()
        rig.worker.send_signal(signal.SIGTERM)
        rig.worker.send_signal(signal.SIGINT)
        assert await rig.worker.wait() == 0
        assert (rig.count("opened"), rig.count("closed")) == (NUM_RUNS, NUM_RUNS)


async def test_attempts_cut_off_during_clean_up_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tmp_path, RolloutConfig(max_attempts=1), seconds=60, shutdown_s=0.5) as rig:
        rig.controller.submit_workflow_group("sandbox", 0, NUM_RUNS, SAMPLING)
        await rig.until_begun()
        assert await rig.controller.cancel_all(deadline_s=0.2) == NUM_RUNS
        rig.worker.send_signal(signal.SIGTERM)
        assert await rig.worker.wait() == 0
    said = "8 cancelled attempts had not ended after 0.2 s; the controller does not wait longer"
    assert said in caplog.text
    log = (tmp_path / "log").read_text()
    said = (
        "8 attempts had not ended 0.5 s after their cancellation; the worker does not wait longer"
    )
    assert said in log
