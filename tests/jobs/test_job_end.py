"""End of a job: the time that its ranks and its logs get."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from idle_scheduler import IdleScheduler

from windlass.errors import TrainerError
from windlass.jobs.config import load_config
from windlass.jobs.launch import Job
from windlass.jobs.metric_logs import LogSection, TensorBoardLog
from windlass.jobs.recipe import load_recipe
from windlass.jobs.train_controller import TrainController
from windlass.progress import Progress

JOB = Path(__file__).resolve().parents[2] / "examples" / "launch" / "job.toml"


@pytest.mark.parametrize(("replica", "grace_s"), [("off", 10.0), ("host", 45.0)])
async def test_ranks_get_the_time_of_an_update_to_end_when_one_may_run(
    replica: str, grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(load_config(JOB), replica=replica, shutdown_s=45.0)
    recipe = load_recipe(Path(config.recipe.file), config.recipe.name)
    job = Job(config, tmp_path, recipe, IdleScheduler(), "token", lambda _: None, Progress())
    graces: list[float] = []

    async def refuse(*_: object, **__: object) -> None:
        raise TrainerError("no rank starts")

    async def close(_: TrainController, *, grace_s: float) -> None:
        graces.append(grace_s)

    monkeypatch.setattr(TrainController, "start", refuse)
    monkeypatch.setattr(TrainController, "close", close)
    async with job.controller:
        with pytest.raises(TrainerError, match="no rank starts"):
            await job.run()
    assert graces == [grace_s]


async def test_a_log_that_never_closes_delays_the_end_by_shutdown_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an upload of metrics without an answer blocked the event loop, and the job never ended."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    log = LogSection(tensorboard=True)
    config = msgspec.structs.replace(load_config(JOB), log=log, shutdown_s=0.5)
    recipe = load_recipe(Path(config.recipe.file), config.recipe.name)
    said, may_end = list[str](), threading.Event()
    job = Job(config, tmp_path, recipe, IdleScheduler(), "token", said.append, Progress())

    async def refuse(*_: object, **__: object) -> None:
        raise TrainerError("no rank starts")

    def hang(_: TensorBoardLog) -> None:
        may_end.wait(60)

    monkeypatch.setattr(TrainController, "start", refuse)
    monkeypatch.setattr(TensorBoardLog, "close", hang)
    try:
        async with job.controller, asyncio.timeout(30):
            with pytest.raises(TrainerError, match="no rank starts"):
                await job.run()
    finally:
        may_end.set()
    assert any("the last metrics may be missing" in line for line in said)
