"""A controller is killed between the commands to the ranks of one engine to serve a version, with real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dying_controller import ControllerSettings, run_controller
from kept_port import free_port
from weight_fleet import TOKEN, Fleet, Rank

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

DEADLINES = PhaseDeadlines(connect_s=20, write_s=6, fleet_s=30)


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("num_ranks", [2, 3])
async def test_restarted_controller_completes_a_half_published_version(
    mode: UpdateMode, num_ranks: int, tmp_path: Path
) -> None:
    config = ControlConfig(mode=mode, deadlines=DEADLINES)
    port = free_port()

    def controller(*, dies: bool) -> Rank:
        settings = ControllerSettings(port, TOKEN, tmp_path / "journal", config, dies)
        return Rank(run_controller, settings)

    first = controller(dies=True)
    second: Rank | None = None
    fleet = Fleet(await first.read(), 1)
    try:
        fleet.add_engine("engine", num_ranks)
        fleet.add_trainers()
        await fleet.ready()
        fleet.trainers[0].tell(5)
        await asyncio.to_thread(first.process.join, 60)
        assert first.process.exitcode == -9
        # Each rank has the bytes of version 5. The first rank, which reports to the server, must not serve alone.
        found = await fleet.held("engine")
        assert found.count((5, "5", False)) == 1
        assert found[0] == (-1, "5", True)
        second = controller(dies=False)
        await second.read()
        assert await second.ask(5) == "served"
        assert await fleet.held("engine") == [(5, "5", False)] * num_ranks
        await fleet.trainers[0].read()
        assert (await fleet.publish(6))[:2] == ("published", [])
        assert await fleet.held("engine") == [(6, "6", False)] * num_ranks
    finally:
        for process in (first, second):
            if process is not None:
                process.close()
        fleet.close()
