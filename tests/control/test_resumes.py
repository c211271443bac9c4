"""The coordinator tells an engine that could not resume to resume again, on a simulated clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest
from aiohttp import web
from fake_agents import FakeEngineRank, engine_manifest, fake_hello
from fake_fleet import TOKEN, FakeFleet
from small_pair import connect_small_pair
from test_catch_up_retries import VERSION, Rig, Socket, hello_of, simulated

from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.control import recovery
from windlass.control.coordinator import Coordinator
from windlass.control.delivery import reply_budget_s
from windlass.control.engine_channel import WELCOME_SEQ
from windlass.control.fleet import PROBE_SEQ
from windlass.control.journal import JournalKind
from windlass.control.messages import Abort, Apply, Done, Probe, Result
from windlass.control.recovery import MAX_ATTEMPTS, ResumeRetries
from windlass.control.report import RoundOutcome
from windlass.control.routes import mount_updates
from windlass.net.clock import Backoff
from windlass.net.messages import Envelope
from windlass.net.server import ControlServer

WITHIN_S = 30.0
TOLD_S = [1, 3, 7, 15, 31, 61, 91, 121]
"""Seconds after the first report at which it is told. The waits double from 1 s to 30 s."""
GIVEN_UP_S = 151


class Resting(Socket):
    """Rank with an engine that cannot resume while `broken` is set."""

    def __init__(self, rig: Rig, name: str) -> None:
        super().__init__(rig, name)
        self.broken = True
        self.told_s: list[int] = []
        self.deadlines_s: list[float] = []

    def result_of(self, command: object) -> Result | None:
        if isinstance(command, Abort):
            self.told_s.append(round(self.rig.loop.time()))
            self.deadlines_s.append(command.deadline_s)
            return Done(not_resumed="away" if self.broken else "")
        return super().result_of(command)

    def say(self, not_resumed: str) -> None:
        """Report as in a welcome, or as in the answer to the last command of a round."""
        self.reply(Envelope(0, 0, 0, Apply(0)), Done(not_resumed=not_resumed))


async def resting(rig: Rig, name: str = "a") -> Resting:
    socket = Resting(rig, name)
    rig.make = lambda _rig, _name: socket
    await rig.join(name)
    socket.say("away")
    await asyncio.sleep(0)
    assert rig.routable == set()
    return socket


def test_resumes_of_a_paused_rank_back_off_and_end_with_a_journal_entry() -> None:
    async def scenario(rig: Rig) -> None:
        begin_s = round(rig.loop.time())
        engine = await resting(rig)
        journal = rig.coordinator.run.journal
        await asyncio.sleep(GIVEN_UP_S - 1)
        assert [at_s - begin_s for at_s in engine.told_s] == TOLD_S
        assert len(TOLD_S) == MAX_ATTEMPTS
        assert journal.recent[-1].kind is not JournalKind.NOT_RESUMED
        await asyncio.sleep(2.0)
        last = journal.recent[-1]
        assert (last.kind, last.engines, last.detail) == (JournalKind.NOT_RESUMED, ("a/0",), "away")
        await asyncio.sleep(1000.0)
        assert len(engine.told_s) == MAX_ATTEMPTS
        assert rig.routable == set()
        # After a reconnect the waits start at one second again, for the same or another process.
        await rig.leave(engine, ended=True)
        engine = await resting(rig)
        engine.broken = False
        await asyncio.sleep(1.5)
        assert (len(engine.told_s), rig.routable) == (1, {"a"})

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_resume_ends_before_the_next_pause_would_be_late() -> None:
    async def scenario(rig: Rig) -> None:
        engine = await resting(rig)
        await asyncio.sleep(1.5)
        deadlines = ControlConfig().deadlines
        assert engine.deadlines_s == [27.0]
        assert engine.deadlines_s[0] < min(deadlines.pause_s, deadlines.publish_s)

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))
    for short in (PhaseDeadlines(pause_s=5.0), PhaseDeadlines(publish_s=5.0)):
        coordinator = rig.coordinator
        retries = ResumeRetries(
            coordinator.run, coordinator.members, coordinator.tasks, coordinator.rounds.lock, short
        )
        assert retries.deadline_s == reply_budget_s(5.0) < 5.0


def test_a_resumed_rank_gets_traffic_at_once_and_no_further_resume() -> None:
    async def scenario(rig: Rig) -> None:
        engine = await resting(rig)
        await asyncio.sleep(4.0)
        engine.broken = False
        await asyncio.sleep(3.5)
        assert (len(engine.told_s), rig.routable) == (3, {"a"})
        await asyncio.sleep(1000.0)
        assert len(engine.told_s) == 3
        # When the rank next fails to resume, the waits start at one second again.
        engine.say("away again")
        engine.broken = False
        await asyncio.sleep(1.5)
        assert (len(engine.told_s), rig.routable) == (4, {"a"})

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_paused_or_departed_rank_gets_no_resume() -> None:
    async def scenario(rig: Rig) -> None:
        engine = await resting(rig)
        # This is the rank's answer to the pause of a round, and the round takes the pause over.
        engine.say("")
        await asyncio.sleep(100.0)
        assert engine.told_s == []
        engine.say("away")
        await asyncio.sleep(0)
        await rig.leave(engine, ended=False)
        await asyncio.sleep(100.0)
        assert engine.told_s == []
        assert len(rig.coordinator.resume_retries) == 0

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_later_round_makes_a_resume_stale() -> None:
    async def scenario(rig: Rig) -> None:
        engine = await resting(rig)
        await asyncio.sleep(4.0)
        places = [(e.epoch, e.round) for e in engine.told if isinstance(e.command, Abort)]
        assert len(places) == 2
        assert sorted(set(places)) == places
        assert rig.coordinator.run.new_epoch() > places[-1]

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_an_answer_to_a_probe_does_not_count_as_a_resume() -> None:
    async def scenario(rig: Rig) -> None:
        engine = await resting(rig)
        engine.reply(Envelope(9, 9, PROBE_SEQ, Probe()), Done())
        await asyncio.sleep(0.5)
        assert rig.routable == set()
        engine.broken = False
        await asyncio.sleep(1.0)
        assert (len(engine.told_s), rig.routable) == (1, {"a"})

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_repeated_answer_after_a_welcome_does_not_count_as_a_resume() -> None:
    async def scenario(rig: Rig) -> None:
        engine = Resting(rig, "a")
        hello = msgspec.structs.replace(
            hello_of("a", VERSION),
            lineage=rig.coordinator.run.lineage,
            epoch=5,
            received_epoch=5,
            round=7,
            not_resumed="away",
        )
        socket = cast("web.WebSocketResponse", engine)
        admitted = await rig.coordinator.members.admit(hello, socket)
        assert admitted is not None
        engine.session, _ = admitted
        await rig.coordinator.members.admitted(engine.session)
        assert rig.routable == set()
        for place in ((5, 6), (5, 7)):
            engine.reply(Envelope(*place, 3, Apply(VERSION)), Done())
            await asyncio.sleep(0)
            assert rig.routable == set()
        engine.reply(Envelope(5, 7, WELCOME_SEQ, Apply(VERSION)), Done())
        await asyncio.sleep(0)
        assert rig.routable == {"a"}
        engine.reply(Envelope(5, 8, 3, Apply(VERSION)), Done(not_resumed="away again"))
        await asyncio.sleep(0)
        assert rig.routable == set()

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_closed_coordinator_makes_no_further_attempts() -> None:
    async def scenario(rig: Rig) -> None:
        engine, other = await resting(rig), Resting(rig, "b")
        rig.make = lambda _rig, _name: other
        await rig.join("b")
        await rig.coordinator.close()
        other.say("away")
        await asyncio.sleep(0)
        # A server that closes ends every connection like this.
        await rig.leave(engine, ended=True)
        if left := set(rig.coordinator.tasks):
            await asyncio.wait(left)
        assert all(task.cancelled() for task in left)
        assert len(rig.coordinator.tasks) == 0

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


async def join_without_server(rig: FakeFleet) -> FakeEngineRank:
    """Add a routable engine that cannot resume after it loses its connection."""

    def away() -> None:
        raise ConnectionRefusedError("the engine's HTTP server is away")

    rank = FakeEngineRank("a/0", rig.num_trainers)
    rig.coordinator.run.reserved = VERSION
    hello = fake_hello(
        engine_manifest("a/0", rig.num_trainers),
        group="a",
        served_version=VERSION,
        lineage=rig.coordinator.run.lineage,
    )
    await rig.connect(hello, rank, on_disconnect=away)
    await until_routable(rig.coordinator, {"a"})
    return rank


async def test_an_engine_that_reconnects_paused_gets_no_traffic_before_it_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "BACKOFF", Backoff(0.02, 30.0))

    async with FakeFleet() as rig:
        rank = await join_without_server(rig)
        seen: list[tuple[bool, bool]] = []

        def note() -> None:
            seen.append((bool(rig.coordinator.routable()), "Abort" in rank.handled))

        rig.coordinator.subscribe(note)
        await rig.coordinator.members.sessions["a/0"].close()
        await until_routable(rig.coordinator, set())
        await until_routable(rig.coordinator, {"a"})
        assert all(told for is_routable, told in seen if is_routable)


async def until_routable(coordinator: Coordinator, names: set[str]) -> None:
    await coordinator.changes.until(
        lambda: {engine.name for engine in coordinator.routable()} == names,
        WITHIN_S,
        lambda: f"routable must be {names}, got {coordinator.routable()}",
    )


async def test_an_engine_reports_a_failed_resume_when_it_reconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "BACKOFF", Backoff(0.02, 30.0))

    async with FakeFleet() as rig:
        rank = await join_without_server(rig)
        rest: list[str] = []

        def note() -> None:
            rest.extend(g.not_resumed for g in rig.coordinator.fleet.engines() if g.not_resumed)

        rig.coordinator.subscribe(note)
        await rig.coordinator.members.sessions["a/0"].close()
        await until_routable(rig.coordinator, set())
        await until_routable(rig.coordinator, {"a"})
        async with asyncio.timeout(WITHIN_S):
            while "Abort" not in rank.handled:  # noqa: ASYNC110 - a fake has no event
                await asyncio.sleep(0.01)
        assert rest[:1] == ["ConnectionRefusedError: the engine's HTTP server is away"]


class Engine:
    """`EngineHooks` with a `resume` that fails `num_failures` times."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.resumes = 0
        self.paused = True
        self.version = -1

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        self.paused = True

    def resume(self, deadline_s: float) -> None:
        self.resumes += 1
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionRefusedError("the engine's HTTP server is away")
        self.paused = False

    def finalise(self) -> None:
        return

    def set_version(self, version: int, deadline_s: float) -> None:
        self.version = version


@pytest.mark.parametrize("mode", UpdateMode)
async def test_a_version_whose_resume_fails_is_published_and_its_engine_resumes_later(
    mode: UpdateMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recovery, "BACKOFF", Backoff(0.02, 30.0))
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig(mode=mode), journal_path=tmp_path / "journal")
    mount_updates(coordinator, server)
    await server.start()
    hooks = Engine()
    nowhere = "http://127.0.0.1:9"
    pair = await asyncio.to_thread(connect_small_pair, server.url, TOKEN, hooks, nowhere)
    try:
        await coordinator.members.wait_for_fleet(num_trainers=1, engines=["a"], deadline_s=WITHIN_S)
        hooks.num_failures = 4
        report = (await asyncio.to_thread(pair.trainer.publish, 0)).result()
        assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",))
        await until_routable(coordinator, {"a"})
        assert (hooks.resumes, hooks.paused, hooks.version) == (5, False, 0)
        assert bytes(pair.served) == bytes(pair.trained)
        # The next round takes the pause over, so no resume is sent while the weights are written.
        monkeypatch.setattr(recovery, "BACKOFF", Backoff(600.0, 600.0))
        hooks.num_failures = 1
        await asyncio.to_thread(pair.trainer.publish, 1)
        assert (coordinator.routable(), hooks.paused) == ((), True)
        pair.trained[:] += 100
        await asyncio.to_thread(pair.trainer.publish, 2)
        await until_routable(coordinator, {"a"})
        assert (hooks.paused, hooks.version, hooks.resumes) == (False, 2, 7)
        assert bytes(pair.served) == bytes(pair.trained)
        assert len(coordinator.resume_retries) == 0
    finally:
        await asyncio.to_thread(pair.close)
        await coordinator.close()
        await server.close()
