"""Engines pass verified bytes on, in real processes: same bytes, fewer of them from the trainers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from needs import need_transport
from weight_fleet import running_fleet
from weight_rank import model_nbytes

from windlass.config import (
    ControlConfig,
    P2pBackend,
    PhaseDeadlines,
    RelayShape,
    UpdateMode,
)

NUM_TRAINERS = 2
CHUNK = 4096
SCALE = 8
NBYTES = model_nbytes(SCALE)


def fleet_of(
    shape: RelayShape,
    mode: UpdateMode,
    num_engines: int,
    *,
    transport: str = "cma",
    write_s: float = 20.0,
    chunk_nbytes: int = CHUNK,
) -> AbstractAsyncContextManager[Any]:
    config = ControlConfig(
        mode=mode,
        backend=P2pBackend(relay=shape, relay_chunk_nbytes=chunk_nbytes),
        deadlines=PhaseDeadlines(connect_s=30, write_s=write_s, fleet_s=30),
        min_engines=num_engines,
        max_rewrites=1,
    )
    return running_fleet(config, NUM_TRAINERS, scale=SCALE, transport=transport, can_send=True)


@pytest.mark.parametrize(
    ("shape", "mode", "num_engines"),
    [
        (RelayShape.TREE, UpdateMode.STAGED, 5),
        pytest.param(RelayShape.CHAIN, UpdateMode.IN_PLACE, 2, marks=pytest.mark.long),
        pytest.param(RelayShape.CHAIN, UpdateMode.STAGED, 3, marks=pytest.mark.long),
        pytest.param(RelayShape.TREE, UpdateMode.IN_PLACE, 2, marks=pytest.mark.long),
        pytest.param(RelayShape.AUTO, UpdateMode.IN_PLACE, 8, marks=pytest.mark.long),
    ],
)
async def test_trainers_send_one_copy_and_every_engine_has_every_byte(
    shape: RelayShape, mode: UpdateMode, num_engines: int
) -> None:
    async with fleet_of(shape, mode, num_engines) as fleet:
        fleet.add_trainers()
        names = [f"engine{i}" for i in range(num_engines)]
        for name in names:
            fleet.add_engine(name)
        await fleet.ready()
        for version in range(2):
            assert await fleet.publish(version) == ("published", [], NBYTES)
            for name in names:
                assert await fleet.held(name) == [(version, str(version), False)]
        assert await fleet.relayed() == 2 * (num_engines - 1) * NBYTES


async def test_engines_relay_over_mooncake() -> None:
    need_transport("mooncake")
    async with fleet_of(RelayShape.TREE, UpdateMode.STAGED, 3, transport="mooncake") as fleet:
        fleet.add_trainers()
        for i in range(3):
            fleet.add_engine(f"engine{i}")
        await fleet.ready()
        for version in range(2):
            assert await fleet.publish(version) == ("published", [], NBYTES)
            for i in range(3):
                assert await fleet.held(f"engine{i}") == [(version, str(version), False)]


@pytest.mark.long
async def test_engines_of_another_layout_are_written_by_the_trainers() -> None:
    async with fleet_of(RelayShape.CHAIN, UpdateMode.STAGED, 5) as fleet:
        fleet.add_trainers()
        for name, num_ranks in (("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 3)):
            fleet.add_engine(name, num_ranks)
        await fleet.ready()
        # Trainers send one copy for each layout: one, two and three ranks.
        outcome, left_out, nbytes = await fleet.publish(0)
        assert (outcome, left_out) == ("published", [])
        assert 3 * NBYTES <= nbytes < 3.1 * NBYTES
        for name, num_ranks in (("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 3)):
            assert await fleet.held(name) == [(0, "0", False)] * num_ranks


@pytest.mark.parametrize(
    "mode", [UpdateMode.IN_PLACE, pytest.param(UpdateMode.STAGED, marks=pytest.mark.long)]
)
async def test_a_relay_killed_during_an_update_is_the_only_engine_left_out(
    mode: UpdateMode,
) -> None:
    async with fleet_of(RelayShape.CHAIN, mode, 4) as fleet:
        fleet.add_trainers()
        for i in range(4):
            # The first engine in the chain writes most. The other engines do not reach the fifth
            # write.
            fleet.add_engine(f"engine{i}", fault="kill:5")
        await fleet.ready()
        outcome, left_out, nbytes = await fleet.publish(0)
        dead = next(n for n, ranks in fleet.engines.items() if not ranks[0].process.is_alive())
        assert (outcome, left_out) == ("published", [dead])
        # The trainers complete the engines behind the dead one.
        assert nbytes > NBYTES
        for name in set(fleet.engines) - {dead}:
            assert await fleet.held(name) == [(0, "0", False)]


async def test_a_relay_does_not_forward_corrupted_bytes() -> None:
    async with fleet_of(RelayShape.CHAIN, UpdateMode.IN_PLACE, 3) as fleet:
        fleet.add_trainers()
        for i in range(3):
            fleet.add_engine(f"engine{i}", fault="spoil:4")
        await fleet.ready()
        outcome, left_out, _ = await fleet.publish(0)
        assert (outcome, left_out) == ("published", [])
        for i in range(3):
            assert await fleet.held(f"engine{i}") == [(0, "0", False)]


@pytest.mark.long
async def test_a_stopped_relay_and_its_destination_are_left_out() -> None:
    async with fleet_of(RelayShape.CHAIN, UpdateMode.STAGED, 3, write_s=8.0) as fleet:
        fleet.add_trainers()
        for i in range(3):
            fleet.add_engine(f"engine{i}", fault="stop:3")
        await fleet.ready()
        outcome, left_out, _ = await fleet.publish(0)
        assert outcome == "published", left_out
        # These are the first engine of the chain and the engine that it was writing.
        assert len(left_out) == 2
        (last,) = set(fleet.engines) - set(left_out)
        assert await fleet.held(last) == [(0, "0", False)]


@pytest.mark.parametrize(
    ("shape", "arena_nbytes", "chunk_nbytes"),
    [
        # With one chunk per link, one of the two roots of the tree expects nothing.
        (RelayShape.TREE, 1024, 4 << 20),
        pytest.param(RelayShape.TREE, 1 << 24, 4 << 20, marks=pytest.mark.long),
        pytest.param(RelayShape.TREE, 1024, CHUNK, marks=pytest.mark.long),
        pytest.param(RelayShape.CHAIN, 1024, CHUNK, marks=pytest.mark.long),
        pytest.param(RelayShape.CHAIN, 0, 4 << 20, marks=pytest.mark.long),
    ],
)
async def test_every_engine_is_written_with_any_arena_and_chunk_size(
    shape: RelayShape, arena_nbytes: int, chunk_nbytes: int
) -> None:
    async with fleet_of(shape, UpdateMode.STAGED, 3, chunk_nbytes=chunk_nbytes) as fleet:
        fleet.add_trainers(arena_nbytes=arena_nbytes)
        for i in range(3):
            # Links of row-parallel layers are packed.
            fleet.add_engine(f"engine{i}", 2)
        await fleet.ready()
        for version in range(3):
            outcome, left_out, nbytes = await fleet.publish(version)
            assert (outcome, left_out) == ("published", [])
            assert nbytes >= NBYTES
            for i in range(3):
                assert await fleet.held(f"engine{i}") == [(version, str(version), False)] * 2


async def test_a_trainer_killed_during_a_relay_ends_the_round() -> None:
    async with fleet_of(RelayShape.CHAIN, UpdateMode.STAGED, 3) as fleet:
        fleet.add_trainers(fault="kill:3")
        for i in range(3):
            fleet.add_engine(f"engine{i}")
        await fleet.ready()
        fleet.trainers[0].tell(0)
        outcome, reasons, _ = await fleet.trainers[1].ask(0)
        assert outcome == "RoundAborted"
        assert "trainer/0" in reasons[0]
        for i in range(3):
            assert await fleet.held(f"engine{i}") == [(-1, "untouched", False)]
