"""Ranks get the time of an update to end only if an update may be under way."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from idle_scheduler import IdleScheduler

from windlass.jobs import launch
from windlass.jobs.config import load_config
from windlass.jobs.recipe import load_recipe
from windlass.progress import Progress

JOB = Path(__file__).resolve().parents[2] / "examples" / "launch" / "job.toml"


@pytest.mark.parametrize(("replica", "grace_s"), [("off", 10.0), ("host", 45.0)])
async def test_ranks_get_the_time_of_an_update_to_end_when_one_may_run(
    replica: str, grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(load_config(JOB), replica=replica, shutdown_s=45.0)
    recipe = load_recipe(Path(config.recipe.file), config.recipe.name)
    scheduler = IdleScheduler()
    job = launch._Job(config, tmp_path, recipe, scheduler, "token", lambda _: None, Progress())
    graces: list[float] = []

    async def close(*, grace_s: float) -> None:
        graces.append(grace_s)

    async def nothing() -> None:
        return

    monkeypatch.setattr(job._trainers, "close", close)
    monkeypatch.setattr(job, "_work", nothing)
    monkeypatch.setattr(launch, "_processes", lambda _config, _url: [])
    async with job.controller:
        await job.run()
    assert graces == [grace_s]
