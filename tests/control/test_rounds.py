"""The round machine under every order of events: no engine ever serves mixed weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import pytest
from fake_agents import (
    CORRUPT,
    FakeEngineRank,
    FakeFabric,
    FakeTrainerRank,
    payload,
    payload_digest,
)
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from round_rules import RoundRules

from windlass.backends.push_leaders import PushDelivery
from windlass.config import (
    ControlConfig,
    PhaseDeadlines,
    UpdateMode,
)
from windlass.control.delivery import Delivery, reply_budget_s
from windlass.control.messages import (
    Abort,
    Apply,
    BeginDriven,
    Command,
    Done,
    Failure,
    FailureKind,
    Pause,
    Prepare,
    Publish,
    Release,
    Result,
    Verified,
    Verify,
    Write,
)
from windlass.control.report import Measure, RoundOutcome
from windlass.control.round_state import EngineOutcome, Phase
from windlass.control.rounds import (
    AgentLost,
    DeadlinePassed,
    EnterPhase,
    Event,
    Finish,
    Instruction,
    Replied,
    RoundMachine,
    RoundSpec,
    Send,
    Sent,
)
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written
from windlass.transports.peers import PeerEndpoint

TRAINERS = ("trainer/0", "trainer/1")
ENGINES = {"a": ("a/0", "a/1"), "b": ("b/0",), "c": ("c/0",)}
ENGINE_OF = {worker: name for name, workers in ENGINES.items() for worker in workers}
LINKS = frozenset((t, w) for t in TRAINERS for w in ENGINE_OF)
LETHAL = (LinkStatus.FAILED, LinkStatus.UNKNOWN, LinkStatus.UNREACHABLE)


def make_spec(
    mode: UpdateMode,
    version: int = 1,
    *,
    trainers: tuple[str, ...] = TRAINERS,
    engines: Mapping[str, tuple[str, ...]] = ENGINES,
    links: frozenset[tuple[str, str]] = LINKS,
    delivery: Delivery | None = None,
    max_rewrites: int = 2,
    releasing: tuple[str, ...] = (),
    **deadlines: float,
) -> RoundSpec:
    return RoundSpec(
        version=version,
        config=ControlConfig(
            mode=mode, max_rewrites=max_rewrites, deadlines=PhaseDeadlines(**deadlines)
        ),
        trainers=trainers,
        engines=engines,
        links=links,
        delivery=delivery or Delivery(),
        releasing=releasing,
    )


class World:
    """Fake ranks with inboxes and outboxes, and the machine that drives them."""

    def __init__(self, mode: UpdateMode, releasing: tuple[str, ...] = ()) -> None:
        self.mode, self.releasing = mode, releasing
        self.fabric = FakeFabric()
        self.engines: dict[str, FakeEngineRank] = {}
        for worker in ENGINE_OF:
            self.start_engine(worker)
            self.engines[worker].live[:] = [payload(0, s) for s in range(len(TRAINERS))]
            self.engines[worker].version = 0
        bindings = [DestinationBinding(w, PeerEndpoint("fake", "", ""), (), ()) for w in ENGINE_OF]
        self.trainers = {t: FakeTrainerRank(t, self.fabric, mode=mode) for t in TRAINERS}
        for index, trainer in enumerate(self.trainers.values()):
            trainer.bind(index, bindings)
        self.alive = {*ENGINE_OF, *TRAINERS}
        self.quarantined: set[str] = set()
        self.mixed_weights: set[str] = set()
        self.given_out = {0}
        self.published = 0
        self.version = 0
        self.log: list[Finish] = []
        self.stray_writes: list[tuple[str, int, int]] = []
        self.handled_events: list[Event] = []

    def start_engine(self, worker: str) -> None:
        rank = FakeEngineRank(worker, len(TRAINERS), mode=self.mode)
        rank.sources = TRAINERS
        self.engines[worker] = self.fabric.ranks[worker] = rank

    def begin(self, max_rewrites: int = 1) -> None:
        self.version += 1
        self.taking_part = {
            name: workers
            for name, workers in ENGINES.items()
            if name not in self.quarantined and set(workers) <= self.alive
        }
        workers = {w for ws in self.taking_part.values() for w in ws}
        self.machine = RoundMachine(
            make_spec(
                self.mode,
                self.version,
                engines=self.taking_part,
                links=frozenset(link for link in LINKS if link[1] in workers),
                max_rewrites=max_rewrites,
                releasing=self.releasing,
            )
        )
        for trainer in self.trainers.values():
            trainer.has_released = False
        self.inbox: dict[str, deque[Send]] = {w: deque() for w in (*TRAINERS, *ENGINE_OF)}
        self.outbox: dict[str, deque[Replied]] = {w: deque() for w in (*TRAINERS, *ENGINE_OF)}
        self.entry = 0
        self.finish: Finish | None = None
        self.rules = RoundRules()
        # The driver drops replies of other rounds.
        self.handled_events.clear()
        self.carry_out(self.machine.start())

    def post(self, event: Event) -> None:
        self.handled_events.append(event)
        self.carry_out(self.machine.handle(event))

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            assert self.finish is None, "nothing may follow Finish"
            if isinstance(instruction, EnterPhase):
                self.entry = instruction.entry
                self.rules.begins(instruction.phase)
                if instruction.phase is Phase.PUBLISH:
                    self.given_out.add(self.version)
            elif isinstance(instruction, Finish):
                self.conclude(instruction)
            elif instruction.worker in self.alive:
                self.inbox[instruction.worker].append(instruction)
        assert not self.rules.broken(self.machine)
        for worker in {i.worker for i in instructions if isinstance(i, Send) and i.expects_reply}:
            if worker not in self.alive and self.finish is None:
                self.post(AgentLost(worker, "not connected"))

    def conclude(self, finish: Finish) -> None:
        self.finish = finish
        self.log.append(finish)
        for name, outcome in finish.engines.items():
            if outcome is EngineOutcome.QUARANTINED:
                self.quarantined.add(name)
        if finish.report.outcome is RoundOutcome.PUBLISHED:
            self.published = self.version

    def execute(self, worker: str) -> None:
        """Let the agent carry out its next command and answer."""
        send = self.inbox[worker].popleft()
        rank = self.engines.get(worker) or self.trainers[worker]
        result = rank.handle(send.command, epoch=1, round_number=1)
        if send.expects_reply:
            self.outbox[worker].append(Replied(worker, send.seq, result))

    def answer(self, worker: str) -> None:
        self.post(self.outbox[worker].popleft())

    def deliver_notices(self) -> None:
        for worker, inbox in self.inbox.items():
            while inbox:
                self.execute(worker)

    def kill(self, worker: str) -> None:
        self.alive.discard(worker)
        self.inbox[worker].clear()
        self.outbox[worker].clear()
        self.post(AgentLost(worker, "killed"))

    def check(self) -> None:
        for worker, rank in self.engines.items():
            if worker in self.alive and rank.serving:
                assert rank.live_versions == {rank.version}, f"{worker} serves a mixture"
                assert rank.version in self.given_out
                if rank.version == self.version and self.finish is None:
                    assert self.machine.phase is Phase.PUBLISH


FAULTS = st.tuples(st.lists(st.sampled_from(LETHAL), max_size=2), st.integers(0, 2))


class Rounds(RuleBasedStateMachine):
    """Several rounds in a row, with any fault at any time."""

    @initialize(
        mode=st.sampled_from(UpdateMode),
        rewrites=st.integers(0, 2),
        faults=FAULTS,
        releasing=st.sampled_from([(), TRAINERS[:1], TRAINERS]),
    )
    def begin(
        self,
        mode: UpdateMode,
        rewrites: int,
        faults: tuple[list[LinkStatus], int],
        releasing: tuple[str, ...],
    ) -> None:
        self.world = World(mode, releasing)
        self.made_up: list[Replied] = []
        self.rewrites = rewrites
        (
            self.world.trainers["trainer/1"].fail_next,
            self.world.trainers["trainer/1"].corrupt_next,
        ) = (
            list(faults[0]),
            faults[1],
        )
        self.world.begin(rewrites)

    def running(self) -> bool:
        return self.world.finish is None

    def busy(self) -> list[str]:
        return sorted(w for w, inbox in self.world.inbox.items() if inbox)

    def answers(self) -> list[str]:
        return sorted(w for w, outbox in self.world.outbox.items() if outbox)

    @precondition(lambda self: self.running())
    @rule()
    def everything_under_way_arrives(self) -> None:
        phase = self.world.entry
        while self.running() and self.world.entry == phase:
            moved = self.busy() + self.answers()
            for worker in self.busy():
                self.world.execute(worker)
            for worker in self.answers():
                if self.running() and self.world.outbox[worker]:
                    self.world.answer(worker)
            if not moved:
                # A message was lost, so only the deadline ends this phase.
                return

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def an_agent_works(self, data: st.DataObject) -> None:
        self.world.execute(data.draw(st.sampled_from(self.busy())))

    @precondition(lambda self: self.answers())
    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        self.world.answer(data.draw(st.sampled_from(self.answers())))

    @precondition(lambda self: self.answers())
    @rule(data=st.data())
    def an_answer_is_lost(self, data: st.DataObject) -> None:
        self.world.outbox[data.draw(st.sampled_from(self.answers()))].popleft()

    @precondition(lambda self: self.world.handled_events)
    @rule(data=st.data())
    def an_old_event_comes_again(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.world.handled_events[-20:]))
        # A made-up answer may fit a command that was sent later.
        assume(not isinstance(event, AgentLost) and event not in self.made_up)
        self.world.post(event)

    @rule(worker=st.sampled_from(sorted(LINKS)), seq=st.integers(0, 60))
    def an_answer_that_fits_nothing_arrives(self, worker: tuple[str, str], seq: int) -> None:
        pending = {worker for worker, _ in self.world.machine.pending.values()}
        for name in worker:
            if name not in pending:
                answer = Replied(name, seq, Done())
                self.made_up.append(answer)
                self.world.post(answer)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), kind=st.sampled_from([FailureKind.FAILED, FailureKind.UNKNOWN]))
    def an_agent_fails(self, data: st.DataObject, kind: FailureKind) -> None:
        worker = data.draw(st.sampled_from(sorted(ENGINE_OF)))
        inbox = self.world.inbox[worker]
        assume(inbox and inbox[0].expects_reply)
        send = inbox.popleft()
        self.world.outbox[worker].append(Replied(worker, send.seq, Failure(kind, "told to")))

    @rule(trainer=st.sampled_from(TRAINERS), status=st.sampled_from(LETHAL))
    def the_next_link_fails(self, trainer: str, status: LinkStatus) -> None:
        self.world.trainers[trainer].fail_next.append(status)

    @rule(trainer=st.sampled_from(TRAINERS), links=st.integers(1, 5))
    def the_next_links_deliver_wrong_bytes(self, trainer: str, links: int) -> None:
        self.world.trainers[trainer].corrupt_next = links

    @precondition(lambda self: self.running())
    @rule(worker=st.sampled_from([*TRAINERS, *ENGINE_OF]))
    def an_agent_dies(self, worker: str) -> None:
        assume(worker in self.world.alive)
        self.world.kill(worker)

    @precondition(lambda self: self.running())
    @rule()
    def the_deadline_passes(self) -> None:
        self.world.post(DeadlinePassed(self.world.entry))

    @precondition(lambda self: not self.running())
    @rule(faults=FAULTS)
    def the_next_round_begins(self, faults: tuple[list[LinkStatus], int]) -> None:
        world = self.world
        # The coordinator waits for writers that never answered. Here they answer or are replaced.
        world.deliver_notices()
        for trainer in world.trainers.values():
            trainer.fail_next.clear()
            trainer.corrupt_next = 0
        for worker in (*ENGINE_OF, *TRAINERS):
            if worker not in world.alive and worker in ENGINE_OF:
                world.start_engine(worker)
                world.quarantined.discard(ENGINE_OF[worker])
            world.alive.add(worker)
        world.trainers["trainer/0"].fail_next = list(faults[0])
        world.trainers["trainer/0"].corrupt_next = faults[1]
        world.begin(self.rewrites)

    @invariant()
    def no_mixture_is_served(self) -> None:
        self.world.check()

    @invariant()
    def a_published_engine_serves_the_version(self) -> None:
        finish = self.world.finish
        if finish is None:
            return
        for name, outcome in finish.engines.items():
            for worker in ENGINES[name]:
                if outcome is EngineOutcome.PUBLISHED and worker in self.world.alive:
                    rank = self.world.engines[worker]
                    assert rank.serving
                    assert rank.version == self.world.version
        assert EngineOutcome.ACTIVE not in finish.engines.values()
        published = EngineOutcome.PUBLISHED in finish.engines.values()
        assert published == (finish.report.outcome is RoundOutcome.PUBLISHED)

    def teardown(self) -> None:
        """Check that deadlines alone end every round and that engines with whole weights resume."""
        if not hasattr(self, "world"):
            return
        for _ in range(50):
            if self.world.finish is not None:
                break
            self.world.post(DeadlinePassed(self.world.entry))
        assert self.world.finish is not None
        assert self.world.machine.pending == {}
        self.world.deliver_notices()
        self.world.check()
        for name, outcome in self.world.finish.engines.items():
            if outcome is EngineOutcome.LEFT_OUT:
                for worker in ENGINES[name]:
                    rank = self.world.engines[worker]
                    held = worker not in self.world.alive or rank.mixed_weights or rank.version < 0
                    assert rank.serving or held, f"{worker} stays paused on whole weights"


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- single facts --------------------------------------------------------------------------------


def commands_to(instructions: Sequence[Instruction], kind: type[Command]) -> list[Send]:
    return [i for i in instructions if isinstance(i, Send) and isinstance(i.command, kind)]


class Script:
    """Responder that answers every command at once, except the commands that a test handles."""

    def __init__(self, spec: RoundSpec) -> None:
        self.spec = spec
        self.machine = RoundMachine(spec)
        self.sent: list[Send] = []
        self.phases: list[Phase] = []
        self.finish: Finish | None = None
        self.entry = 0
        self.rules = RoundRules()

    def good(self, send: Send) -> Result:
        match send.command:
            case Write(destinations=names):
                links = tuple(LinkOutcome(n, LinkStatus.OK, 8, f"{send.worker}>{n}") for n in names)
                return Written(links, 0.0, 0.5)
            case Verify():
                return Verified(())
            case _:
                return Done()

    def take(self, instructions: Sequence[Instruction]) -> list[Send]:
        waiting = []
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.sent.append(instruction)
                if instruction.expects_reply:
                    waiting.append(instruction)
            elif isinstance(instruction, EnterPhase):
                self.phases.append(instruction.phase)
                self.rules.begins(instruction.phase)
                self.entry = instruction.entry
            else:
                self.finish = instruction
        assert not self.rules.broken(self.machine)
        return waiting

    def run_to(self, phase: Phase) -> list[Send]:
        """Answer every command until `phase` begins, and return the commands that then wait."""
        queue = deque(self.take(self.machine.start()))
        while self.machine.phase is not phase and queue:
            send = queue.popleft()
            event = Replied(send.worker, send.seq, self.good(send))
            queue.extend(self.take(self.machine.handle(event)))
        return list(queue)

    def reply(self, send: Send, result: Result) -> list[Send]:
        return self.take(self.machine.handle(Replied(send.worker, send.seq, result)))

    def finish_well(self, waiting: list[Send]) -> Finish:
        queue = deque(waiting)
        while queue:
            send = queue.popleft()
            queue.extend(self.reply(send, self.good(send)))
        assert self.finish is not None
        return self.finish

    def aborts(self) -> dict[str, bool]:
        return {
            s.worker: s.command.mixed_weights for s in self.sent if isinstance(s.command, Abort)
        }


IN_PLACE_PHASES = [Phase.PREPARE, Phase.WRITE, Phase.VERIFY, Phase.APPLY, Phase.PUBLISH]
STAGED_PHASES = [
    Phase.PREPARE,
    Phase.WRITE,
    Phase.VERIFY,
    Phase.PAUSE,
    Phase.APPLY,
    Phase.PUBLISH,
]


@pytest.mark.parametrize(
    ("mode", "phases"),
    [(UpdateMode.IN_PLACE, IN_PLACE_PHASES), (UpdateMode.STAGED, STAGED_PHASES)],
)
def test_a_good_round_passes_its_phases_and_publishes_on_every_engine(
    mode: UpdateMode, phases: list[Phase]
) -> None:
    script = Script(make_spec(mode))
    finish = script.finish_well(script.run_to(Phase.PREPARE))
    assert script.phases == phases
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert set(finish.engines.values()) == {EngineOutcome.PUBLISHED}
    assert finish.report.measures[Measure.NBYTES] == 8 * len(LINKS)
    assert finish.report.measures[Measure.WIRE_S] == 0.5
    assert script.aborts() == {}


@pytest.mark.parametrize("mode", UpdateMode)
def test_trainers_release_after_every_engine_has_verified_and_before_any_publishes(
    mode: UpdateMode,
) -> None:
    script = Script(make_spec(mode, releasing=TRAINERS))
    waiting = script.run_to(Phase.APPLY)
    before = [type(send.command).__name__ for send in script.sent]
    assert before.count("Verify") == len(ENGINE_OF)
    releases = [send for send in waiting if isinstance(send.command, Release)]
    assert [send.worker for send in releases] == list(TRAINERS)
    for send in waiting:
        if send not in releases:
            script.reply(send, Done())
    assert script.machine.phase is Phase.APPLY
    script.reply(releases[0], Done())
    assert script.machine.phase is Phase.APPLY
    assert script.finish_well(script.reply(releases[1], Done())).report.outcome == "published"


def test_a_trainer_that_dies_before_it_releases_does_not_end_the_round() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE, releasing=TRAINERS))
    waiting = script.run_to(Phase.APPLY)
    script.take(script.machine.handle(AgentLost("trainer/1", "killed")))
    left = [send for send in waiting if send.worker != "trainer/1"]
    assert script.finish_well(left).report.outcome == "published"


def test_engines_do_not_serve_if_a_trainer_keeps_its_memory() -> None:
    """Check that engines stay paused: their caches may not fit next to the trainer's memory."""
    script = Script(make_spec(UpdateMode.IN_PLACE, releasing=TRAINERS))
    waiting = script.run_to(Phase.APPLY)
    (release,) = (send for send in waiting if send.worker == "trainer/0")
    script.reply(release, Failure(FailureKind.FAILED, "out of host memory"))
    assert script.finish is not None
    assert script.finish.report.outcome == "failed"
    assert script.finish.report.reason == "trainer/0: out of host memory"
    assert script.finish.mixed == frozenset(ENGINES)


def test_every_engine_verifies_the_digest_of_each_of_its_sources() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    sent = script.run_to(Phase.VERIFY)
    assert {s.worker: s.command for s in sent} == {
        worker: Verify(1, {t: f"{t}>{worker}" for t in TRAINERS}) for worker in ENGINE_OF
    }


@pytest.mark.parametrize("phase", IN_PLACE_PHASES)
def test_in_place_a_dead_engine_is_left_out_and_the_others_publish(phase: Phase) -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(phase)
    more = script.take(script.machine.handle(AgentLost("a/1", "killed")))
    finish = script.finish_well([s for s in [*waiting, *more] if ENGINE_OF.get(s.worker) != "a"])
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    # The lost rank may be alive and paused. Then it stays paused, and the other rank must not resume without it.
    assert finish.engines == {
        "a": EngineOutcome.MIXED,
        "b": EngineOutcome.PUBLISHED,
        "c": EngineOutcome.PUBLISHED,
    }
    assert script.aborts() == {"a/0": True}
    assert "a/1: killed" in finish.report.left_out["a"]


def test_engine_of_one_rank_that_dies_before_a_write_is_not_mixed() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(Phase.PREPARE)
    more = script.take(script.machine.handle(AgentLost("b/0", "killed")))
    finish = script.finish_well([s for s in [*waiting, *more] if ENGINE_OF.get(s.worker) != "b"])
    assert finish.engines["b"] is EngineOutcome.LEFT_OUT
    assert script.aborts() == {}


@pytest.mark.parametrize("phase", STAGED_PHASES)
def test_staged_an_engine_that_loses_a_rank_is_mixed_only_after_it_has_paused(
    phase: Phase,
) -> None:
    script = Script(make_spec(UpdateMode.STAGED))
    waiting = script.run_to(phase)
    more = script.take(script.machine.handle(AgentLost("a/1", "killed")))
    finish = script.finish_well([s for s in [*waiting, *more] if ENGINE_OF.get(s.worker) != "a"])
    touched = phase in {Phase.PAUSE, Phase.APPLY, Phase.PUBLISH}
    assert finish.engines["a"] is (EngineOutcome.MIXED if touched else EngineOutcome.LEFT_OUT)
    assert finish.mixed == (frozenset({"a"}) if touched else frozenset())
    assert finish.report.outcome is RoundOutcome.PUBLISHED


@pytest.mark.parametrize("mode", UpdateMode)
@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.WRITE])
def test_a_trainer_that_dies_before_its_write_ended_ends_the_round(
    mode: UpdateMode, phase: Phase
) -> None:
    script = Script(make_spec(mode))
    script.run_to(phase)
    script.take(script.machine.handle(AgentLost("trainer/1", "killed")))
    assert script.finish is not None
    mixed = mode is UpdateMode.IN_PLACE and phase is Phase.WRITE
    assert script.finish.report.outcome is (RoundOutcome.FAILED if mixed else RoundOutcome.ABORTED)
    assert set(script.finish.engines.values()) == {
        EngineOutcome.MIXED if mixed else EngineOutcome.LEFT_OUT
    }
    assert all(script.aborts()[worker] is mixed for worker in ENGINE_OF)
    # Both trainers were writing, and their bytes may still be under way.
    expected = dict.fromkeys(TRAINERS, ("a", "b", "c")) if phase is Phase.WRITE else {}
    assert script.finish.unsettled == expected


@pytest.mark.parametrize("phase", [Phase.VERIFY, Phase.APPLY, Phase.PUBLISH])
def test_a_trainer_that_dies_after_its_write_does_not_end_the_round(phase: Phase) -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(phase)
    script.take(script.machine.handle(AgentLost("trainer/1", "killed")))
    assert script.finish_well(waiting).report.outcome is RoundOutcome.PUBLISHED


@pytest.mark.parametrize("phase", IN_PLACE_PHASES)
def test_in_place_every_phase_ends_by_its_deadline(phase: Phase) -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    script.run_to(phase)
    script.take(script.machine.handle(DeadlinePassed(script.entry)))
    assert script.finish is not None
    assert script.finish.report.outcome is not RoundOutcome.PUBLISHED
    if phase is Phase.PREPARE:
        assert not any(script.aborts().values())


def test_an_engine_that_does_not_pause_keeps_the_old_version_and_the_others_publish() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(Phase.PREPARE)
    late = [s for s in waiting if s.worker == "b/0"]
    for send in waiting:
        if send not in late:
            script.reply(send, Done())
    more = script.take(script.machine.handle(DeadlinePassed(script.entry)))
    finish = script.finish_well(more)
    assert finish.engines["b"] is EngineOutcome.LEFT_OUT
    assert script.aborts() == {"b/0": False}
    assert finish.report.outcome is RoundOutcome.PUBLISHED


def test_the_deadline_of_a_first_write_does_not_end_the_rewrite() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(Phase.WRITE)
    first = script.entry
    more: list[Send] = []
    for send in waiting:
        result = script.good(send)
        if send.worker == "trainer/0" and isinstance(result, Written):
            failed = LinkOutcome("b/0", LinkStatus.FAILED, 0, "", "cut")
            kept = tuple(link for link in result.links if link.destination != "b/0")
            result = Written((*kept, failed), 0.0, 0.0)
        more = script.reply(send, result)
    assert [(s.worker, s.command) for s in more] == [("trainer/0", Write(1, ("b/0",), 108.0))]
    assert script.take(script.machine.handle(DeadlinePassed(first))) == []
    assert script.machine.phase is Phase.WRITE
    assert script.finish_well(more).report.outcome is RoundOutcome.PUBLISHED


@pytest.mark.parametrize("mode", UpdateMode)
def test_wrong_bytes_are_written_again_and_checked_again(mode: UpdateMode) -> None:
    script = Script(make_spec(mode))
    waiting = script.run_to(Phase.VERIFY)
    more: list[Send] = []
    for send in waiting:
        wrong = ("trainer/1",) if send.worker == "c/0" else ()
        more = script.reply(send, Verified(wrong))
    assert [(s.worker, s.command) for s in more] == [("trainer/1", Write(1, ("c/0",), 108.0))]
    checks = script.reply(more[0], script.good(more[0]))
    assert [s.worker for s in checks] == ["c/0"]
    finish = script.finish_well(checks)
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.report.digest_ok


@pytest.mark.parametrize("mode", UpdateMode)
def test_an_engine_whose_bytes_stay_wrong_is_the_only_engine_left_out(
    mode: UpdateMode,
) -> None:
    script = Script(make_spec(mode, max_rewrites=2))
    queue = deque(script.run_to(Phase.VERIFY))
    while queue:
        send = queue.popleft()
        bad = send.worker == "c/0" and isinstance(send.command, Verify)
        queue.extend(script.reply(send, Verified(("trainer/1",)) if bad else script.good(send)))
    assert script.finish is not None
    writes = [s for s in script.sent if isinstance(s.command, Write)]
    assert len(writes) == len(TRAINERS) + 2
    assert not script.finish.report.digest_ok
    mixed = mode is UpdateMode.IN_PLACE
    assert script.finish.report.outcome is RoundOutcome.PUBLISHED
    assert script.finish.engines["c"] is (EngineOutcome.MIXED if mixed else EngineOutcome.LEFT_OUT)
    assert script.aborts() == {"c/0": mixed}


def test_staged_engines_keep_the_old_version_when_all_bytes_stay_wrong() -> None:
    script = Script(make_spec(UpdateMode.STAGED, max_rewrites=1))
    queue = deque(script.run_to(Phase.VERIFY))
    while queue:
        send = queue.popleft()
        bad = isinstance(send.command, Verify)
        queue.extend(script.reply(send, Verified(("trainer/1",)) if bad else script.good(send)))
    assert script.finish is not None
    assert script.finish.report.outcome is RoundOutcome.ABORTED
    assert set(script.finish.engines.values()) == {EngineOutcome.LEFT_OUT}
    assert script.aborts() == dict.fromkeys([*ENGINE_OF, *TRAINERS], False)


@pytest.mark.parametrize("mode", UpdateMode)
def test_a_link_of_unknown_outcome_quarantines_its_engine_and_is_never_written_again(
    mode: UpdateMode,
) -> None:
    script = Script(make_spec(mode))
    more: list[Send] = []
    for send in script.run_to(Phase.WRITE):
        result = script.good(send)
        if send.worker == "trainer/1":
            link = LinkOutcome("a/0", LinkStatus.UNKNOWN, 0, "", "deadline")
            result = Written((link, *(x for x in result.links if x.destination != "a/0")), 0, 0)  # type: ignore[union-attr]
        more = script.reply(send, result)
    finish = script.finish_well(more)
    assert finish.engines["a"] is EngineOutcome.QUARANTINED
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.mixed == (frozenset({"a"}) if mode is UpdateMode.IN_PLACE else frozenset())
    assert script.aborts() == dict.fromkeys(["a/0", "a/1"], mode is UpdateMode.IN_PLACE)


def test_an_unknown_link_quarantines_an_engine_that_was_unreachable() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    script.run_to(Phase.WRITE)
    seqs = {s.worker: s for s in script.sent if isinstance(s.command, Write)}
    more: list[Send] = []
    for worker, status in [
        ("trainer/0", LinkStatus.UNREACHABLE),
        ("trainer/1", LinkStatus.UNKNOWN),
    ]:
        links = tuple(
            LinkOutcome(d, status if d == "b/0" else LinkStatus.OK, 8, "x") for d in ENGINE_OF
        )
        more = script.reply(seqs[worker], Written(links, 0.0, 0.0))
    assert script.finish_well(more).engines["b"] is EngineOutcome.QUARANTINED


def test_a_link_missing_from_its_sources_answer_counts_as_not_delivered() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE, max_rewrites=0))
    more: list[Send] = []
    for send in script.run_to(Phase.WRITE):
        result = script.good(send)
        if isinstance(result, Written) and send.worker == "trainer/0":
            result = Written(tuple(x for x in result.links if x.destination != "b/0"), 0.0, 0.0)
        more = script.reply(send, result)
    assert script.finish_well(more).engines["b"] is EngineOutcome.MIXED


@pytest.mark.parametrize(
    ("phase", "wrong"),
    [
        (Phase.WRITE, Done()),
        (Phase.VERIFY, Done()),
        (Phase.APPLY, Verified(())),
        (Phase.PUBLISH, Written((), 0.0, 0.0)),
    ],
)
def test_an_answer_that_does_not_fit_its_command_is_a_failure(phase: Phase, wrong: Result) -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    for send in script.run_to(phase):
        script.reply(send, wrong)
    assert script.finish is not None
    assert script.finish.report.outcome is RoundOutcome.FAILED
    assert EngineOutcome.PUBLISHED not in script.finish.engines.values()


def test_a_trainers_unknown_outcome_quarantines_the_engines_of_its_links() -> None:
    script = Script(make_spec(UpdateMode.STAGED))
    waiting = script.run_to(Phase.WRITE)
    script.reply(waiting[0], Failure(FailureKind.UNKNOWN, "deadline"))
    assert script.finish is not None
    assert set(script.finish.engines.values()) == {EngineOutcome.QUARANTINED}
    assert script.finish.mixed == frozenset()
    assert script.finish.unsettled == {waiting[1].worker: ("a", "b", "c")}


def test_a_failure_of_one_engine_while_publishing_does_not_unpublish_the_others() -> None:
    script = Script(make_spec(UpdateMode.IN_PLACE))
    waiting = script.run_to(Phase.PUBLISH)
    for send in waiting[1:]:
        script.reply(send, Done())
    script.reply(waiting[0], Failure(FailureKind.FAILED, "told to"))
    assert script.finish is not None
    assert script.finish.report.outcome is RoundOutcome.PUBLISHED
    assert sorted(script.finish.engines.values()) == [
        EngineOutcome.MIXED,
        EngineOutcome.PUBLISHED,
        EngineOutcome.PUBLISHED,
    ]


@pytest.mark.parametrize("phase", STAGED_PHASES)
def test_an_answer_counts_only_from_the_asked_worker(phase: Phase) -> None:
    script = Script(make_spec(UpdateMode.STAGED))
    waiting = script.run_to(phase)
    asked = dict(script.machine.pending)
    assert asked
    for send in waiting:
        for other in {*TRAINERS, *ENGINE_OF} - {send.worker}:
            for result in (script.good(send), Failure(FailureKind.FAILED, "forged")):
                event = Replied(other, send.seq, result)
                assert script.machine.handle(event) == []
    assert script.machine.pending == asked
    assert script.finish_well(waiting).report.outcome is RoundOutcome.PUBLISHED


def test_prepare_and_pause_begin_together_in_place_and_not_staged() -> None:
    for mode in UpdateMode:
        first = RoundMachine(make_spec(mode)).start()
        assert len(commands_to(first, Prepare)) == len(TRAINERS)
        assert len(commands_to(first, Pause)) == (4 if mode is UpdateMode.IN_PLACE else 0)
        assert commands_to(first, Publish) == []


def test_fake_engines_report_mixed_weights() -> None:
    rank = FakeEngineRank("x", 2)
    rank.live[:] = [payload(3, 0), payload(3, 1)]
    assert rank.live_versions == {3}
    rank.live[1, 2] = payload(4, 1)[2]
    assert rank.live_versions == {3, 4}
    rank.live[1, 2] += 1
    assert rank.live_versions == {3, CORRUPT}
    assert payload_digest(payload(3, 0)) != payload_digest(payload(3, 1))


@pytest.mark.parametrize(
    ("deadline_s", "to_act_s"), [(0.5, 0.35), (2.0, 1.4), (10.0, 8.0), (20.0, 18.0), (120.0, 108.0)]
)
def test_a_writer_has_time_left_to_report_its_outcome(deadline_s: float, to_act_s: float) -> None:
    assert reply_budget_s(deadline_s) == pytest.approx(to_act_s)
    links = frozenset({("trainer/0", "a/0")})
    spec = make_spec(
        UpdateMode.STAGED,
        trainers=("trainer/0",),
        engines={"a": ("a/0",)},
        links=links,
        write_s=deadline_s,
    )
    machine = RoundMachine(spec)
    (prepare,) = (i for i in machine.start() if isinstance(i, Send))
    sent = machine.handle(Replied("trainer/0", prepare.seq, Done()))
    (write,) = (i.command for i in sent if isinstance(i, Send))
    assert isinstance(write, Write)
    assert write.deadline_s == pytest.approx(to_act_s)


@pytest.mark.parametrize("mode", UpdateMode)
def test_a_hanging_engine_has_time_left_to_report_its_failed_resume(mode: UpdateMode) -> None:
    """Its answer to `Publish` reports that, so its whole weights do not count as mixed."""
    machine = RoundMachine(make_spec(mode, publish_s=20.0))
    told = [s for s in machine.start() if isinstance(s, Send)]
    published: list[Publish] = []
    finish: Finish | None = None
    while told and finish is None:
        send = told.pop(0)
        result: Result = Done()
        if isinstance(send.command, Write):
            links = [LinkOutcome(d, LinkStatus.OK, 8, "d") for d in send.command.destinations]
            result = Written(tuple(links), 0.0, 0.0)
        elif isinstance(send.command, Verify):
            result = Verified(())
        elif isinstance(send.command, Publish):
            published.append(send.command)
            result = Done(not_resumed="PeerTimeout: POST /resume: no answer")
        if not send.expects_reply:
            continue
        for instruction in machine.handle(Replied(send.worker, send.seq, result)):
            if isinstance(instruction, Send):
                told.append(instruction)
            elif isinstance(instruction, Finish):
                finish = instruction
    assert finish is not None
    assert set(finish.engines.values()) == {EngineOutcome.PUBLISHED}
    assert finish.mixed == frozenset()
    # The first rank of an engine publishes after its other ranks, within the same deadline.
    budget_s = reply_budget_s(20.0)
    assert {p.deadline_s for p in published} == {budget_s, budget_s / 2}
    assert len(published) == len(ENGINE_OF)
    # An engine that is aborted gets no longer deadline, either.
    machine = RoundMachine(make_spec(mode, publish_s=20.0))
    machine.start()
    given_up = machine.handle(AgentLost(TRAINERS[0], "gone"))
    aborts = [s.command for s in given_up if isinstance(s, Send) and s.worker in ENGINE_OF]
    assert {a.deadline_s for a in aborts if isinstance(a, Abort)} == {reply_budget_s(20.0)}


# --- rounds that the trainer drives --------------------------------------------------------------


def push_spec() -> RoundSpec:
    return make_spec(
        UpdateMode.IN_PLACE,
        -1,
        trainers=(),
        links=frozenset(),
        delivery=PushDelivery(),
        max_rewrites=0,
    )


def sent(script: Script, version: int = 5) -> list[Send]:
    return script.take(script.machine.handle(Sent(version)))


def test_a_push_pauses_first_and_passes_the_same_phases() -> None:
    script = Script(push_spec())
    assert script.run_to(Phase.WRITE) == []
    assert [type(s.command) for s in script.sent[:4]] == [BeginDriven] * 4
    assert script.phases == [Phase.PREPARE, Phase.WRITE]
    assert script.machine.engines.active_workers == tuple(ENGINE_OF)
    checks = sent(script)
    assert [s.command for s in checks] == [Verify(5, {})] * 4
    finish = script.finish_well(checks)
    assert script.phases == [*IN_PLACE_PHASES]
    assert (finish.report.version, finish.report.outcome) == (5, RoundOutcome.PUBLISHED)
    assert {s.command.version for s in commands_to(script.sent, Publish)} == {5}  # type: ignore[union-attr]


def test_an_engine_lost_during_a_push_is_the_only_engine_left_out() -> None:
    script = Script(push_spec())
    script.run_to(Phase.WRITE)
    script.take(script.machine.handle(AgentLost("b/0", "killed")))
    assert script.machine.engines.active_workers == ("a/0", "a/1", "c/0")
    finish = script.finish_well(sent(script))
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.engines["b"] is EngineOutcome.LEFT_OUT
    assert finish.mixed == frozenset()


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.VERIFY])
def test_engines_keep_the_old_version_when_one_refuses_its_part_of_a_push(
    phase: Phase,
) -> None:
    script = Script(push_spec())
    waiting = script.run_to(phase) if phase is Phase.PREPARE else []
    if phase is Phase.VERIFY:
        script.run_to(Phase.WRITE)
        waiting = sent(script)
    script.reply(waiting[-1], Failure(FailureKind.FAILED, "3 tensors did not arrive"))
    assert script.finish is not None
    assert script.finish.report.outcome is RoundOutcome.ABORTED
    assert "3 tensors did not arrive" in script.finish.report.reason
    assert script.aborts() == dict.fromkeys(ENGINE_OF, False)
    assert commands_to(script.sent, Apply) == []


def test_a_push_without_its_leaders_ends_by_its_deadline() -> None:
    script = Script(push_spec())
    script.run_to(Phase.WRITE)
    script.take(script.machine.handle(DeadlinePassed(script.entry)))
    assert script.finish is not None
    assert script.finish.report.outcome is RoundOutcome.ABORTED
    assert "not every leader called continue_generation" in script.finish.report.reason
    assert script.aborts() == dict.fromkeys(ENGINE_OF, False)


def test_an_engine_that_fails_to_apply_a_push_is_mixed_and_the_others_publish() -> None:
    script = Script(push_spec())
    script.run_to(Phase.WRITE)
    waiting = sent(script)
    more: list[Send] = []
    for send in waiting:
        more = script.reply(send, Verified(()))
    script.reply(next(s for s in more if s.worker == "c/0"), Failure(FailureKind.FAILED, "torn"))
    finish = script.finish_well([s for s in more if s.worker != "c/0"])
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.engines["c"] is EngineOutcome.MIXED
