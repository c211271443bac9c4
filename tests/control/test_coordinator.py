"""The coordinator and its agents over real sockets. The fake weights differ in every version."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
from fake_agents import (
    WIDTH,
    FakeEngineRank,
    engine_manifest,
    fake_hello,
    payload,
    trainer_manifest,
)
from fake_fleet import TOKEN, FakeFleet

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.client import AgentChannel, TrainerChannel
from windlass.control.connect_messages import Hello, Registered, Welcome
from windlass.control.engine_channel import report_cannot_join
from windlass.control.journal import Journal, JournalEntry, JournalKind
from windlass.control.messages import (
    AGENT_FRAMES,
    CONTROLLER_FRAMES,
    Abort,
    Announce,
    Command,
    Done,
    Failure,
    FailureKind,
    Prepare,
    Publish,
    Result,
    Verify,
    Write,
)
from windlass.control.relay_messages import Relay, RelayWrite
from windlass.control.report import RoundOutcome
from windlass.control.round_state import Phase
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    EngineRefused,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    TransferOutcomeUnknown,
)
from windlass.layout.manifest import ShardManifest
from windlass.net.access import Access, role_token
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Refused, Reply, encode
from windlass.net.server import ControlServer
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.bindings import LinkStatus

BOTH = pytest.mark.parametrize("mode", UpdateMode)


def quick(mode: UpdateMode = UpdateMode.IN_PLACE, **deadlines: float) -> ControlConfig:
    return ControlConfig(mode=mode, deadlines=PhaseDeadlines(**deadlines))


# --- good rounds ---------------------------------------------------------------------------------


@BOTH
async def test_every_engine_serves_exactly_the_published_payload(mode: UpdateMode) -> None:
    async with FakeFleet(quick(mode)) as rig:
        await rig.start({"a": 2, "b": 1})
        assert rig.routable == {}
        for version in (0, 1, 5):
            report = await rig.publish(version)
            assert report.outcome is RoundOutcome.PUBLISHED
            assert set(report.engines) == {"a", "b"}
            assert report.left_out == {}
            assert report.digest_ok
            assert report.nbytes == 2 * 3 * WIDTH * 8
            assert 0 < report.pause_s <= report.update_s
            assert "write" in report.phase_s
            assert rig.coordinator.fleet.published == version
            assert rig.routable == {"a": version, "b": version}
            expected = np.stack([payload(version, s) for s in range(2)])
            for rank in rig.engines.values():
                assert rank.serving
                assert (rank.live == expected).all()


async def test_publish_publishes_the_weights_of_waiting_trainers() -> None:
    async with FakeFleet(quick()) as rig:
        await rig.start({"a": 1})
        waiting = rig.channels["trainer/1"]
        assert isinstance(waiting, TrainerChannel)
        told = waiting.begin_announcement(3, sends=False).report
        update = rig.coordinator.publish(3, deadline_s=20.0)
        report = await update.report
        assert (report.outcome, report.version, report.engines) == ("published", 3, ("a",))
        assert update.copied.is_set()
        assert (await asyncio.wrap_future(told)).attempt == 0
        assert (await rig.publish(4)).outcome is RoundOutcome.PUBLISHED
        stale = await rig.coordinator.publish(4, deadline_s=20.0).report
        assert "stale version" in stale.reason
        await asyncio.to_thread(rig.channels.pop("trainer/1").close)
        alone = rig.coordinator.publish(5, deadline_s=0.2)
        assert (await alone.report).reason == (
            "publish: all trainer ranks must be connected within 0.2 s, missing: trainer/1"
        )
        assert not alone.copied.is_set()


async def test_phases_and_listeners_see_a_round_in_order() -> None:
    async with FakeFleet() as rig:
        seen: list[object] = []
        rig.coordinator.rounds.on_phase(lambda version, phase: seen.append((version, phase)))
        rig.coordinator.on_update(lambda report: seen.append(report.version))
        await rig.start({"a": 1})
        await rig.publish(3)
        phases = [phase for phase in Phase if phase is not Phase.PAUSE]
        assert seen == [*((3, phase) for phase in phases), 3]


async def test_the_coordinator_plans_each_engine_once() -> None:
    plans: list[list[str]] = []

    def counting(
        sources: Sequence[ShardManifest], destinations: Sequence[ShardManifest]
    ) -> TransferPlan:
        plans.append([manifest.worker for manifest in destinations])
        return plan_transfer(sources, destinations)

    async with FakeFleet(planner=counting) as rig:
        await rig.start({"a": 2})
        for version in range(3):
            await rig.publish(version)
        assert plans == [["a/0", "a/1"]]
        await rig.add_engine("b")
        report = await rig.publish(3)
        assert plans == [["a/0", "a/1"], ["b/0"]]
        assert set(report.engines) == {"a", "b"}


async def test_a_newcomer_gets_no_traffic_before_it_has_the_published_version() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        await rig.add_engine("b")
        await rig.coordinator.members.wait_for_fleet(
            num_trainers=2, engines=("a", "b"), deadline_s=5
        )
        assert rig.routable == {"a": 0}
        served = rig.coordinator.members.wait_for_version
        await served(0, engines=("a",), deadline_s=5)
        with pytest.raises(
            PeerTimeout,
            match=r"published version is 0; engines without this version: b \(it waits .*a cannot send",
        ):
            await served(0, engines=("a", "b"), deadline_s=1.0)
        waiting = asyncio.create_task(served(0, engines=("a", "b"), deadline_s=20))
        await rig.publish(1)
        await waiting
        assert rig.routable == {"a": 1, "b": 1}


# --- refusals ------------------------------------------------------------------------------------


async def test_disagreeing_trainers_all_get_a_failure_and_no_engine_pauses() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        reports = await asyncio.gather(rig.announce("trainer/0", 1), rig.announce("trainer/1", 2))
        assert [r.version for r in reports] == [1, 2]
        for report in reports:
            assert report.outcome is RoundOutcome.FAILED
            assert "different versions" in report.reason
        assert "Pause" not in rig.engines["a/0"].handled
        assert (await rig.publish(2)).outcome is RoundOutcome.PUBLISHED


async def test_a_version_that_is_not_newer_is_refused_and_nothing_is_paused() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(4)
        pauses = rig.engines["a/0"].handled.count("Pause")
        for version in (4, 3):
            report = await rig.publish(version)
            assert report.outcome is RoundOutcome.FAILED
            assert "stale version" in report.reason
        assert rig.engines["a/0"].handled.count("Pause") == pauses


async def test_a_round_without_engines_fails_by_its_deadline_with_the_reason() -> None:
    async with FakeFleet(quick(fleet_s=0.2)) as rig:
        await rig.start({})
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.FAILED
        assert "1 engine must be ready within 0.2 s, got 0" in report.reason


async def test_an_engine_of_another_model_is_refused_and_the_others_publish() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        channel_ended = threading.Event()
        wrong = engine_manifest("x/0", 2, tensor="another")
        rank = FakeEngineRank("x/0", 2)
        channel = await rig.connect(
            fake_hello(wrong, group="x"), rank, on_disconnect=channel_ended.set
        )
        assert await asyncio.to_thread(channel_ended.wait, 10)
        with pytest.raises(ProtocolError, match=r"refused this peer: .*another"):
            await asyncio.to_thread(channel.ended.result, 5.0)
        report = await rig.publish(1)
        assert report.engines == ("a",)
        assert rank.handled == []


async def test_trainers_that_fit_no_engine_fail_at_once_and_the_engines_stay() -> None:
    """A trainer with a wrong configuration must not remove the engines from the fleet."""
    async with FakeFleet() as rig:
        await rig.add_trainer(0)
        await rig.add_trainer(1)
        wrong = engine_manifest("x/0", 2, tensor="another")
        channel = await rig.connect(fake_hello(wrong, group="x"), FakeEngineRank("x/0", 2))
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.FAILED
        assert re.match("IncompleteCoverage: .*another", report.reason)
        assert not channel.wait_disconnected(0)
        await rig.add_engine("a")
        assert (await rig.publish(1)).engines == ("a",)


async def test_an_engine_that_cannot_bind_is_refused_and_the_others_publish() -> None:
    def no_memory(command: Command) -> None:
        if type(command).__name__ == "ConnectEngine":
            raise MemoryError("no room for the shadow")

    async with FakeFleet() as rig:
        for index in range(2):
            await rig.add_trainer(index)
        await rig.add_engine("x", on_command=no_memory)
        await rig.add_engine("a")
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.PUBLISHED
        assert report.engines == ("a",)
        with pytest.raises(ProtocolError, match="no room for the shadow"):
            await asyncio.to_thread(rig.channels["x/0"].ended.result, 20)


async def test_an_error_of_the_planner_fails_the_round_and_not_the_coordinator() -> None:
    def broken(*_manifests: object) -> TransferPlan:
        raise ZeroDivisionError("a defect")

    async with FakeFleet(planner=broken) as rig:
        await rig.start({"a": 1})
        report = await rig.publish(0)
        assert "ZeroDivisionError: a defect" in report.reason


@pytest.mark.parametrize("path", ["/v1/status", "/v1/agents", "/v1/nothing"])
async def test_every_route_requires_the_token(path: str) -> None:
    async with FakeFleet() as rig, aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            async with http.get(rig.server.url + path, headers=headers) as response:
                assert response.status == 401
                assert await response.json() == {"error": "missing or wrong token"}


async def test_a_wrong_token_is_an_authentication_error_and_not_retried() -> None:
    async with FakeFleet() as rig:
        rank = FakeEngineRank("a/0", 2)
        hello = fake_hello(engine_manifest("a/0", 2), group="a")
        with pytest.raises(AuthenticationError):
            await rig.connect(hello, rank, token="wrong")


async def test_a_port_in_use_is_named() -> None:
    async with FakeFleet() as rig:
        port = rig.port
        with pytest.raises(ConfigError, match=rf"host '127.0.0.1' port {port} cannot be bound"):
            await ControlServer(host="127.0.0.1", port=port, token="t").start()


async def test_an_absent_controller_causes_a_timeout_with_the_reason() -> None:
    async with FakeFleet() as rig:
        url = rig.server.url
    hello = fake_hello(engine_manifest("a/0", 2), group="a")
    channel = TrainerChannel(url, TOKEN, lambda: hello, FakeEngineRank("a/0", 2))
    with pytest.raises(PeerTimeout, match="Connect"):
        await asyncio.to_thread(channel.connect, 0.5)
    with pytest.raises(PeerUnreachable, match="closed"):
        channel.announce(1, 1.0)


async def raw(rig: FakeFleet, *frames: bytes | str) -> list[object]:
    """Send frames over a separate socket and return all received frames up to the close."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.ws_connect(rig.server.url + "/v1/agents") as socket,
    ):
        for frame in frames:
            if isinstance(frame, str):
                await socket.send_str(frame)
            else:
                await socket.send_bytes(frame)
        return [CONTROLLER_FRAMES.decode(message.data) async for message in socket]


async def test_a_closing_controller_ends_silent_connections() -> None:
    async with FakeFleet() as rig:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.ws_connect(rig.server.url + "/v1/agents") as socket,
        ):
            closing = asyncio.create_task(rig.close_controller())
            message = await socket.receive(5.0)
            await closing
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)


def hello_of(group: str, **changes: object) -> Hello:
    manifest = engine_manifest(f"{group}/0", 2)
    return fake_hello(manifest, group=group, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1 not msgpack"], "mark c120 after 0 parts"),
        (["text"], "first frame: frames must be binary"),
        ([encode(Announce(1, 1))], "first frame must be Hello"),
        ([encode(hello_of("x")), b"\x00"], "agent frame"),
        ([encode(hello_of("x")), "text"], "frames must be binary"),
        ([encode(hello_of("x")), encode(hello_of("x"))], "Hello may only be the first frame"),
        ([encode(hello_of("x")), encode(Announce(1, 1))], "only a trainer"),
        ([encode(hello_of("x")).replace(b"manifest", b"manyfest")], "agent frame"),
    ],
)
async def test_a_malformed_message_closes_only_its_own_connection(
    frames: list[bytes | str], reason: str
) -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        answers = await raw(rig, *frames)
        assert isinstance(answers[-1], Refused)
        assert reason in answers[-1].message
        assert (await rig.publish(0)).engines == ("a",)


async def test_an_oversized_message_closes_only_its_own_connection() -> None:
    async with FakeFleet(ControlConfig(max_message_nbytes=1 << 16)) as rig:
        await rig.start({"a": 1})
        answers = await raw(rig, encode(hello_of("x")), bytes(1 << 17))
        assert [type(answer) for answer in answers] == [Welcome]
        assert (await rig.publish(0)).engines == ("a",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 99}, f"protocol_version must be {PROTOCOL_VERSION}, got 99"),
        ({"worker": "x/5", "rank": 5}, "rank must be in"),
        ({"worker": "b/0", "group": "b"}, "got the manifest of engine x/0"),
        ({"group": "a"}, "worker must be its group and rank, 'a/0'"),
        (
            {"worker": "x/0\n"},
            "worker must be 1 to 255 bytes of printable characters, got 'x/0\\\\n'",
        ),
        ({"worker": "x" * 300}, "worker must be 1 to 255 bytes"),
        ({"group": "\x1b[2J"}, "group must be 1 to 255 bytes"),
        ({"url": "file:///etc/passwd"}, "url must be http or https"),
        ({"url": "http://a/?x="}, "url must be http or https"),
        ({"url": "http://user@a/"}, "url must be http or https"),
        ({"manifest": b"junk"}, "manifest: cannot be decoded"),
        ({"incarnation": "i" * 300}, "x/0: incarnation must be 1 to 255 bytes"),
        ({"incarnation": ""}, "x/0: incarnation must be 1 to 255 bytes"),
        ({"lineage": "l" * 300}, "x/0: lineage must be 1 to 255 bytes"),
        ({"job": "a\nb"}, "x/0: job must be 1 to 255 bytes"),
        ({"host": "\x1b[2J"}, "x/0: host must be 1 to 255 bytes"),
        (
            {"registered": Registered(1, 1, math.nan)},
            "x/0: registered must be numbers in [0, 2^53)",
        ),
        ({"registered": Registered(-1, 1, 0.0)}, "x/0: registered must be numbers in [0, 2^53)"),
        ({"registered": Registered(1, 2**60, 0.0)}, "x/0: registered must be numbers"),
    ],
)
async def test_a_hello_for_another_fleet_is_refused(
    changes: dict[str, object], reason: str
) -> None:
    import msgspec

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        hello = msgspec.structs.replace(hello_of("x"), **changes)
        answers = await raw(rig, encode(hello))
        assert [type(answer) for answer in answers] == [Refused]
        assert reason in str(answers[0])
        assert (await rig.publish(0)).engines == ("a",)


async def test_a_second_process_under_a_live_name_is_refused() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        answers = await raw(rig, encode(hello_of("a", incarnation="second")))
        assert isinstance(answers[-1], Refused)
        assert "'a/0' belongs to an agent that is still connected" in answers[-1].message
        assert not answers[-1].final
        assert (await rig.publish(0)).engines == ("a",)


async def test_the_same_process_may_replace_its_own_broken_connection() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.ws_connect(rig.server.url + "/v1/agents") as socket,
        ):
            await socket.send_bytes(encode(hello_of("a")))
            welcome = CONTROLLER_FRAMES.decode(await socket.receive_bytes(timeout=5))
            assert isinstance(welcome, Welcome)


# --- processes that die --------------------------------------------------------------------------


@pytest.fixture
def engine_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(url: str, *, group: str, kill_in: str = "-") -> subprocess.Popen[bytes]:
        script = str(Path(__file__).parents[1] / "support" / "engine_process.py")
        memory = str(tmp_path / f"{group}-{len(started)}")
        process = subprocess.Popen(
            [sys.executable, script, url, TOKEN, group, memory, "2", kill_in],
            stdin=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


PHASES = ["Pause", "Write", "Verify", "Apply", "Publish"]


@pytest.mark.parametrize(
    ("mode", "phase"),
    [*((UpdateMode.IN_PLACE, p) for p in PHASES), *((UpdateMode.STAGED, p) for p in PHASES)],
)
async def test_an_engine_killed_in_any_phase_is_left_out_at_once_and_rejoins(
    mode: UpdateMode, phase: str, engine_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    doomed: list[subprocess.Popen[bytes]] = []

    def kill_in_write(command: Command) -> None:
        if isinstance(command, Write) and phase == "Write":
            os.kill(doomed[0].pid, signal.SIGKILL)
            doomed[0].wait()

    async with FakeFleet(quick(mode)) as rig:
        await rig.add_trainer(0, on_command=kill_in_write)
        await rig.add_trainer(1)
        await rig.add_engine("b")
        doomed.append(engine_process(rig.server.url, group="a", kill_in=phase))
        wait = rig.coordinator.members.wait_for_fleet
        await wait(num_trainers=2, engines=("a", "b"), deadline_s=20)
        began = time.monotonic()
        report = await rig.publish(0)
        # The closed connection ended the wait before any deadline.
        assert time.monotonic() - began < 10
        assert report.outcome is RoundOutcome.PUBLISHED
        assert report.engines == ("b",)
        assert "a" in report.left_out
        assert rig.engines["b/0"].live_versions == {0}
        assert rig.routable == {"b": 0}
        assert doomed[0].wait() == -signal.SIGKILL
        if phase == "Write":
            return
        engine_process(rig.server.url, group="a")
        await wait(num_trainers=2, engines=("a", "b"), deadline_s=20)
        assert rig.routable == {"b": 0}
        assert set((await rig.publish(1)).engines) == {"a", "b"}
        assert rig.routable == {"a": 1, "b": 1}


@BOTH
async def test_a_process_that_takes_a_name_during_a_publish_does_not_count_as_published(
    mode: UpdateMode,
) -> None:
    async with FakeFleet(quick(mode)) as rig:
        loop = asyncio.get_running_loop()
        swapped: list[object] = []

        async def swap() -> None:
            await asyncio.to_thread(rig.channels["a/0"].close)
            swapped.extend(await rig.add_engine("a", incarnation="second"))

        def hold_publish(command: Command) -> None:
            if isinstance(command, Publish):
                asyncio.run_coroutine_threadsafe(swap(), loop).result(10)

        await rig.start({"a": 1})
        await rig.add_engine("b", on_command=hold_publish)
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.PUBLISHED
        assert len(swapped) == 1
        assert rig.routable == {"b": 0}


@BOTH
async def test_a_trainer_lost_during_a_write_ends_the_round_and_old_weights_stay_whole(
    mode: UpdateMode,
) -> None:
    async with FakeFleet(quick(mode)) as rig:
        await rig.start({"a": 1, "b": 1})
        await rig.publish(0)
        channel = rig.channels["trainer/1"]
        loop = asyncio.get_running_loop()

        def vanish(command: Command) -> None:
            if isinstance(command, Write):
                # The connection breaks while the rank carries out the command.
                session = rig.coordinator.members.sessions["trainer/1"]
                asyncio.run_coroutine_threadsafe(session.close(), loop).result(10)

        rig.trainers["trainer/1"].on_command = vanish
        report = await rig.publish(1)
        assert report.outcome is not RoundOutcome.PUBLISHED
        assert "trainer/1" in report.reason
        for name in ("a/0", "b/0"):
            rank = rig.engines[name]
            if mode is UpdateMode.STAGED:
                assert rank.serving
                assert rank.live_versions == {0}
            else:
                assert not rank.serving
                assert rank.mixed_weights
        assert rig.routable == ({"a": 0, "b": 0} if mode is UpdateMode.STAGED else {})
        rig.trainers["trainer/1"].on_command = lambda _command: None
        # The late answer of trainer/1 came over the new connection, so nothing is in flight.
        assert (await rig.publish(2)).outcome is RoundOutcome.PUBLISHED
        assert rig.routable == {"a": 2, "b": 2}
        assert channel is rig.channels["trainer/1"]


class Gate:
    """Callable that stops a trainer in its next `Write` until the test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, command: Command) -> None:
        if isinstance(command, Write):
            self.entered.set()
            if not self.open.wait(20):
                raise TimeoutError("the test never opened the gate")


async def test_no_round_begins_while_a_write_of_the_last_one_may_still_land() -> None:
    async with FakeFleet(quick(UpdateMode.STAGED, write_s=0.3, fleet_s=10.0)) as rig:
        await rig.start({"a": 1})
        gate = Gate()
        rig.trainers["trainer/1"].on_command = gate
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.ABORTED
        assert "no answer in phase write" in report.reason
        again = asyncio.create_task(rig.publish(1))
        done, _ = await asyncio.wait([again], timeout=0.5)
        assert not done
        assert rig.engines["a/0"].handled.count("Verify") == 0
        gate.open.set()
        assert (await again).outcome is RoundOutcome.PUBLISHED
        assert rig.engines["a/0"].live_versions == {1}


async def test_a_late_write_with_unknown_outcome_quarantines_its_engine() -> None:
    async with FakeFleet(quick(UpdateMode.STAGED, write_s=0.3, fleet_s=0.5)) as rig:
        await rig.start({"a": 1})
        gate = Gate()
        rig.trainers["trainer/1"].on_command = gate
        rig.trainers["trainer/1"].fail_next.append(LinkStatus.UNKNOWN)
        assert (await rig.publish(0)).outcome is RoundOutcome.ABORTED
        gate.open.set()
        report = await rig.publish(1)
        assert "1 engine must be ready within 0.5 s, got 0" in report.reason
        # A new connection of the same process stays quarantined. A new process does not.
        await asyncio.to_thread(rig.channels["a/0"].close)
        await rig.add_engine("a")
        assert "1 engine must be ready" in (await rig.publish(2)).reason
        await asyncio.to_thread(rig.channels["a/0"].close)
        await rig.add_engine("a", incarnation="second")
        assert (await rig.publish(3)).outcome is RoundOutcome.PUBLISHED


async def test_staged_an_engine_that_never_verifies_is_the_only_engine_left_out() -> None:
    async with FakeFleet(ControlConfig(mode=UpdateMode.STAGED, max_rewrites=1)) as rig:
        await rig.start({"a": 1})
        broken = threading.Event()

        def flip(command: Command) -> None:
            if isinstance(command, Verify) and broken.is_set():
                rig.engines["b/0"].target[0, 0] += 1

        await rig.add_engine("b", on_command=flip)
        await rig.publish(0)
        broken.set()
        for version in (1, 2):
            report = await rig.publish(version)
            assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, ("a",))
            assert set(report.left_out) == {"b"}
            assert rig.routable == {"a": version}
            assert rig.engines["b/0"].live_versions == {0}
        broken.clear()
        assert set((await rig.publish(3)).engines) == {"a", "b"}


async def test_staged_a_quarantined_engine_still_serves_its_whole_weights() -> None:
    async with FakeFleet(quick(UpdateMode.STAGED)) as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        rig.trainers["trainer/0"].fail_next.append(LinkStatus.UNKNOWN)
        report = await rig.publish(1)
        assert report.outcome is RoundOutcome.FAILED
        assert rig.routable == {"a": 0}
        assert rig.engines["a/0"].serving
        assert rig.engines["a/0"].live_versions == {0}


async def test_a_trainer_replaced_after_its_announcement_writes_nothing() -> None:
    async with FakeFleet(quick(fleet_s=10.0)) as rig:
        await rig.start({})
        first = asyncio.create_task(rig.announce("trainer/0", 0))
        second = asyncio.create_task(rig.announce("trainer/1", 0))
        done, _ = await asyncio.wait([first, second], timeout=0.3)
        # The round waits for an engine.
        assert not done
        await asyncio.to_thread(rig.channels["trainer/1"].close)
        with pytest.raises(PeerUnreachable):
            await second
        await rig.add_trainer(1, incarnation="second")
        await rig.add_engine("a")
        report = await first
        assert report.outcome is RoundOutcome.FAILED
        assert "changed after they announced" in report.reason
        assert (await rig.publish(0)).outcome is RoundOutcome.PUBLISHED


async def test_an_announcement_ends_with_its_attempt() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        with pytest.raises(PeerTimeout):
            # The rank gives up and may change its weights.
            await rig.announce("trainer/0", 7, 0.2)
        with pytest.raises(PeerTimeout):
            # The other rank no longer waits, so no round starts.
            await rig.announce("trainer/1", 7, 0.3)
        assert rig.coordinator.fleet.published == -1
        assert "Pause" not in rig.engines["a/0"].handled
        assert (await rig.publish(8)).outcome is RoundOutcome.PUBLISHED


async def test_a_report_lost_with_its_connection_is_sent_again() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        loop = asyncio.get_running_loop()

        def cut(command: Command) -> None:
            if isinstance(command, Publish):
                session = rig.coordinator.members.sessions["trainer/0"]
                asyncio.run_coroutine_threadsafe(session.close(), loop).result(10)

        rig.engines["a/0"].on_command = cut
        report = await rig.publish(0)
        assert report.outcome is RoundOutcome.PUBLISHED


# --- the controller dies -------------------------------------------------------------------------


@BOTH
async def test_a_restarted_controller_knows_the_published_version_and_agents_reconnect(
    mode: UpdateMode, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    async with FakeFleet(quick(mode), journal_path=journal) as rig:
        await rig.start({"a": 1})
        await rig.publish(3)
        epoch = rig.coordinator.run.round_id.epoch
        await rig.close_controller()
        # The agents reconnect and report the versions that they hold.
        async with FakeFleet(quick(mode), journal_path=journal, port=rig.port) as second:
            assert second.coordinator.run.round_id.epoch > epoch
            assert second.coordinator.fleet.published == 3
            await second.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a",), deadline_s=20
            )
            assert "stale version" in (await rig.publish(3)).reason
            assert (await rig.publish(4)).outcome is RoundOutcome.PUBLISHED
            assert second.routable == {"a": 4}
        await rig.close_agents()


async def test_a_controller_without_a_journal_learns_the_version_from_its_trainers() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(6)
        run = rig.coordinator.run.lineage
        await rig.close_controller()
        async with FakeFleet(port=rig.port) as second:
            second.fabric = rig.fabric
            await second.add_engine("x", served_version=9, lineage="another run")
            await second.add_engine("y", served_version=6, lineage=run)
            await second.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a",), deadline_s=20
            )
            assert second.coordinator.fleet.published == 6
            assert second.routable == {"y": 6}
            assert second.coordinator.run.lineage != run
            assert "stale version" in (await rig.publish(6)).reason
            assert (await rig.publish(7)).outcome is RoundOutcome.PUBLISHED
            assert second.routable == {"a": 7, "x": 7, "y": 7}
        await rig.close_agents()


async def test_the_version_of_an_engine_without_trainers_is_ignored() -> None:
    async with FakeFleet() as rig:
        await rig.add_engine("a", served_version=10**15, lineage="of nobody knows what")
        assert rig.coordinator.fleet.published == -1
        assert rig.routable == {}
        await rig.start({"b": 1})
        assert (await rig.publish(0)).outcome is RoundOutcome.PUBLISHED
        assert rig.routable == {"a": 0, "b": 0}
        await rig.add_engine("c", served_version=0, lineage="of nobody knows what")
        assert "c" not in rig.routable


async def test_a_controller_with_a_journal_refuses_trainers_of_another_run(
    tmp_path: Path,
) -> None:
    async with FakeFleet(journal_path=tmp_path / "first") as rig:
        await rig.start({"a": 1})
        await rig.publish(6)
        await rig.close_controller()
        async with FakeFleet(journal_path=tmp_path / "second", port=rig.port) as second:
            with pytest.raises(ProtocolError, match="has trained for run"):
                await rig.announce("trainer/0", 7)
            assert second.coordinator.fleet.published == -1
        await rig.close_agents()


WRONG_ENGINES = {
    "by its Hello": ({"protocol_version": 1}, "w", r"protocol_version must be \d+, got 1"),
    "by planning": ({}, "not a tensor of the trainers", "IncompleteCoverage: .*not a tensor"),
}


@pytest.mark.parametrize("how", WRONG_ENGINES)
async def test_a_wait_for_a_refused_engine_ends_at_once_with_the_reason(how: str) -> None:
    changed, tensor, says = WRONG_ENGINES[how]
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        coordinator = rig.coordinator
        waiting = [
            asyncio.create_task(
                coordinator.members.wait_for_version(1, engines=("b",), deadline_s=60)
            )
        ]
        # An engine that planning refuses is a member for a moment, which ends this wait.
        if how == "by its Hello":
            there = coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a", "b"), deadline_s=60
            )
            waiting.append(asyncio.create_task(there))
        hello = fake_hello(engine_manifest("b/0", 2, tensor=tensor), group="b")
        hello = msgspec.structs.replace(hello, **changed)
        channel = AgentChannel(rig.server.url, TOKEN, lambda: hello, FakeEngineRank("b/0", 2))
        with suppress(ProtocolError):
            await asyncio.to_thread(channel.connect, 20.0)
        async with asyncio.timeout(20):
            for waits in waiting:
                with pytest.raises(EngineRefused, match=f"engine b was refused: .*{says}"):
                    await waits
        channel.close()
        await coordinator.members.wait_for_fleet(num_trainers=2, engines=("a",), deadline_s=5)
        with pytest.raises(EngineRefused, match="wait_for_fleet: engine b was refused"):
            await coordinator.members.wait_for_fleet(num_trainers=2, engines=("b",), deadline_s=5)
        # This process has the right configuration.
        await rig.add_engine("b", incarnation="second")
        await coordinator.members.wait_for_fleet(num_trainers=2, engines=("a", "b"), deadline_s=5)
        assert (await rig.publish(1)).outcome is RoundOutcome.PUBLISHED


async def test_a_wait_for_a_remote_engine_with_a_loopback_url_ends_with_the_reason() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        hello = msgspec.structs.replace(hello_of("b"), url="http://127.0.0.1:1")
        waits = asyncio.create_task(
            rig.coordinator.members.wait_for_fleet(num_trainers=2, engines=("b",), deadline_s=5)
        )
        await asyncio.sleep(0)
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)),
                headers={"Authorization": f"Bearer {TOKEN}"},
            ) as http,
            http.ws_connect(f"{rig.server.url}/v1/agents") as socket,
        ):
            await socket.send_bytes(encode(hello))
            with pytest.raises(EngineRefused, match="url must be reachable from other hosts"):
                await waits


async def test_an_engine_that_cannot_join_ends_the_wait_with_its_reason() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        waits = asyncio.create_task(
            rig.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a", "vllm"), deadline_s=60
            )
        )
        engine, trainer = (role_token(TOKEN, role) for role in (Access.ENGINE, Access.TRAINER))
        for name in ("a", "vllm"):
            await asyncio.to_thread(report_cannot_join, rig.server.url, trainer, name, "a lie")
        assert not waits.done()
        for name in ("a", "vllm"):
            why = "no kernel casts bfloat16 to float32"
            await asyncio.to_thread(report_cannot_join, rig.server.url, engine, name, why)
        with pytest.raises(EngineRefused, match="engine vllm was refused: no kernel casts"):
            await waits
        await rig.coordinator.members.wait_for_fleet(num_trainers=2, engines=("a",), deadline_s=5)


async def test_the_next_job_waits_until_a_whole_job_has_left() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        old = [rig.channels[f"trainer/{i}"] for i in range(2)]
        coming = [
            asyncio.create_task(rig.add_trainer(i, incarnation="second", job="next"))
            for i in range(2)
        ]
        done, _ = await asyncio.wait(coming, timeout=0.5)
        assert not done
        assert (await rig.publish(1)).outcome is RoundOutcome.PUBLISHED
        await asyncio.gather(*(asyncio.to_thread(channel.close) for channel in old))
        await asyncio.gather(*coming)
        assert (await rig.publish(2)).outcome is RoundOutcome.PUBLISHED


async def test_trainers_of_this_run_replace_trainers_of_an_earlier_run_that_came_first() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(6)
        await rig.close_controller()
        async with FakeFleet(port=rig.port) as second:
            await second.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a",), deadline_s=20
            )
            assert second.coordinator.fleet.published == 6
            for index in range(2):
                await second.add_trainer(index, incarnation="second", job="this run")
            with pytest.raises(ProtocolError, match="job '' was replaced by job 'this run'"):
                await rig.announce("trainer/0", 7)
            second.fabric.ranks |= rig.fabric.ranks
            assert (await second.publish(0)).outcome is RoundOutcome.PUBLISHED
            assert second.routable == {"a": 0}
            late = fake_hello(
                trainer_manifest("trainer/1", 1, 2), group="trainer", rank=1, world_size=2
            )
            with pytest.raises(ProtocolError, match="job '' was replaced"):
                await second.connect(late, second.trainers["trainer/1"])
        await rig.close_agents()


async def test_trainers_of_an_earlier_run_keep_their_place_after_publishing() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(6)
        await rig.close_controller()
        async with FakeFleet(port=rig.port) as second:
            await second.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a",), deadline_s=20
            )
            assert (await rig.publish(7)).outcome is RoundOutcome.PUBLISHED
            stray = asyncio.create_task(second.add_trainer(0, incarnation="stray", job="other"))
            done, _ = await asyncio.wait([stray], timeout=0.5)
            assert not done
            assert (await rig.publish(8)).outcome is RoundOutcome.PUBLISHED
            await rig.close_agents()
            await stray


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"epoch": 2**64 - 1}, r"epoch must be in \[0, 2\^53\), got 18446744073709551615"),
        ({"epoch": 2**53}, r"epoch must be in"),
        (
            {"received_epoch": 2**40},
            r"received_epoch must be at most 1048576 above this controller's epoch 1, got",
        ),
        ({"epoch": 2**40}, r"received_epoch must be in \[1099511627776, 2\^53\), got 0"),
        ({"round": 2**64 - 1}, r"round must be in"),
        ({"served_version": 2**53}, r"served_version must be in \[-1, 2\^53\)"),
        ({"served_version": -2}, r"served_version must be in"),
    ],
)
async def test_impossible_epochs_and_versions_are_refused(wrong: dict[str, int], says: str) -> None:
    async with FakeFleet() as rig:
        hello = msgspec.structs.replace(fake_hello(engine_manifest("e/0", 2), group="e"), **wrong)
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
            http.ws_connect(f"{rig.server.url}/v1/agents") as socket,
        ):
            await socket.send_bytes(encode(hello))
            refused = CONTROLLER_FRAMES.decode(await socket.receive_bytes())
        assert isinstance(refused, Refused)
        assert re.search(says, refused.message)
        assert refused.final
        await rig.start({"a": 1})
        assert "must be < 2^53" in (await rig.publish(2**53)).reason
        assert (await rig.publish(2**40)).outcome is RoundOutcome.PUBLISHED


@pytest.mark.parametrize(("served", "published"), [(5, 5), (4, 4), (9, 4)])
async def test_engines_decide_whether_an_uncertain_version_was_published(
    served: int, published: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(JournalEntry(JournalKind.PUBLISHED, 1, 1, 4, ("a",)))
    journal.append(JournalEntry(JournalKind.PUBLISHING, 1, 2, 5))
    journal.close()
    async with FakeFleet(journal_path=path) as rig:
        await rig.add_engine("a", served_version=served)
        assert rig.coordinator.fleet.published == published
        await rig.start({"b": 1})
        assert "stale version" in (await rig.publish(5)).reason


async def test_agents_obey_a_restarted_controller_without_epochs() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        for version in range(3):
            await rig.publish(version)
            await rig.add_engine(f"late-{version}")
        assert rig.coordinator.run.round_id.epoch > 2
        await rig.close_controller()
        async with FakeFleet(port=rig.port) as second:
            await second.coordinator.members.wait_for_fleet(
                num_trainers=2, engines=("a", "late-2"), deadline_s=20
            )
            assert "a" in (await rig.publish(9)).engines
        await rig.close_agents()


async def test_new_controller_exceeds_the_epoch_of_a_command_that_was_not_begun() -> None:
    begun, ends = threading.Event(), threading.Event()

    def hang(_command: Command) -> None:
        begun.set()
        assert ends.wait(20)

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        engine, channel = rig.engines["a/0"], rig.channels["a/0"]
        session, epoch = rig.coordinator.members.sessions["a/0"], rig.coordinator.run.round_id.epoch
        engine.on_command = hang
        await session.send(Envelope(epoch, 50, 1, Abort("the engine hangs in this command")))
        assert await asyncio.to_thread(begun.wait, 20)
        await session.send(Envelope(epoch + 3, 51, 1, Abort("the engine does not begin this")))
        await rig.close_controller()
        assert await asyncio.to_thread(channel.wait_disconnected, 20)
        engine.on_command = lambda _command: None
        ends.set()
        async with FakeFleet(port=rig.port) as second:
            members = second.coordinator.members
            await members.wait_for_fleet(num_trainers=2, engines=("a",), deadline_s=20)
            hello = members.sessions["a/0"].agent.hello
            assert (hello.epoch, hello.received_epoch) == (epoch, epoch + 3)
            assert (await rig.publish(9)).engines == ("a",)
        await rig.close_agents()


def test_a_torn_last_line_of_a_journal_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal"
    first = Journal(path)
    first.append(JournalEntry(JournalKind.PUBLISHED, 2, 5, 7, ("a",)))
    first.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"published","epoch":3,"rou')
    for epoch in (3, 4, 5):
        journal = Journal(path)
        assert journal.summary.published == 7
        assert journal.summary.epoch == epoch - 1
        journal.append(JournalEntry(JournalKind.STARTED, epoch, 5, 7))
        journal.close()


def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path)
    first.start()
    first.close()
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(ConfigError, match="line 2"):
        Journal(path)


# --- the agent's side ----------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.commands: list[Command] = []

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Done:
        self.commands.append(command)
        if isinstance(command, Write) and command.version == 1:
            raise TransferOutcomeUnknown("deadline passed")
        if isinstance(command, Write | RelayWrite | Relay):
            raise MemoryError("writes may go on")  # noqa: TRY004
        if isinstance(command, Verify):
            raise LookupError("a defect")  # noqa: TRY004
        return Done(str(len(self.commands)))


async def test_an_agent_answers_a_repeated_command_from_memory_and_refuses_old_ones() -> None:
    from aiohttp import web

    envelopes = [
        Envelope(2, 5, 1, Prepare(1)),
        Envelope(2, 5, 1, Prepare(1)),
        Envelope(2, 4, 9, Prepare(0)),
        Envelope(1, 9, 9, Prepare(0)),
        Envelope(2, 6, 1, Write(1, ("a",), 1.0)),
        Envelope(2, 6, 2, Verify(1, {})),
        Envelope(2, 5, 1, Prepare(1)),
        Envelope(3, 1, 1, Prepare(2)),
        Envelope(2, 6, 1, Write(1, ("a",), 1.0)),
        Envelope(3, 1, 2, Write(2, ("a",), 1.0)),
        Envelope(3, 1, 3, RelayWrite(2, ("a",), 1.0)),
        Envelope(3, 1, 4, Relay(2, 1.0)),
    ]
    replies: list[Reply[Result]] = []

    async def controller(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive_bytes()
        await socket.send_bytes(encode(Welcome(1, "run")))
        for envelope in envelopes:
            await socket.send_bytes(encode(envelope))
        for _ in envelopes:
            reply = AGENT_FRAMES.decode(await socket.receive_bytes())
            assert isinstance(reply, Reply)
            replies.append(reply)
        finished.set()
        await socket.close()
        return socket

    finished = asyncio.Event()
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    server.add_routes([web.get("/v1/agents", controller)])
    await server.start()
    handler = Recorder()
    channel = AgentChannel(server.url, TOKEN, lambda: hello_of("a"), handler)
    await asyncio.to_thread(channel.connect, 5.0)
    await asyncio.wait_for(finished.wait(), 10)
    await asyncio.to_thread(channel.close)
    await server.close()
    kinds = [r.result.kind if isinstance(r.result, Failure) else "done" for r in replies]
    assert kinds == [
        "done",
        "done",
        FailureKind.STALE,
        FailureKind.STALE,
        FailureKind.UNKNOWN,
        FailureKind.FAILED,
        "done",
        "done",
        FailureKind.UNKNOWN,
        *(FailureKind.UNKNOWN,) * 3,
    ]
    assert replies[0] == replies[1] == replies[6]
    assert [type(c).__name__ for c in handler.commands] == [
        "Prepare",
        "Write",
        "Verify",
        "Prepare",
        "Write",
        "RelayWrite",
        "Relay",
    ]
    assert "LookupError: a defect" in str(replies[5])


async def test_publish_names_the_trainer_ranks_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("windlass.control.publish_requests.NAME_MISSING_S", 0.05)
    missing = "trainer/2 (not connected); trainer/1 (has not called publish)"
    async with FakeFleet(quick(), num_trainers=3) as rig:
        for index in range(2):
            await rig.add_trainer(index)
        with pytest.raises(PeerTimeout) as raised:
            await rig.announce("trainer/0", 0, deadline_s=0.3)
        assert str(raised.value) == (
            f"publish: no report of version 0 arrived within 0.3 s: the update waited for {missing}"
        )
        assert f"publish waits for {missing}" in caplog.text
        # The controller has discarded the announcement.
        await rig.add_trainer(2)
        await rig.add_engine("a")
        assert (await rig.publish(1)).outcome is RoundOutcome.PUBLISHED


async def test_publish_does_not_name_ranks_that_are_a_few_seconds_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time starts at the first announcement of this version, not of an earlier version."""
    monkeypatch.setattr("windlass.control.publish_requests.NAME_MISSING_S", 2.0)
    async with FakeFleet(quick()) as rig:
        await rig.start({"a": 1})
        await rig.publish(0)
        await asyncio.sleep(1.5)
        first = asyncio.create_task(rig.announce("trainer/0", 1))
        await asyncio.sleep(1.0)
        assert (await rig.announce("trainer/1", 1)).outcome is RoundOutcome.PUBLISHED
        assert (await first).outcome is RoundOutcome.PUBLISHED
        assert "publish waits for" not in caplog.text
