"""An engine fails while it brings a new engine up, with real processes and real memory."""

from __future__ import annotations

import asyncio

import pytest
from weight_fleet import TOKEN, Fleet, Rank

import windlass
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

DEADLINES = PhaseDeadlines(connect_s=20, write_s=6, fleet_s=30)
WAIT_S = 90.0


@pytest.mark.parametrize(
    ("mode", "fault", "left"),
    [
        (UpdateMode.IN_PLACE, "tear:1", {"second", "newcomer"}),
        (UpdateMode.STAGED, "spoil:1", {"first", "second", "newcomer"}),
    ],
)
async def test_a_newcomer_catches_up_from_another_engine_when_its_source_fails(
    mode: UpdateMode, fault: str, left: set[str]
) -> None:
    config = ControlConfig(mode=mode, deadlines=DEADLINES, max_rewrites=0)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        fleet = Fleet(controller.url, 1, can_send=True)
        try:
            # The controller asks the engine that connected first.
            fleet.add_engine("first", fault=fault)
            assert await fleet.engines["first"][0].read() == "ready"
            fleet.add_engine("second")
            assert await fleet.engines["second"][0].read() == "ready"
            fleet.add_trainers()
            assert await fleet.trainers[0].read() == "ready"
            assert (await fleet.publish(5))[:2] == ("published", [])
            coordinator = controller.coordinator
            whole = asyncio.Event()

            def look() -> None:
                if {engine.name for engine in coordinator.routable()} == left:
                    whole.set()

            coordinator.subscribe(look)
            fleet.add_engine("newcomer")
            newcomer: Rank = fleet.engines["newcomer"][0]
            assert await newcomer.read() == "ready"
            async with asyncio.timeout(WAIT_S):
                await whole.wait()
            # An engine reports that it serves before the controller routes rollouts to it.
            assert await fleet.held("newcomer") == [(5, "5", False)]
            assert coordinator.num_updates == 1, "a trainer got a command"
        finally:
            fleet.close()
