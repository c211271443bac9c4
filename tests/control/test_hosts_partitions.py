"""The network parts in every phase of an update and heals in time, late, or never."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from host_fleet import HOSTS, TRANSPORT, Fleet, Refused, fleet_on
from hosts import Host, Network, why_no_hosts

from windlass.config import UpdateMode

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]
TO_TRAINERS = {"Prepare", "Write"}
PHASES = ("Prepare", "Pause", "Write", "Verify", "Apply", "Publish")
SHORT_S = 0.6
TOLD_S = 40.0
"""Seconds that a trainer waits for the outcome, more than all phases of a round."""
BEFORE_DELIVERY = {
    UpdateMode.STAGED: {"Prepare", "Write"},
    UpdateMode.IN_PLACE: {"Prepare", "Pause", "Write"},
}
SLOW_BIT_S = 20_000_000
"""Rate at which two megabytes take most of a second."""
MID_WRITE_S = 0.4
NIXL = '{"type": "nixl", "wire": "tcp", "device": "rail0"}'


async def part_in(fleet: Fleet, command: str, host: str, towards: tuple[str, ...]) -> Any:
    """Publish, cut `host` off in the phase of `command`, and return the trainer's pending answer."""
    holder = fleet.members["trainer0" if command in TO_TRAINERS else "a"]
    await holder.ask("arm", command)
    told = fleet.begin(deadline_s=TOLD_S)
    await holder.event("reached")
    fleet.network.isolate(host, towards=towards)
    await holder.ask("go")
    return told


async def outcome(told: Any) -> tuple[str, Any]:
    async with asyncio.timeout(TOLD_S + 10):
        (answer,) = await told
    if isinstance(answer, Refused):
        return answer.name, answer.text
    if isinstance(answer, BaseException):
        raise answer
    return "published", answer["left_out"]


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_short_partition_in_any_phase_costs_only_time(mode: UpdateMode) -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, mode) as fleet:
            for host in ("a", "trainer"):
                for command in PHASES:
                    told = await part_in(fleet, command, host, ())
                    # The partition lasts this long.
                    await asyncio.sleep(SHORT_S)
                    network.heal()
                    assert await outcome(told) == ("published", []), (host, command)
                    await fleet.serves(["a", "b"])


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize(
    "towards", [(), ("control",), ("trainer",)], ids=["all", "control", "data"]
)
async def test_an_engine_partitioned_in_any_phase_is_left_out_and_comes_back(
    mode: UpdateMode, towards: tuple[str, ...]
) -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, mode) as fleet:
            for command in PHASES:
                told = await part_in(fleet, command, "a", towards)
                data_only = towards == ("trainer",)
                needed = not data_only or command in BEFORE_DELIVERY[mode]
                left_out = ["a"] if needed else []
                assert await outcome(told) == ("published", left_out), command
                # `state` also checks that the engine served no mixed weights.
                await fleet.state("a")
                # If only data is cut off, the other engine may have brought this one up.
                if not data_only:
                    await fleet.serves(["b"])
                network.heal()
                await whole_again(fleet)


async def whole_again(fleet: Fleet) -> None:
    """Publish until both engines serve. A cut connection may be noticed only after a heartbeat."""
    for _ in range(4):
        await fleet.complete(["a", "b"])
        if await fleet.publish() == []:
            break
    await fleet.serves(["a", "b"])


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_partitioned_trainer_fails_by_its_deadline_and_engines_serve_nothing_torn(
    mode: UpdateMode,
) -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, mode) as fleet:
            for command in ("Write", "Publish"):
                before = fleet.version
                told = await part_in(fleet, command, "trainer", ())
                name, text = await outcome(told)
                assert name in {"PeerTimeout", "RoundAborted"}, (command, name, text)
                if command not in BEFORE_DELIVERY[mode]:
                    await fleet.serves(["a", "b"])
                elif mode is UpdateMode.STAGED:
                    await fleet.serves(["a", "b"], before)
                else:
                    # The engines may hold parts of two versions, so they stay paused until they are
                    # written.
                    await fleet.serves([], before)
                    for engine in ("a", "b"):
                        state = await fleet.state(engine)
                        assert (state["served"], state["paused"]) == (before, True), state
                network.heal()
                assert await fleet.publish() == []
                await fleet.serves(["a", "b"])


async def cut_in_mid_write(fleet: Fleet, host: str, towards: tuple[str, ...]) -> Any:
    """Cut `host` off while bytes are under way, and return the trainer's pending answer."""
    trainer = fleet.members["trainer0"]
    await trainer.ask("arm", "Write")
    told = fleet.begin(deadline_s=TOLD_S)
    await trainer.event("reached")
    await trainer.ask("go")
    await asyncio.sleep(MID_WRITE_S)
    fleet.network.isolate(host, towards=towards)
    return told


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_bytes_of_an_interrupted_write_reach_no_later_version(mode: UpdateMode) -> None:
    with Network(HOSTS, rate_bit_s=SLOW_BIT_S) as network:
        async with fleet_on(network, mode) as fleet:
            told = await cut_in_mid_write(fleet, "a", ("trainer",))
            assert await outcome(told) == ("published", ["a"])
            await fleet.publish()
            await fleet.serves(["b"])
            network.heal()
            for _ in range(2):
                await fleet.publish()
                await fleet.serves(["b"])
                await fleet.state("a")
            # The controller cannot tell whether a late write still reaches it, so it needs a new
            # process.
            await fleet.end("a")
            await fleet.start_engine("a")
            await fleet.ready("a")
            await fleet.serves(["a", "b"])
            assert await fleet.publish() == []
            await fleet.serves(["a", "b"])


@pytest.mark.parametrize("transport", [TRANSPORT, NIXL], ids=["mooncake", "nixl"])
@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_bytes_in_the_kernel_of_a_dead_trainer_reach_no_later_version(
    mode: UpdateMode, transport: str
) -> None:
    with Network((*HOSTS, "other"), rate_bit_s=SLOW_BIT_S) as network:
        async with fleet_on(network, mode, transport=transport) as fleet:
            told = await cut_in_mid_write(fleet, "trainer", ("a", "b"))
            assert orphans(network.host("trainer")) > 0
            await fleet.end("trainer0")
            await asyncio.gather(told, return_exceptions=True)
            assert orphans(network.host("trainer")) > 0, "its kernel must still be sending"
            await fleet.start_trainers(host="other")
            await fleet.ready("trainer0")
            assert await fleet.publish() == []
            await fleet.serves(["a", "b"])
            network.heal()
            async with asyncio.timeout(120):
                while orphans(network.host("trainer")):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.5)
            await fleet.serves(["a", "b"])
            assert await fleet.publish() == []
            await fleet.serves(["a", "b"])


def orphans(host: Host) -> int:
    """Return the number of the host's TCP connections with sent bytes that are not acknowledged."""
    rows = host.run("cat", "/proc/net/tcp").splitlines()[1:]
    return sum(int(row.split()[4].partition(":")[0], 16) > 0 for row in rows)
