"""An engine that does not answer or does not fit loses only its own place.

Status names it and the reason.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_agents import (
    FakeEngineRank,
    FakeTrainerRank,
    engine_manifest,
    fake_hello,
    trainer_manifest,
)
from fake_fleet import TOKEN, FakeFleet

from windlass.config import ControlConfig, PhaseDeadlines, XcclBackend
from windlass.control import engine_channel
from windlass.control.connect_messages import ConnectEngine, ConnectTrainer, Offered
from windlass.control.engine_channel import report_cannot_join
from windlass.control.group_messages import JoinGroups
from windlass.control.messages import Command, Done, Pause, Publish, Result, Verified, Verify
from windlass.control.report import RoundOutcome
from windlass.control.routes import status_of
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable
from windlass.transfer.bindings import GroupOffer

WITHIN_S = 20.0


async def until(rig: FakeFleet, holds: Callable[[], bool]) -> None:
    await rig.coordinator.changes.until(holds, WITHIN_S, lambda: "the fleet did not get there")


def engine_of(rig: FakeFleet, name: str) -> dict[str, Any]:
    engines: Any = status_of(rig.coordinator)["engines"]
    return next(each for each in engines if each["name"] == name)


class Stuck:
    """Handler that hangs in the first command of a kind until the test releases it."""

    def __init__(self, kind: type[Command]) -> None:
        self._kind, self.num_asked = kind, 0
        self.released = threading.Event()

    def __call__(self, command: Command) -> None:
        if isinstance(command, self._kind):
            self.num_asked += 1
            self.released.wait(WITHIN_S)


@pytest.mark.parametrize("kind", [ConnectEngine, Pause])
async def test_rounds_wait_once_for_a_silent_engine_and_take_it_back_when_it_answers(
    kind: type[Command],
) -> None:
    stuck = Stuck(kind)
    deadlines = PhaseDeadlines(connect_s=0.5, pause_s=0.5, prepare_s=0.5)
    async with FakeFleet(ControlConfig(deadlines=deadlines)) as rig:
        await rig.start({"a": 1})
        (silent,) = await rig.add_engine("b", on_command=stuck)
        for version in range(3):
            report = await rig.publish(version)
            assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",))
        assert stuck.num_asked == 1
        status = engine_of(rig, "b")
        assert not status["routable"]
        assert "b/0" in status["reason"]
        assert "no answer" in status["reason"]
        stuck.released.set()
        await until(rig, lambda: len(rig.coordinator.fleet.writable_engines()) == 2)
        assert (await rig.publish(3)).engines == ("a", "b")
        assert engine_of(rig, "b")["reason"] == ""
        assert silent.live_versions == {3}


async def test_a_silent_engine_gets_no_traffic_and_is_no_source_for_newcomers() -> None:
    armed, released = threading.Event(), threading.Event()

    def stuck(command: Command) -> None:
        if armed.is_set():
            released.wait(WITHIN_S)

    async with FakeFleet(ControlConfig(deadlines=PhaseDeadlines(connect_s=0.5))) as rig:
        await rig.start({"a": 1})
        await rig.add_engine("b", on_command=stuck)
        await rig.publish(0)
        assert rig.routable == {"a": 0, "b": 0}
        armed.set()
        await asyncio.to_thread(rig.channels.pop("trainer/1").close)
        # A new trainer process makes the controller bind all ranks.
        await rig.add_trainer(1, incarnation="second")
        await until(rig, lambda: rig.routable == {"a": 0})
        assert [
            group.name
            for group in filter(rig.coordinator.fleet.serves, rig.coordinator.fleet.engines())
        ] == ["a"]
        released.set()
        await until(rig, lambda: rig.routable == {"a": 0, "b": 0})


async def test_an_engine_that_always_binds_late_is_refused_with_the_reason_in_status() -> None:
    gate = threading.Semaphore(0)

    def slow(command: Command) -> None:
        if isinstance(command, ConnectEngine):
            gate.acquire(timeout=WITHIN_S)

    async with FakeFleet(ControlConfig(deadlines=PhaseDeadlines(connect_s=0.3))) as rig:
        await rig.start({"a": 1})
        await rig.add_engine("b", on_command=slow)
        agent = rig.coordinator.fleet.find("b/0")
        assert agent is not None
        for num_late in (1, 2):
            await until(rig, lambda: agent.num_late == num_late)  # noqa: B023
            gate.release()
        await until(rig, lambda: bool(status_of(rig.coordinator)["refused"]))
        refused: Any = status_of(rig.coordinator)["refused"]
        assert list(refused) == ["b"]
        assert "b/0 did not bind the plan: b/0: no answer within 0.3 s" in refused["b"]
        assert (await rig.publish(0)).engines == ("a",)
        gate.release()


class GroupTrainer:
    """Trainer rank that offers a group of all its engines and enters any group."""

    def __init__(self, rank: FakeTrainerRank) -> None:
        self._rank = rank

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        result = self._rank.handle(command, epoch=epoch, round_number=round_number)
        if isinstance(command, ConnectTrainer):
            members = (self._rank.worker, *(binding.worker for binding in command.bindings))
            offer = GroupOffer(self._rank.worker, members, "127.0.0.1", 1, (), (64,))
            return Offered(offer)
        return result


@pytest.mark.parametrize("how", ["refuses", "answers nothing"])
async def test_an_engine_that_does_not_enter_a_group_is_the_only_engine_left_out(how: str) -> None:
    hung = threading.Event()

    def late(command: Command) -> None:
        """Time out, as every member does when one does not enter the group."""
        if isinstance(command, JoinGroups) and any("b/0" in o.members for o in command.offers):
            raise PeerTimeout("not all came")

    def misfit(command: Command) -> None:
        if isinstance(command, JoinGroups):
            if how == "refuses":
                raise ConfigError("fabric nccl needs a CUDA device, none was found")
            hung.wait(WITHIN_S)

    config = ControlConfig(backend=XcclBackend(), deadlines=PhaseDeadlines(connect_s=0.5))
    async with FakeFleet(config) as rig:
        await rig.add_engine("a", on_command=late)
        await rig.add_engine("b", on_command=misfit)
        for index in range(2):
            rank = FakeTrainerRank(f"trainer/{index}", rig.fabric, on_command=late)
            manifest = trainer_manifest(rank.worker, index, 2)
            hello = fake_hello(manifest, group="trainer", rank=index, world_size=2)
            rig.trainers[rank.worker] = rank
            await rig.connect(hello, GroupTrainer(rank))
        report = await rig.publish(0)
        assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",)), report.reason
        status: Any = status_of(rig.coordinator)
        if how == "refuses":
            assert "fabric nccl needs a CUDA device" in status["refused"]["b"]
        else:
            assert "no answer" in engine_of(rig, "b")["reason"]
        hung.set()


async def test_status_shows_the_reason_of_a_left_out_engine_until_it_serves_again() -> None:
    once = iter([Verified(("trainer/9",))])

    class Wrong:
        def __init__(self, rank: FakeEngineRank) -> None:
            self._rank = rank

        def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
            result = self._rank.handle(command, epoch=epoch, round_number=round_number)
            return next(once, result) if isinstance(command, Verify) else result

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        rank = FakeEngineRank("b/0", 2)
        rig.fabric.ranks["b/0"] = rank
        await rig.connect(fake_hello(engine_manifest("b/0", 2), group="b"), Wrong(rank))
        assert (await rig.publish(0)).engines == ("a",)
        assert engine_of(rig, "b")["reason"] == (
            "b/0 reported wrong bytes from workers without a link to this rank; it waits for the next version, because no "
            "engine can send it version 0: a cannot send its weights"
        )
        assert (await rig.publish(1)).engines == ("a", "b")
        assert engine_of(rig, "b")["reason"] == ""


async def test_the_controller_escapes_an_engines_own_reason() -> None:
    async with FakeFleet() as rig:
        said = "no kernel\x1b[2J\n2026-11-22 controller INFO all is well"
        await asyncio.to_thread(report_cannot_join, rig.server.url, TOKEN, "b", said)
        refused: Any = status_of(rig.coordinator)["refused"]
        assert refused == {"b": r"no kernel\x1b[2J\n2026-11-22 controller INFO all is well"}


def test_a_report_to_a_silent_controller_names_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_channel, "CANNOT_JOIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            PeerUnreachable, match=f"did not reach controller {url}: no answer within 0.2 s$"
        ):
            report_cannot_join(url, TOKEN, "b", "no kernel")


@pytest.mark.parametrize("kind", [ConnectEngine, Verify])
async def test_the_controller_shortens_long_reasons_of_engines(
    kind: type[Command],
) -> None:
    def failing(command: Command) -> None:
        if isinstance(command, kind):
            raise ConfigError("x" * 1_000_000)

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.add_engine("b", on_command=failing)
        report = await rig.publish(0)
        assert report.engines == ("a",)
        status: Any = status_of(rig.coordinator)
        kept = [*report.left_out.values(), *status["refused"].values()]
        assert any("xxx" in reason for reason in kept)
        assert all(len(reason) < 3000 for reason in kept)


async def test_the_controller_shortens_the_reason_of_a_failed_resume() -> None:
    class Paused:
        def __init__(self, rank: FakeEngineRank) -> None:
            self._rank = rank

        def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
            result = self._rank.handle(command, epoch=epoch, round_number=round_number)
            return Done(not_resumed="y" * 1_000_000) if isinstance(command, Publish) else result

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        rank = FakeEngineRank("b/0", 2)
        rig.fabric.ranks["b/0"] = rank
        await rig.connect(fake_hello(engine_manifest("b/0", 2), group="b"), Paused(rank))
        await rig.publish(0)
        assert engine_of(rig, "b")["state"] == "not resumed"
        assert 0 < len(engine_of(rig, "b")["reason"]) < 3000
