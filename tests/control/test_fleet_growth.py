"""The controller's cost per rank (messages, bytes, links, objects) does not grow with the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_fleet import CONTROLLER, ENGINE_RANKS, SimulatedFleet, topology_of

MAX_GROWTH = 1.6
"""Highest growth of a figure per rank between two fleets, the second with twice as many ranks.

Measured: 1.0 to 1.45. It would be 1.8 to 1.95 if every rank were told about, or linked to, every
other rank. Small fleets grow faster than large fleets, because a new engine reads from more of a
small fleet.
"""
Figures = dict[str, float]


def figures_of(num_trainers: int, num_engines: int, folder: Path) -> Figures:
    """Return the figures per rank while engines join in turn and the controller restarts once."""
    folder.mkdir()
    fleet = SimulatedFleet(topology_of(num_trainers, num_engines), folder)
    num_ranks = num_trainers + num_engines * ENGINE_RANKS
    found: Figures = {}

    def note(what: str) -> None:
        _, messages, nbytes = fleet.meter.take(CONTROLLER)
        found[f"{what}: messages"] = messages / num_ranks
        found[f"{what}: bytes"] = nbytes / num_ranks

    async def run() -> None:
        await fleet.start_controller()
        fleet.start_trainers()
        await fleet.start_engines(every_s=0.5)
        await fleet.settled()
        note("connect")
        assert fleet.coordinator.connector.binding is not None
        found["links"] = len(fleet.coordinator.connector.binding.links) / num_ranks
        found["objects"] = fleet.held()[1].total() / num_ranks
        await fleet.publish(0)
        note("first update")
        await fleet.kill_controller()
        await fleet.start_controller()
        await fleet.settled()
        note("the controller starts again")

    with fleet.simulated():
        fleet.loop.run_until_complete(run())
    return found


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    folder = tmp_path_factory.mktemp("fleets")
    small, large = (figures_of(32 * n, 16 * n, folder / str(n)) for n in (1, 2))
    return {what: large[what] / small[what] for what in small}


@pytest.mark.parametrize(
    "what",
    [
        "connect: messages",
        "connect: bytes",
        "links",
        "objects",
        "first update: messages",
        "first update: bytes",
        "the controller starts again: messages",
        "the controller starts again: bytes",
    ],
)
@pytest.mark.long
def test_the_cost_of_a_rank_does_not_grow_with_the_fleet(growth: Figures, what: str) -> None:
    assert growth[what] < MAX_GROWTH, growth
