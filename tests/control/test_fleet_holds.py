"""Tests which ranks a fleet admits together, and which unanswered writes block an engine."""

from __future__ import annotations

import msgspec
import pytest
from fake_agents import fake_hello

from windlass.control.fleet import Agent, Fleet
from windlass.control.journal import MAX_QUARANTINED
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.net.messages import MustWait, RoundId
from windlass.transfer.bindings import LinkOutcome, LinkStatus, Written


def admit(
    fleet: Fleet, group: str, rank: int, world_size: int, role: Role, job: str = "", epoch: int = 0
) -> Agent:
    worker = f"{group}/{rank}"
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("p", nbytes=96, dtype=DType.FLOAT32)
    builder.add_shard("weight", (4, 6), Box((0, 0), (4, 6)), "p")
    hello = fake_hello(
        builder.build(),
        group=group,
        rank=rank,
        world_size=world_size,
        incarnation=f"{worker} of {world_size}",
        job=job,
    )
    return fleet.admit(msgspec.structs.replace(hello, epoch=epoch))


@pytest.mark.parametrize(("world_size", "writable"), [(1, ["a"]), (2, [])])
def test_a_silent_rank_blocks_engines_until_the_job_has_another_mesh(
    world_size: int, writable: list[str]
) -> None:
    fleet = Fleet()
    engine = admit(fleet, "a", 0, 1, Role.ENGINE)
    trainers = [admit(fleet, "trainer", rank, 2, Role.TRAINER) for rank in range(2)]
    fleet.hold(trainers[1].identity, RoundId(1, 1), frozenset({engine.identity}))
    for trainer in trainers:
        fleet.remove(trainer)
    assert fleet.writable_engines() == ()
    admit(fleet, "trainer", 0, world_size, Role.TRAINER)
    assert [group.name for group in fleet.writable_engines()] == writable


def test_a_new_mesh_does_not_release_the_destination_of_a_donor() -> None:
    fleet = Fleet()
    newcomer, donor = (admit(fleet, name, 0, 1, Role.ENGINE) for name in ("a", "b"))
    fleet.hold(donor.identity, RoundId(1, 1), frozenset({newcomer.identity}))
    admit(fleet, "trainer", 0, 2, Role.TRAINER)
    assert [group.name for group in fleet.writable_engines()] == ["b"]


def test_an_engine_that_waits_for_an_answer_names_the_rank_that_owes_it() -> None:
    fleet = Fleet()
    engine, other = (admit(fleet, name, 0, 1, Role.ENGINE) for name in ("a", "b"))
    trainer = admit(fleet, "trainer", 0, 1, Role.TRAINER)
    assert [state.reason for state in fleet.states()] == ["", ""]
    fleet.hold(trainer.identity, RoundId(1, 1), frozenset({engine.identity}))
    waiting, free = fleet.states()
    assert (
        waiting.reason
        == "trainer/0: no answer to a write command; bytes of the write may still arrive"
    )
    assert (free.name, free.reason) == (other.hello.group, "")
    fleet.release(trainer.identity)
    assert [state.reason for state in fleet.states()] == ["", ""]


def test_a_rank_waits_until_every_rank_of_a_job_that_was_replaced_has_left() -> None:
    fleet = Fleet()
    old = [admit(fleet, "trainer", rank, 2, Role.TRAINER, "old") for rank in range(2)]
    fleet.replace_job("new")
    fleet.remove(old[1])
    with pytest.raises(
        MustWait, match="must wait until the ranks of job 'old' have left: trainer/0"
    ):
        admit(fleet, "trainer", 1, 2, Role.TRAINER, "new")
    fleet.remove(old[0])
    assert admit(fleet, "trainer", 1, 2, Role.TRAINER, "new").hello.job == "new"


UNKNOWN = Written((LinkOutcome("a/0", LinkStatus.UNKNOWN, 0, ""),), 0.0, 0.0)


@pytest.mark.parametrize(("epoch_of_writer", "quarantined"), [(0, False), (2, False), (3, True)])
def test_only_participants_settle_the_writes_of_an_earlier_controller(
    epoch_of_writer: int, quarantined: bool
) -> None:
    """An engine that joins again must not get other engines left out with an unrequested answer."""
    fleet = Fleet()
    target = admit(fleet, "a", 0, 1, Role.ENGINE, epoch=2)
    writer = admit(fleet, "evil", 0, 1, Role.ENGINE, epoch=epoch_of_writer)
    fleet.note_first_epoch(5)
    assert fleet.settle(writer.identity, RoundId(3, 7), 7, UNKNOWN) is quarantined
    assert not fleet.settle(writer.identity, RoundId(0, 0), 7, UNKNOWN)
    assert (target.identity in fleet.quarantined) is quarantined


def test_the_number_of_absent_quarantined_engines_is_bounded() -> None:
    fleet = Fleet()
    writer = admit(fleet, "trainer", 0, 1, Role.TRAINER, epoch=3)
    fleet.note_first_epoch(5)
    for start in range(0, 2 * MAX_QUARANTINED, 1024):
        links = (
            LinkOutcome(f"x{number}/0", LinkStatus.UNKNOWN, 0, "")
            for number in range(start, start + 1024)
        )
        fleet.settle(writer.identity, RoundId(3, 1), 1, Written(tuple(links), 0.0, 0.0))
    assert len(fleet.quarantine_on_return) == MAX_QUARANTINED
    agent = admit(fleet, f"x{2 * MAX_QUARANTINED - 1}", 0, 1, Role.ENGINE, epoch=3)
    assert agent.quarantined


def test_the_fleet_names_missing_weights_and_ranks() -> None:
    """A process may connect, and log that, before it announces its weights."""
    fleet = Fleet()
    assert list(fleet.missing(2, ["a", "b"]).values()) == [
        *("weights of trainers (0 of 2 ranks)", "a", "b")
    ]
    admit(fleet, "trainer", 0, 2, Role.TRAINER)
    admit(fleet, "a", 0, 1, Role.ENGINE)
    admit(fleet, "b", 1, 2, Role.ENGINE)
    assert fleet.missing(2, ["a", "b"]) == {
        "trainers": "weights of trainers (1 of 2 ranks)",
        "b": "b (1 of 2 ranks)",
    }
    admit(fleet, "trainer", 1, 2, Role.TRAINER)
    admit(fleet, "b", 0, 2, Role.ENGINE)
    assert fleet.missing(2, ["a", "b"]) == {}
