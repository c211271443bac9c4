"""Updates that a trainer drives end whole at every engine, whichever call fails or times out."""

from __future__ import annotations

import asyncio
import errno
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from fake_fleet import TOKEN, FakeFleet, until

import windlass
from windlass.backends.push_leaders import PushUpdates
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.control.journal import Journal, JournalEntry, JournalKind
from windlass.control.messages import Abort, Apply, Command, Pause, Verify
from windlass.control.push_messages import CallbackRequest, PauseCall, ReadFiles
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.round_state import Phase
from windlass.control.routes import status_of
from windlass.errors import ConfigError, PeerTimeout, PlanError, RoundAborted
from windlass.layout.dtypes import DType
from windlass.net.messages import encode
from windlass.observability.operations import Operations
from windlass.rollout import BatchQueue, RolloutController, StaticEngines
from windlass.trainers.callback import RolloutCallback, WeightGroup
from windlass.transfer.bindings import WireTensor

WITHIN_S = 20.0


@asynccontextmanager
async def serving_version_0(
    b_does: Callable[[Command], None],
) -> AsyncIterator[tuple[FakeFleet, RolloutCallback]]:
    """Yield a fleet with engines a and b at version 0. Later commands to b pass `b_does` first."""
    armed = threading.Event()

    def on_command(command: Command) -> None:
        if armed.is_set():
            b_does(command)

    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        await rig.add_engine("b", on_command=on_command)
        await rig.publish(0)
        armed.set()
        with RolloutCallback(rig.server.url, TOKEN, deadline_s=WITHIN_S) as leader:
            yield rig, leader


def nothing(_command: Command) -> None:
    return


async def serves(rig: FakeFleet, *names: str) -> None:
    """Return when these ranks have carried out the commands that end an update."""
    await until(lambda: all(rig.engines[name].serving for name in names))


async def test_an_engine_that_applied_a_push_is_published_after_its_leader_timed_out() -> None:
    """The engine must not generate with new weights under the old version when the session ends."""
    go_on = threading.Event()

    def hang(command: Command) -> None:
        if isinstance(command, Apply):
            go_on.wait(WITHIN_S)

    async with serving_version_0(hang) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation, session_s=2.0)
        with pytest.raises(PeerTimeout):
            await asyncio.to_thread(leader.continue_generation, 1, deadline_s=1.0)
        await rig.coordinator.members.wait_for_version(1, deadline_s=WITHIN_S)
        await serves(rig, "a/0")
        a, b = rig.engines["a/0"], rig.engines["b/0"]
        # The controller may have bound the engine again already.
        assert (a.version, "Publish" in a.handled[-2:]) == (1, True)
        assert rig.routable == {"a": 1}
        go_on.set()
        await until(lambda: b.mixed_weights)
        assert not b.serving


async def test_a_failed_pause_leaves_no_engine_paused_and_no_round_waiting() -> None:
    refusals = [RoundAborted("b cannot pause now")]

    def refuse_once(command: Command) -> None:
        if isinstance(command, Pause) and refusals:
            raise refusals.pop()

    async with serving_version_0(refuse_once) as (rig, leader):
        with pytest.raises(RoundAborted, match="b cannot pause now"):
            await asyncio.to_thread(leader.pause_generation, session_s=600.0)
        await serves(rig, "a/0", "b/0")
        async with asyncio.timeout(WITHIN_S):
            assert set((await rig.publish(1)).engines) == {"a", "b"}


async def test_a_push_that_one_engine_received_incompletely_is_applied_nowhere() -> None:
    lacking = [PlanError("b/0: 3 tensors did not arrive")]

    def lack_once(command: Command) -> None:
        if isinstance(command, Verify) and lacking:
            raise lacking.pop()

    async with serving_version_0(lack_once) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        with pytest.raises(RoundAborted, match="3 tensors did not arrive"):
            await asyncio.to_thread(leader.continue_generation, 1)
        await serves(rig, "a/0", "b/0")
        handled = [name for name in rig.engines["a/0"].handled if name != "ConnectEngine"]
        # The controller may have bound the engine again already.
        assert handled[-2:] == ["Verify", "Abort"]
        assert rig.routable == {"a": 0, "b": 0}
        await asyncio.to_thread(leader.pause_generation)
        await asyncio.to_thread(leader.continue_generation, 1)
        assert rig.routable == {"a": 1, "b": 1}


async def test_a_version_that_cannot_be_recorded_is_not_pushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = Journal.append

    def full(journal: Journal, entry: JournalEntry) -> None:
        if entry.kind is JournalKind.PUBLISHING:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, entry)

    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation, session_s=600.0)
        monkeypatch.setattr(Journal, "append", full)
        with pytest.raises(RoundAborted, match="No space left on device"):
            await asyncio.to_thread(leader.continue_generation, 1)
        await serves(rig, "a/0", "b/0")
        assert "Apply" not in rig.engines["a/0"].handled[-3:]
        assert rig.routable == {"a": 0, "b": 0}


async def test_a_leader_that_comes_during_a_failing_pause_gets_a_lasting_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carry_out, pausing = PushUpdates.carry_out, asyncio.Semaphore(0)

    async def counted(self: PushUpdates, asked: CallbackRequest) -> tuple[str, ...]:
        if isinstance(asked.call, PauseCall):
            pausing.release()
        return await carry_out(self, asked)

    monkeypatch.setattr(PushUpdates, "carry_out", counted)
    both_wait, refusals = threading.Event(), [RoundAborted("b cannot pause now")]

    def refuse_once(command: Command) -> None:
        if isinstance(command, Pause) and refusals:
            both_wait.wait(WITHIN_S)
            raise refusals.pop()

    async with serving_version_0(refuse_once) as (rig, first):
        failing = asyncio.create_task(asyncio.to_thread(first.pause_generation))
        await pausing.acquire()
        with RolloutCallback(rig.server.url, TOKEN, leader="second", deadline_s=WITHIN_S) as second:
            joining = asyncio.create_task(asyncio.to_thread(second.pause_generation))
            await pausing.acquire()
            # Let the second call wait for the first.
            await asyncio.sleep(0)
            both_wait.set()
            with pytest.raises(RoundAborted, match="b cannot pause now"):
                await failing
            await joining
            assert not any(rig.engines[name].serving for name in ("a/0", "b/0"))
            await asyncio.to_thread(second.continue_generation, 1)
        assert rig.routable == {"a": 1, "b": 1}


async def test_a_leader_that_has_not_paused_cannot_send() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        with RolloutCallback(rig.server.url, TOKEN, leader="other", deadline_s=WITHIN_S) as other:
            sent = other.update_weights_from_disk("/nowhere")
            with pytest.raises(RoundAborted, match="other must call pause_generation first"):
                await asyncio.wrap_future(sent)
        assert "ReadFiles" not in rig.engines["a/0"].handled


async def test_a_call_of_an_ended_update_does_not_run_in_the_next_update() -> None:
    go_on, reads = threading.Event(), threading.Event()

    def hang(command: Command) -> None:
        if isinstance(command, ReadFiles) and not go_on.is_set():
            reads.set()
            go_on.wait(WITHIN_S)

    async with serving_version_0(hang) as (rig, first):
        with (
            RolloutCallback(rig.server.url, TOKEN, leader="late", deadline_s=WITHIN_S) as late,
            RolloutCallback(rig.server.url, TOKEN, leader="next", deadline_s=WITHIN_S) as following,
        ):
            await asyncio.to_thread(first.pause_generation, session_s=1.0)
            await asyncio.to_thread(late.pause_generation)
            old = rig.coordinator.rounds.driver
            held = first.update_weights_from_disk("/of/the/first")
            await asyncio.to_thread(reads.wait, WITHIN_S)
            # Both calls wait until the engines have carried out the first call: first the next update, then the late call.
            begins = asyncio.create_task(asyncio.to_thread(following.pause_generation))
            await asyncio.sleep(0.3)
            stale = late.update_weights_from_disk("/of/the/late")
            await until(lambda: rig.coordinator.rounds.driver is not old)
            go_on.set()
            await begins
            await asyncio.wrap_future(held)
            with pytest.raises(RoundAborted, match="the update of this call has ended"):
                await asyncio.wrap_future(stale)
            assert rig.engines["a/0"].handled.count("ReadFiles") == 1
            await asyncio.to_thread(following.continue_generation, 1)
        assert rig.routable == {"a": 1, "b": 1}


async def test_a_leader_that_has_not_paused_cannot_continue() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        with (
            RolloutCallback(rig.server.url, TOKEN, leader="other", deadline_s=WITHIN_S) as other,
            pytest.raises(RoundAborted, match="other must call pause_generation first"),
        ):
            await asyncio.to_thread(other.continue_generation, 7)
        with pytest.raises(RoundAborted, match="other must call pause_generation first"):
            await asyncio.to_thread(leader.continue_generation, 1)
        await serves(rig, "a/0", "b/0")
        assert rig.routable == {"a": 0, "b": 0}


async def test_leaders_that_send_different_versions_publish_none() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        with RolloutCallback(rig.server.url, TOKEN, leader="other", deadline_s=WITHIN_S) as other:
            await asyncio.to_thread(leader.pause_generation)
            await asyncio.to_thread(other.pause_generation)
            found = await asyncio.gather(
                asyncio.to_thread(leader.continue_generation, 1),
                asyncio.to_thread(other.continue_generation, 2),
                return_exceptions=True,
            )
        for error in found:
            assert isinstance(error, RoundAborted), error
            assert "must be equal for all leaders" in str(error)
        await serves(rig, "a/0", "b/0")
        assert rig.routable == {"a": 0, "b": 0}


async def test_a_restarted_leader_that_had_sent_everything_waits_for_the_next_update() -> None:
    """Its tensors of the next version must not arrive in the update that other leaders have not ended."""
    async with serving_version_0(nothing) as (rig, leader):
        with (
            RolloutCallback(rig.server.url, TOKEN, leader="other", deadline_s=WITHIN_S) as other,
            RolloutCallback(rig.server.url, TOKEN, deadline_s=WITHIN_S) as restarted,
        ):
            await asyncio.to_thread(leader.pause_generation)
            await asyncio.to_thread(other.pause_generation)
            ends = asyncio.create_task(asyncio.to_thread(leader.continue_generation, 1))
            await asyncio.sleep(0.3)
            waits = asyncio.create_task(asyncio.to_thread(restarted.pause_generation))
            done, _ = await asyncio.wait({ends, waits}, timeout=1.0)
            assert not done
            await asyncio.to_thread(other.continue_generation, 1)
            await ends
            assert rig.coordinator.fleet.published == 1
            await waits
            await asyncio.to_thread(restarted.continue_generation, 2)
        assert rig.routable == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"deadline_s": math.nan}, "deadline_s must be in (0, 86400], got nan"),
        ({"deadline_s": math.inf}, "deadline_s must be in (0, 86400], got inf"),
        ({"deadline_s": -1.0}, "deadline_s must be in"),
        ({"call": PauseCall(math.nan)}, "session_s must be in (0, 86400], got nan"),
        ({"call": PauseCall(1e9)}, "session_s must be in"),
        ({"call": PauseCall(1.0, lease_s=-1.0)}, "lease_s must be in"),
        ({"leader": "pp0\n"}, "leader must be 1 to 255 bytes of printable characters"),
        ({"request_id": "r" * 256}, "request_id must be 1 to 255 bytes"),
    ],
)
async def test_a_callback_out_of_bounds_is_a_bad_request(
    asked: dict[str, object], says: str
) -> None:
    request = msgspec.structs.replace(CallbackRequest("r", "pp0", PauseCall(1.0), 1.0), **asked)
    async with serving_version_0(nothing) as (rig, _):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{rig.server.url}/v1/callback", data=encode(request)) as answer,
        ):
            assert (answer.status, says in await answer.text()) == (400, True)
        assert (await rig.publish(1)).engines == ("a", "b")


async def test_an_invalid_version_resumes_the_engines() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        with pytest.raises(ConfigError, match="must be an integer >= 0, got 'one'"):
            await asyncio.to_thread(leader.continue_generation, "one")  # type: ignore[arg-type]
        await serves(rig, "a/0", "b/0")
        assert rig.routable == {"a": 0, "b": 0}


async def test_an_engine_resumes_within_the_deadline_of_the_controller() -> None:
    told: list[Command] = []
    async with FakeFleet(ControlConfig(deadlines=PhaseDeadlines(publish_s=10.0))) as rig:
        await rig.start({})
        await rig.add_engine("a", on_command=told.append)
        await rig.publish(0)
        with RolloutCallback(rig.server.url, TOKEN, deadline_s=WITHIN_S) as leader:
            await asyncio.to_thread(leader.pause_generation)
            with pytest.raises(ConfigError):
                await asyncio.to_thread(leader.continue_generation, -1)
        await serves(rig, "a/0")
    assert [command.deadline_s for command in told if isinstance(command, Abort)] == [8.0]


async def test_leaders_publish_only_if_all_give_a_version() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        with RolloutCallback(rig.server.url, TOKEN, leader="other", deadline_s=WITHIN_S) as other:
            await asyncio.to_thread(leader.pause_generation)
            await asyncio.to_thread(other.pause_generation)
            bad, good = await asyncio.gather(
                asyncio.to_thread(leader.continue_generation, -1),
                asyncio.to_thread(other.continue_generation, 1),
                return_exceptions=True,
            )
        assert isinstance(bad, ConfigError)
        assert "leader has no version to publish" in str(good)
        await serves(rig, "a/0", "b/0")
        assert rig.routable == {"a": 0, "b": 0}


async def test_a_push_appears_in_every_record_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check reports, listeners, phases, counts, metrics, the status page and the journal."""
    append, kinds = Journal.append, list[JournalKind]()

    def noted(journal: Journal, entry: JournalEntry) -> None:
        kinds.append(entry.kind)
        append(journal, entry)

    monkeypatch.setattr(Journal, "append", noted)
    told: list[UpdateReport] = []
    phases: list[tuple[int, Phase]] = []
    async with FakeFleet() as rig:
        policy = windlass.StalenessPolicy(1, 4, 4)
        async with RolloutController(StaticEngines([]), policy, token=TOKEN) as rollouts:
            operations = Operations(rig.coordinator, rollouts, BatchQueue())
            rig.coordinator.on_update(told.append)
            rig.coordinator.rounds.on_phase(lambda version, phase: phases.append((version, phase)))
            await rig.add_engine("a", ranks=2)
            with RolloutCallback(rig.server.url, TOKEN, deadline_s=WITHIN_S) as leader:
                await asyncio.to_thread(leader.pause_generation)
                assert operations.overview()["phase"] == "write of a push"
                specs = [WireTensor(f"w{index}", DType.FLOAT32, (4, 2)) for index in range(2)]
                sent = leader.update_weights_from_distributed("weights", specs, stamp="")
                await asyncio.wrap_future(sent)
                await asyncio.to_thread(leader.continue_generation, 3)
            (report,) = told
            assert [*rig.coordinator.reports] == [report]
            assert status_of(rig.coordinator)["updates"] == 1
            overview = operations.overview()
            metrics = operations.metrics.render(
                version=3, engines=rig.coordinator.fleet.states(), rollouts={}
            )
    assert (report.version, report.outcome) == (3, RoundOutcome.PUBLISHED)
    assert report.engines == ("a",)
    assert [*report.phase_s] == ["prepare", "write", "verify", "apply", "publish"]
    assert report.update_s > report.pause_s > 0
    assert report.update_s > report.wire_s > 0
    # These are two tensors, sent to two ranks each.
    assert report.nbytes == 2 * 2 * 32
    shown = [Phase.PREPARE, Phase.WRITE, Phase.VERIFY, Phase.APPLY, Phase.PUBLISH, Phase.DONE]
    assert [phase for _, phase in phases] == shown
    assert (overview["phase"], len(overview["rounds"])) == ("", 1)
    assert b'windlass_rounds_total{outcome="published"} 1.0' in metrics
    assert b"windlass_round_pause_seconds_count 1.0" in metrics
    assert b'windlass_engines{state="serving"} 1.0' in metrics
    assert b'windlass_engines{state="silent"} 0.0' in metrics
    began, publishing, published = (
        JournalKind.ROUND_BEGAN,
        JournalKind.PUBLISHING,
        JournalKind.PUBLISHED,
    )
    assert kinds == [JournalKind.STARTED, began, publishing, published]


async def test_an_aborted_push_is_reported() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        told: list[UpdateReport] = []
        rig.coordinator.on_update(told.append)
        await asyncio.to_thread(leader.pause_generation)
        with pytest.raises(RoundAborted, match="must be > 0"):
            await asyncio.to_thread(leader.continue_generation, 0)
        assert [(r.version, r.outcome, set(r.left_out)) for r in told] == [
            (-1, RoundOutcome.ABORTED, {"a", "b"})
        ]
        assert rig.coordinator.run.journal.recent[-1].kind is JournalKind.ROUND_ENDED
        await serves(rig, "a/0", "b/0")


async def test_an_engine_that_dies_during_a_push_is_the_only_engine_left_out() -> None:
    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        await asyncio.to_thread(rig.channels.pop("b/0").close)
        async with asyncio.timeout(WITHIN_S):
            while leader_ranks := await asyncio.to_thread(leader.engine_ranks):
                if leader_ranks == ("a/0",):
                    break
        await asyncio.to_thread(leader.continue_generation, 1)
        assert rig.routable == {"a": 1}


async def test_an_engine_that_does_not_pause_in_time_is_the_only_one_left_out_of_a_push() -> None:
    go_on = threading.Event()

    def hang(command: Command) -> None:
        if isinstance(command, Pause):
            go_on.wait(WITHIN_S)

    async with serving_version_0(hang) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation, deadline_s=2.0)
        assert await asyncio.to_thread(leader.engine_ranks) == ("a/0",)
        await asyncio.to_thread(leader.continue_generation, 1)
        assert rig.routable == {"a": 1}
        go_on.set()


def test_a_group_of_an_unknown_fabric_is_refused_by_name() -> None:
    with (
        RolloutCallback("http://127.0.0.1:1", TOKEN) as leader,
        pytest.raises(ConfigError, match=r"WeightGroup: fabric must be one of .*, got 'ncc'"),
    ):
        WeightGroup(leader, "weights", fabric="ncc")  # type: ignore[arg-type]


async def test_a_failed_push_is_reported_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with serving_version_0(nothing) as (rig, leader):
        await asyncio.to_thread(leader.pause_generation)
        monkeypatch.setattr(type(rig.coordinator.fleet), "note_round", fail)
        with pytest.raises(RoundAborted, match="version 1 was not published: ZeroDivisionError"):
            await asyncio.to_thread(leader.continue_generation, 1)
        report = rig.coordinator.reports[-1]
        assert (report.version, report.outcome) == (1, RoundOutcome.FAILED)
