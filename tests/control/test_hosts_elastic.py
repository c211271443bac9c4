"""Engines leave, join and return, and trainers change their mesh: the other engines keep
generating.
"""

from __future__ import annotations

import pytest
from host_fleet import HOSTS, Fleet, Refused, fleet_on
from hosts import Line, Network, why_no_hosts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]


async def pauses(fleet: Fleet, *names: str) -> list[int]:
    """Return the number of pauses of each engine."""
    return [(await fleet.state(name))["num_pauses"] for name in names]


async def test_an_engine_joins_from_a_peer_without_a_pause_and_leaves_and_comes_back() -> None:
    with Network((*HOSTS, "c")) as network:
        network.everywhere(Line(delay_s=0.005))
        async with fleet_on(network) as fleet:
            reports = (await fleet.status())["status"]["updates"]
            before = await pauses(fleet, "a", "b")
            await fleet.start_engine("c")
            await fleet.ready("c")
            await fleet.serves(["a", "b", "c"])
            assert await pauses(fleet, "a", "b") == before, "another engine was paused"
            assert (await fleet.status())["status"]["updates"] == reports, "a trainer got a command"
            assert await fleet.publish() == []
            await fleet.serves(["a", "b", "c"])
            before = await pauses(fleet, "a", "b")
            # This is a preemption without notice.
            await fleet.end("c")
            await fleet.serves(["a", "b"])
            # The new process has the same name and address.
            await fleet.start_engine("c")
            await fleet.ready("c")
            await fleet.serves(["a", "b", "c"])
            assert await pauses(fleet, "a", "b") == before
            assert await fleet.publish() == []
            await fleet.serves(["a", "b", "c"])


async def test_a_silent_host_is_left_out_and_its_successor_catches_up() -> None:
    with Network((*HOSTS, "c")) as network:
        async with fleet_on(network) as fleet:
            # This is a preemption of the whole host: no connection is closed.
            network.isolate("a")
            await fleet.serves(["b"])
            assert await fleet.publish() == []
            await fleet.end("a")
            # The same engine starts on another host.
            await fleet.start_engine("a", "c")
            await fleet.ready("a")
            await fleet.serves(["a", "b"])
            assert await fleet.publish() == []
            await fleet.serves(["a", "b"])


async def test_an_engine_that_dies_during_an_update_comes_back_on_its_address() -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network) as fleet:
            for command in ("Verify", "Apply", "Publish"):
                await fleet.members["a"].ask("arm", command)
                told = fleet.begin()
                await fleet.members["a"].event("reached")
                await fleet.end("a")
                (answer,) = await told
                assert answer["left_out"] == ["a"]
                await fleet.serves(["b"])
                await fleet.start_engine("a")
                await fleet.ready("a")
                await fleet.serves(["a", "b"])


@pytest.mark.parametrize("dies_in_mid_write", [False, True])
async def test_trainers_come_back_with_another_mesh_and_engines_do_not_restart(
    dies_in_mid_write: bool,
) -> None:
    with Network((*HOSTS, "other")) as network:
        async with fleet_on(network, num_trainers=2) as fleet:
            incarnations = {name: fleet.members[name] for name in ("a", "b")}
            for parts, host in ((1, "other"), (3, "trainer")):
                told = None
                if dies_in_mid_write:
                    for trainer in fleet.trainers:
                        await trainer.ask("arm", "Write")
                    told = fleet.begin()
                    for trainer in fleet.trainers:
                        await trainer.event("reached")
                for trainer in fleet.trainers:
                    await fleet.end(trainer.name)
                if told is not None:
                    answers = await told
                    assert all(isinstance(a, ConnectionError | Refused) for a in answers)
                await fleet.start_trainers(parts, host)
                for trainer in fleet.trainers:
                    await fleet.ready(trainer.name)
                await fleet.complete(["a", "b"], parts)
                assert await fleet.publish() == []
                await fleet.serves(["a", "b"])
            assert {name: fleet.members[name] for name in ("a", "b")} == incarnations
