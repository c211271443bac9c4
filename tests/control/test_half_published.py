"""Only some ranks of an engine get the command to serve a version: the controller is killed, or a rank is cut off.

The ranks and the controllers are real processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cut_ranks import cut_off
from dying_controller import ControllerSettings, run_controller
from kept_port import free_port
from weight_fleet import TOKEN, Fleet, Rank

import windlass
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.messages import Pause, Publish
from windlass.control.session import AgentSession
from windlass.net.messages import Envelope

DEADLINES = PhaseDeadlines(connect_s=20, write_s=6, fleet_s=30)


@asynccontextmanager
async def serving_version_1(
    mode: UpdateMode,
) -> AsyncIterator[tuple[windlass.Controller, Fleet]]:
    """Yield a controller in this process, and its fleet: one engine of three ranks that serves version 1."""
    config = ControlConfig(mode=mode, deadlines=DEADLINES)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        fleet = Fleet(controller.url, 1)
        try:
            fleet.add_engine("engine", 3)
            fleet.add_trainers()
            await fleet.ready()
            assert (await fleet.publish(1))[:2] == ("published", [])
            yield controller, fleet
        finally:
            fleet.close()


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


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
async def test_engine_is_completed_after_a_rank_is_cut_off_in_publish(
    mode: UpdateMode, rank: int, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_version_1(mode) as (controller, fleet):
        with monkeypatch.context() as patch:
            cut_off(patch, f"engine/{rank}", at=Publish, answered=answered)
            assert (await fleet.publish(5)).outcome == "RoundAborted"
            await controller.wait_for_version(5, engines=["engine"], deadline_s=20)
        assert await fleet.held("engine") == [(5, "5", False)] * 3
        assert not controller.coordinator.fleet.published_by
        assert (await fleet.publish(6))[:2] == ("published", [])
        assert await fleet.held("engine") == [(6, "6", False)] * 3


async def test_engine_is_completed_before_the_next_version_pauses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank with a blocked main loop would otherwise keep the next pause from reaching the other ranks."""
    told: list[str] = []
    send = AgentSession.send

    async def record(session: AgentSession, frame: Any, **deadline: float) -> None:
        if isinstance(frame, Envelope) and isinstance(frame.command, Publish | Pause):
            told.append(f"{session.peer} {type(frame.command).__name__} {frame.epoch}")
        await send(session, frame, **deadline)

    async with serving_version_1(UpdateMode.IN_PLACE) as (_, fleet):
        with monkeypatch.context() as patch:
            cut_off(patch, "engine/1", at=Publish, answered=False)
            assert (await fleet.publish(5)).outcome == "RoundAborted"
        monkeypatch.setattr(AgentSession, "send", record)
        assert (await fleet.publish(6))[:2] == ("published", [])
        kinds = [line.split()[:2] for line in told]
        completed = kinds[: kinds.index(["engine/0", "Pause"])]
        assert completed == [[f"engine/{i}", "Publish"] for i in (1, 2, 0)]
        assert await fleet.held("engine") == [(6, "6", False)] * 3
