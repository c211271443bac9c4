"""A change of the fleet binds only the ranks that it concerns."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from fake_agents import FakeTrainerRank, payload
from fake_fleet import FakeFleet
from hypothesis import given
from hypothesis import strategies as st
from weight_fleet import running_fleet

from windlass.config import ControlConfig, P2pBackend, PhaseDeadlines, RelayShape, UpdateMode
from windlass.control.binding import Binding
from windlass.control.connect_messages import ChangeLinks, ConnectEngine, ConnectTrainer, NotBound
from windlass.control.messages import Command, Result
from windlass.control.routes import status_of
from windlass.control.session import AgentSession
from windlass.errors import PlanError
from windlass.transports.choice import LinkChoice

WITHIN_S = 30.0
BINDS = (ConnectEngine, ConnectTrainer, ChangeLinks)

Asked = list[tuple[str, Command]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Provide a list of the commands that bind ranks, as the controllers of this process send them."""
    found: Asked = []
    call = AgentSession.call

    def noted(self: AgentSession, key: Any, command: Command) -> Awaitable[Any]:
        if isinstance(command, BINDS):
            found.append((self.peer, command))
        return call(self, key, command)

    monkeypatch.setattr(AgentSession, "call", noted)
    return found


def names_of(asked: Asked) -> list[tuple[str, str]]:
    return sorted((worker, type(command).__name__) for worker, command in asked)


async def until(fleet: FakeFleet, holds: Callable[[], bool]) -> None:
    await fleet.coordinator.changes.until(holds, WITHIN_S, lambda: "the fleet did not get there")


async def settled(fleet: FakeFleet, num_engines: int) -> None:
    """Wait until `num_engines` engines are bound and no binding is under way."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            async with fleet.coordinator.rounds.lock:
                binding = fleet.coordinator.connector.binding
                if binding is not None and len(binding.engines) == num_engines:
                    return
            await asyncio.sleep(0.01)


def check_served(fleet: FakeFleet, version: int, engines: set[str]) -> None:
    """Check that every engine element equals the value that its trainer sent for that version."""
    assert fleet.routable == dict.fromkeys(engines, version)
    for rank in fleet.engines.values():
        if rank.worker.rpartition("/")[0] in engines:
            assert rank.serving
            for source in range(fleet.num_trainers):
                assert (rank.live[source] == payload(version, source)).all()


# --- a binding without some engines, and with new ones ---------------------------------------------


def link_choice(name: str) -> LinkChoice:
    return LinkChoice(name, "the only one", 6e9)


def binding_of(
    engines: Mapping[str, int], trainers: int, incarnations: Mapping[str, str]
) -> Binding:
    workers = {name: tuple(f"{name}/{rank}" for rank in range(n)) for name, n in engines.items()}
    sources = tuple(f"trainer/{rank}" for rank in range(trainers))
    links = [(s, w) for s in sources for own in workers.values() for w in own]
    everybody = (*sources, *(w for own in workers.values() for w in own))
    return Binding(
        signature=frozenset(
            (w, incarnations.get(w.rpartition("/")[0], "first")) for w in everybody
        ),
        engines=workers,
        trainers=sources,
        links={link: 1 + index for index, link in enumerate(links)},
        transports={link: link_choice(link[1]) for link in links},
        bound_in=dict.fromkeys(sources, 1),
    )


NAMES = st.sampled_from("abcdef")


@given(
    st.dictionaries(NAMES, st.integers(1, 3), min_size=1),
    st.lists(st.tuples(NAMES, st.booleans()), max_size=8),
)
def test_a_binding_depends_only_on_its_present_engines(
    engines: dict[str, int], changes: list[tuple[str, bool]]
) -> None:
    held = binding_of(engines, 2, {})
    there = {name: (count, "first") for name, count in engines.items()}
    for number, (name, joins) in enumerate(changes):
        count = 1 + number % 3
        before = held
        held = held.without((name,))
        there.pop(name, None)
        old = {link for link in before.links if link[1].startswith(f"{name}/")}
        assert held.ended == before.ended | old
        assert not {link for link in held.links if link[1].startswith(f"{name}/")}
        if joins:
            there[name] = count, str(number)
            held = held.joined(binding_of({name: count}, 2, {name: str(number)}))
            assert not held.ended
    whole = binding_of(
        {name: count for name, (count, _) in there.items()},
        2,
        {name: incarnation for name, (_, incarnation) in there.items()},
    )
    assert held.signature == whole.signature
    assert dict(held.engines) == dict(whole.engines)
    assert held.links.keys() == held.transports.keys() == whole.links.keys()
    assert held.sent_nbytes == max(
        (sum(n for (s, _), n in held.links.items() if s == t) for t in held.trainers), default=0
    )


# --- ranks that are asked ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_a_restarted_engine_is_bound_alone(mode: UpdateMode, asked: Asked) -> None:
    async with FakeFleet(ControlConfig(mode=mode)) as rig:
        await rig.start({"a": 1, "b": 2, "c": 1})
        everybody = {"a/0", "b/0", "b/1", "c/0", "trainer/0", "trainer/1"}
        assert (await rig.publish(0)).bound.keys() == everybody
        check_served(rig, 0, {"a", "b", "c"})
        for rank in range(2):
            await asyncio.to_thread(rig.channels.pop(f"b/{rank}").close)
        await until(rig, lambda: rig.routable == {"a": 0, "c": 0})
        before = rig.coordinator.run.round_id.epoch
        asked.clear()
        await rig.add_engine("b", ranks=2, incarnation="second")
        await settled(rig, 3)
        engines = [(w, c) for w, c in asked if not w.startswith("trainer/")]
        assert names_of(engines) == [("b/0", "ConnectEngine"), ("b/1", "ConnectEngine")]
        for trainer in rig.trainers:
            # The trainer may have ended the links to the old ranks when only one new rank was
            # connected.
            *ended, last = [c for w, c in asked if w == trainer]
            assert isinstance(last, ChangeLinks)
            assert [binding.worker for binding in last.bindings] == ["b/0", "b/1"]
            told = [*ended, last]
            assert all(isinstance(c, ChangeLinks) and c.since >= 1 for c in told)
            assert [n for c in told if isinstance(c, ChangeLinks) for n in c.gone] == ["b/0", "b/1"]
        assert rig.coordinator.run.round_id.epoch > before
        asked.clear()
        report = await rig.publish(1)
        check_served(rig, 1, {"a", "b", "c"})
        assert not asked
        assert report.bound.keys() == {"b/0", "b/1", "trainer/0", "trainer/1"}
        assert all(min(cost.plan_s, cost.bind_s) > 0 for cost in report.bound.values())
        assert not (await rig.publish(2)).bound


async def test_only_trainers_receive_the_links_of_an_engine_that_left(asked: Asked) -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1, "b": 1})
        await rig.publish(0)
        await asyncio.to_thread(rig.channels.pop("b/0").close)
        await until(rig, lambda: rig.routable == {"a": 0})
        asked.clear()
        assert (await rig.publish(1)).engines == ("a",)
        assert names_of(asked) == [("trainer/0", "ChangeLinks"), ("trainer/1", "ChangeLinks")]
        for _, command in asked:
            assert isinstance(command, ChangeLinks)
            assert (command.gone, command.plan, command.bindings) == (("b/0",), b"", ())
        check_served(rig, 1, {"a"})


async def test_a_restarted_trainer_is_bound_with_the_whole_fleet(asked: Asked) -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1, "b": 1})
        await rig.publish(0)
        await asyncio.to_thread(rig.channels.pop("trainer/1").close)
        asked.clear()
        await rig.add_trainer(1, incarnation="second")
        await rig.publish(1)
        check_served(rig, 1, {"a", "b"})
        assert names_of(asked) == [
            ("a/0", "ConnectEngine"),
            ("b/0", "ConnectEngine"),
            ("trainer/0", "ConnectTrainer"),
            ("trainer/1", "ConnectTrainer"),
        ]


async def test_a_newcomer_that_does_not_bind_leaves_other_engines_bound(asked: Asked) -> None:
    def refuse(command: Command) -> None:
        if isinstance(command, ConnectEngine):
            raise PlanError("not with me")

    async with FakeFleet() as rig:
        await rig.start({"a": 1, "b": 1})
        await rig.publish(0)
        asked.clear()
        await rig.add_engine("c", on_command=refuse)
        await until(rig, lambda: "c" in str(status_of(rig.coordinator)["refused"]))
        assert (await rig.publish(1)).engines == ("a", "b")
        check_served(rig, 1, {"a", "b"})
        assert names_of(asked) == [("c/0", "ConnectEngine")]


class Choosy:
    """Trainer rank that cannot write to one destination."""

    def __init__(self, rank: FakeTrainerRank, unwanted: str) -> None:
        self._rank, self._unwanted = rank, unwanted

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        if isinstance(command, ChangeLinks | ConnectTrainer):
            names = [binding.worker for binding in command.bindings]
            if self._unwanted in names:
                return NotBound({self._unwanted: "it is nobody's"})
        return self._rank.handle(command, epoch=epoch, round_number=round_number)


async def test_a_newcomer_that_one_trainer_cannot_write_leaves_other_engines_bound(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeFleet() as rig:
        await rig.add_trainer(0)
        connect = rig.connect

        async def choosy(hello: Any, handler: Any, **more: Any) -> Any:
            return await connect(hello, Choosy(handler, "c/0"), **more)

        with monkeypatch.context() as patch:
            patch.setattr(
                FakeFleet, "connect", lambda _self, *given, **more: choosy(*given, **more)
            )
            await rig.add_trainer(1)
        for name in ("a", "b"):
            await rig.add_engine(name)
        await rig.publish(0)
        asked.clear()
        await rig.add_engine("c")
        await until(rig, lambda: "c" in str(status_of(rig.coordinator)["refused"]))
        assert (await rig.publish(1)).engines == ("a", "b")
        check_served(rig, 1, {"a", "b"})
        # trainer/0 has a link to c/0 and ends it when the controller binds again.
        assert names_of(asked) == [
            ("c/0", "ConnectEngine"),
            ("trainer/0", "ChangeLinks"),
            ("trainer/0", "ChangeLinks"),
            ("trainer/1", "ChangeLinks"),
            ("trainer/1", "ChangeLinks"),
        ]
        asked.clear()
        await rig.add_engine("d")
        await settled(rig, 3)
        await rig.publish(2)
        check_served(rig, 2, {"a", "b", "d"})
        assert {name for name, _ in names_of(asked)} == {"d/0", "trainer/0", "trainer/1"}


async def test_a_trainer_bound_in_another_epoch_causes_a_full_binding(
    asked: Asked,
) -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1, "b": 1})
        await rig.publish(0)
        # As if another controller had bound this rank in a later epoch.
        rig.trainers["trainer/1"].bound_in = 1 << 20
        await rig.add_engine("c")
        asked.clear()
        report = await rig.publish(1)
        if report.reason:
            assert "did not bind the plan" in report.reason
            report = await rig.publish(2)
        assert set(report.engines) == {"a", "b", "c"}
        check_served(rig, report.version, {"a", "b", "c"})
        assert ("trainer/0", "ConnectTrainer") in names_of(asked)


async def test_a_new_engine_binds_the_whole_relay_again(asked: Asked) -> None:
    """Relays are groups of engines, so a new engine changes the group of every rank."""
    config = ControlConfig(backend=P2pBackend(relay=RelayShape.CHAIN))
    async with running_fleet(config, 1, can_send=True) as fleet:
        for name in ("a", "b"):
            fleet.add_engine(name)
        fleet.add_trainers()
        await fleet.ready()
        assert await fleet.publish(1) == ("published", [], (await fleet.publish(2)).nbytes)
        assert {type(command) for _, command in asked} == {ConnectEngine, ConnectTrainer}
        asked.clear()
        fleet.add_engine("c")
        assert await fleet.engines["c"][0].read() == "ready"
        assert (await fleet.publish(3))[:2] == ("published", [])
        for name in ("a", "b", "c"):
            assert await fleet.held(name) == [(3, "3", False)]
        assert {w for w, c in asked if isinstance(c, ConnectEngine)} >= {"a/0", "b/0", "c/0"}
        assert not [c for _, c in asked if isinstance(c, ChangeLinks)]


# --- real processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("can_send", [False, True], ids=["by the next version", "by a peer"])
async def test_a_killed_engine_that_comes_back_is_bound_alone(
    mode: UpdateMode, can_send: bool, asked: Asked
) -> None:
    deadlines = PhaseDeadlines(connect_s=30, write_s=10, fleet_s=30)
    config = ControlConfig(mode=mode, deadlines=deadlines)
    async with running_fleet(config, 2, can_send=can_send) as fleet:
        for name in ("a", "b", "c"):
            fleet.add_engine(name)
        fleet.add_trainers()
        await fleet.ready()
        assert (await fleet.publish(1))[:2] == ("published", [])
        for version in (2, 3):
            victim = fleet.engines["b"][0]
            assert victim.process.pid is not None
            os.kill(victim.process.pid, signal.SIGKILL)
            await asyncio.to_thread(victim.process.join, WITHIN_S)
            for name in ("a", "c"):
                assert await fleet.held(name) == [(version - 1, str(version - 1), False)]
            victim.close()
            asked.clear()
            fleet.add_engine("b")
            assert await fleet.engines["b"][0].read() == "ready"
            assert (await fleet.publish(version))[:2] == ("published", [])
            for name in ("a", "b", "c"):
                assert await fleet.held(name) == [(version, str(version), False)]
            bound = {worker for worker, command in asked if isinstance(command, ConnectEngine)}
            assert bound == {"b/0"}
            of_trainers = [(w, c) for w, c in asked if w.startswith("trainer/")]
            assert {worker for worker, _ in of_trainers} == {"trainer/0", "trainer/1"}
            assert all(isinstance(command, ChangeLinks) for _, command in of_trainers)
