"""The coordinator retries a failed catch-up at the expected times, on a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from fake_agents import fake_endpoint, fake_hello
from simulated_loop import SimulatedLoop
from simulated_network import SimulatedNetwork

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.connect_messages import Bound, ConnectEngine, Hello
from windlass.control.coordinator import Coordinator
from windlass.control.messages import (
    CONTROLLER_FRAMES,
    Abort,
    Command,
    Done,
    Probe,
    Result,
    Verified,
    Verify,
    Write,
)
from windlass.control.recovery import MAX_ATTEMPTS
from windlass.control.round_state import Phase
from windlass.control.session import AgentSession
from windlass.errors import PeerTimeout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.net.messages import Envelope, Reply
from windlass.observability.operations import Operations
from windlass.rollout import BatchQueue, RolloutController, StalenessPolicy
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written

WRITE_S = 5.0
VERSION = 3
BACKOFFS_S = [0, 1, 3, 7, 15, 31, 61, 91]
"""Seconds from the first attempt to each attempt. The waits double from 1 s to 30 s."""


def hello_of(name: str, served: int, incarnation: str = "first", role: Role = Role.ENGINE) -> Hello:
    builder = ManifestBuilder(f"{name}/0", role)
    builder.add_parameter("p", nbytes=24, dtype=DType.UINT8)
    builder.add_shard("weight", (4, 6), Box((0, 0), (4, 6)), "p")
    hello = fake_hello(builder.build(), group=name, incarnation=incarnation, served_version=served)
    return msgspec.structs.replace(hello, can_send=True)


class Socket:
    """Socket of a rank that obeys all commands, except the writes that `Rig.on_write` decides."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.name = rig, name
        self.session: AgentSession | None = None
        self.told: list[Envelope[Command | Probe]] = []
        self.mixed_weights = False

    async def send_bytes(self, data: bytes) -> None:
        frame = CONTROLLER_FRAMES.decode(data)
        if isinstance(frame, Envelope):
            asyncio.get_running_loop().call_soon(self.answer, frame)

    def answer(self, frame: Envelope[Command | Probe]) -> None:
        self.told.append(frame)
        if isinstance(frame.command, Abort):
            self.mixed_weights |= frame.command.mixed_weights
        result = self.result_of(frame.command)
        if result is not None:
            self.reply(frame, result)

    def reply(self, frame: Envelope[Command | Probe], result: Result) -> None:
        assert self.session is not None
        reply = Reply(frame.epoch, frame.round, frame.seq, result)
        self.rig.spawn(self.rig.coordinator.members.received(self.session, reply))

    def result_of(self, command: object) -> Result | None:
        match command:
            case ConnectEngine():
                binding = DestinationBinding(
                    f"{self.name}/0", fake_endpoint(f"{self.name}/0"), (), ()
                )
                return Bound(command.plan_digest, binding)
            case Write():
                self.rig.writes.append((self.rig.loop.time(), self.name))
                status = self.rig.on_write(self.name)
                if status is None:
                    return None
                links = tuple(LinkOutcome(d, status, 0, "", "") for d in command.destinations)
                return Written(links, 0.0, 0.0)
            case Verify():
                return Verified(())
            case _:
                return Done()

    async def close(self) -> None:
        return

    def get_extra_info(self, name: str) -> None:
        return None


class Rig:
    """Coordinator with engines that serve `VERSION`."""

    def __init__(self, mode: UpdateMode, loop: SimulatedLoop) -> None:
        self.loop = loop
        config = ControlConfig(mode=mode, max_rewrites=0, deadlines=PhaseDeadlines(write_s=WRITE_S))
        self.coordinator = Coordinator(config)
        # As read from a journal. The versions that engines report confirm it.
        self.coordinator.run.reserved = VERSION
        self.writes: list[tuple[float, str]] = []
        self.on_write: Callable[[str], LinkStatus | None] = lambda _donor: LinkStatus.OK
        self.make: Callable[[Rig, str], Socket] = Socket
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def join(
        self, name: str, served: int = VERSION, incarnation: str = "first", lineage: str = ""
    ) -> Socket:
        hello = hello_of(name, served, incarnation)
        lineage = lineage or self.coordinator.run.lineage
        return await self.admit(name, msgspec.structs.replace(hello, lineage=lineage))

    async def join_trainer(self, served: int = -1, lineage: str = "", job: str = "") -> Socket:
        hello = hello_of("trainer", served, job, Role.TRAINER)
        return await self.admit("trainer", msgspec.structs.replace(hello, lineage=lineage, job=job))

    async def admit(self, name: str, hello: Hello) -> Socket:
        socket = self.make(self, name)
        admitted = await self.coordinator.members.admit(
            hello, cast("web.WebSocketResponse", socket)
        )
        assert admitted is not None
        socket.session, _ = admitted
        await self.coordinator.members.admitted(socket.session)
        return socket

    async def leave(self, socket: Socket, *, ended: bool) -> None:
        assert socket.session is not None
        await self.coordinator.members.lost(socket.session, "gone", ended=ended)

    @property
    def routable(self) -> set[str]:
        return {engine.name for engine in self.coordinator.routable()}

    def since(self, begin_s: float) -> list[tuple[int, str]]:
        """Return each attempt as whole seconds since `begin_s`, and the donor."""
        return [(round(at - begin_s), donor) for at, donor in self.writes]


@contextmanager
def simulated(mode: UpdateMode) -> Iterator[Rig]:
    network = SimulatedNetwork(1)
    loop = SimulatedLoop(network)
    asyncio.set_event_loop(loop)
    try:
        with network.acting_as(network.host("controller")):
            rig = Rig(mode, loop)
            yield rig
            loop.run_until_complete(rig.coordinator.close())
            loop.run_until_complete(asyncio.sleep(0))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


BOTH = pytest.mark.parametrize("mode", UpdateMode)


@BOTH
def test_a_failed_catch_up_is_repeated_from_another_engine(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        rig.on_write = lambda donor: LinkStatus.FAILED if donor == "a" else LinkStatus.OK
        await rig.join("a")
        await rig.join("b")
        newcomer = await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert rig.routable == {"a", "b"}
        assert newcomer.mixed_weights is (mode is UpdateMode.IN_PLACE)
        await asyncio.sleep(1.0)
        assert rig.routable == {"a", "b", "c"}
        assert rig.since(rig.writes[0][0]) == [(0, "a"), (1, "b")]

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_status_shows_no_phase_after_a_catch_up(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        rollouts = RolloutController(rig.coordinator, StalenessPolicy.unbounded(1))
        shown = Operations(rig.coordinator, rollouts, BatchQueue())
        seen: list[Phase] = []
        rig.coordinator.rounds.on_phase(lambda _version, phase: seen.append(phase))
        rig.on_write = lambda _donor: LinkStatus.FAILED
        await rig.join("a")
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert (rig.routable, shown.overview()["phase"]) == ({"a"}, "")
        rig.on_write = lambda _donor: LinkStatus.OK
        await asyncio.sleep(1.0)
        assert (rig.routable, shown.overview()["phase"]) == ({"a", "c"}, "")
        assert seen.count(Phase.DONE) == len(rig.writes) == 2

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_a_catch_up_does_not_give_its_version_to_a_job_that_starts_during_it(
    mode: UpdateMode,
) -> None:
    """The controller has no journal.

    It learnt the version from trainers of an earlier run that have left.
    """

    async def scenario(rig: Rig) -> None:
        arrivals: list[asyncio.Task[Socket]] = []

        def arrive(_donor: str) -> LinkStatus:
            arrivals.append(rig.loop.create_task(rig.join_trainer(job="second")))
            return LinkStatus.OK

        rig.on_write = arrive
        earlier = await rig.join_trainer(VERSION, "earlier", "first")
        assert rig.coordinator.fleet.published == VERSION
        await rig.leave(earlier, ended=True)
        await rig.join("a", lineage="earlier")
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert len(arrivals) == 1
        assert rig.coordinator.fleet.published == -1
        assert rig.routable == set()
        assert {group.lineage for group in rig.coordinator.fleet.engines()} == {"earlier"}

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_a_catch_up_to_an_older_version_frees_no_reserved_number(
    mode: UpdateMode,
) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.join("a")
        # A failed round told this number to engines that are away.
        rig.coordinator.run.reserved = VERSION + 1
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert rig.routable == {"a", "c"}
        assert "is or may be published" in rig.coordinator.run.refusal(VERSION + 1)

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_catch_up_attempts_back_off_and_end(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        rig.on_write = lambda _donor: LinkStatus.FAILED
        await rig.join("a")
        newcomer = await rig.join("c", served=-1)
        await asyncio.sleep(1000.0)
        begin_s = rig.writes[0][0]
        assert rig.since(begin_s) == [(after_s, "a") for after_s in BACKOFFS_S]
        assert len(BACKOFFS_S) == MAX_ATTEMPTS
        reasons = {state.name: state.reason for state in rig.coordinator.fleet.states()}
        assert "its catch-up failed: " in reasons["c"]
        assert not reasons["a"]
        with pytest.raises(
            PeerTimeout, match=r"engines without this version: c \(.*its catch-up failed: "
        ):
            await rig.coordinator.members.wait_for_version(VERSION, engines=["c"], deadline_s=1.0)
        # A process that connects again starts with a full set of attempts.
        rig.on_write = lambda _donor: LinkStatus.OK
        await rig.leave(newcomer, ended=True)
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert rig.routable == {"a", "c"}
        assert not any(state.reason for state in rig.coordinator.fleet.states())

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_engine_without_a_donor_says_why_it_waits(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        def reasons() -> dict[str, str]:
            return {state.name: state.reason for state in rig.coordinator.fleet.states()}

        rig.coordinator.fleet.publish(VERSION, rig.coordinator.run.lineage)
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        waits = f"it waits for the next version, because no engine can send it version {VERSION}: "
        assert reasons() == {"c": waits + "no engine serves it"}
        silent = msgspec.structs.replace(
            hello_of("a", VERSION), lineage=rig.coordinator.run.lineage, can_send=False
        )
        await rig.admit("a", silent)
        for _ in range(2):
            await asyncio.sleep(0.5)
            assert reasons() == {"a": "", "c": waits + "a cannot send its weights"}
            rig.coordinator.catch_ups.bring_up_soon()
        with pytest.raises(PeerTimeout, match="a cannot send its weights"):
            await rig.coordinator.members.wait_for_version(VERSION, engines=["c"], deadline_s=1.0)
        await rig.join("b")
        await asyncio.sleep(0.5)
        assert reasons() == dict.fromkeys("abc", "")
        assert rig.routable == {"a", "b", "c"}

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_engine_with_mixed_weights_says_that_it_waits_for_the_trainers(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.join("a")
        mixed = msgspec.structs.replace(
            hello_of("c", VERSION), lineage=rig.coordinator.run.lineage, mixed_weights=True
        )
        await rig.admit("c", mixed)
        await asyncio.sleep(0.5)
        reason = next(s.reason for s in rig.coordinator.fleet.states() if s.name == "c")
        assert reason.endswith("; it waits for the trainers, which may still write into it")
        await rig.join_trainer(job="first")
        await asyncio.sleep(0.5)
        assert rig.routable == {"a", "c"}

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_a_donor_that_died_during_a_write_is_replaced_after_the_write_deadline(
    mode: UpdateMode,
) -> None:
    async def scenario(rig: Rig) -> None:
        rig.on_write = lambda donor: None if donor == "a" else LinkStatus.OK
        donor = await rig.join("a")
        await rig.join("b")
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        assert rig.since(rig.writes[0][0]) == [(0, "a")]
        await rig.leave(donor, ended=True)
        await asyncio.sleep(WRITE_S - 0.1)
        assert len(rig.writes) == 1, "a late write of the donor could meet bytes of another engine"
        await asyncio.sleep(0.2)
        assert rig.routable == {"b", "c"}
        assert [donor for _, donor in rig.writes] == ["a", "b"]

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


@BOTH
def test_no_other_donor_writes_while_a_silent_donor_may_still_write(mode: UpdateMode) -> None:
    async def scenario(rig: Rig) -> None:
        rig.on_write = lambda donor: None if donor == "a" else LinkStatus.OK
        donor = await rig.join("a")
        await rig.join("b")
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        await rig.leave(donor, ended=False)
        await asyncio.sleep(20 * WRITE_S)
        assert len(rig.writes) == 1
        assert rig.routable == {"b"}
        # The donor reconnects and reports how its write ended.
        back = await rig.join("a")
        (write,) = (frame for frame in donor.told if isinstance(frame.command, Write))
        failed = LinkOutcome("c/0", LinkStatus.FAILED, 0, "", "told to fail")
        back.reply(write, Written((failed,), 0.0, 0.0))
        await asyncio.sleep(0.5)
        assert rig.routable == {"a", "b", "c"}
        assert [donor for _, donor in rig.writes] == ["a", "b"]

    with simulated(mode) as rig:
        rig.loop.run_until_complete(scenario(rig))


def test_a_catch_up_waits_for_a_donor_that_lost_only_its_connection() -> None:
    async def scenario(rig: Rig) -> None:
        rig.on_write = lambda donor: None if donor == "a" else LinkStatus.OK
        donor = await rig.join("a")
        await rig.join("b")
        await rig.join("c", served=-1)
        await asyncio.sleep(0.5)
        await rig.leave(donor, ended=True)
        await asyncio.sleep(1.0)
        await rig.join("a")
        await asyncio.sleep(0.2)
        assert [donor for _, donor in rig.writes] == ["a", "b"], (
            "the probe reports that the write has ended"
        )
        assert rig.routable == {"a", "b", "c"}

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))
