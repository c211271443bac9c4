"""Rounds with a relay: commands to ranks, rewrites of links, and unknown outcomes."""

from __future__ import annotations

import msgspec
from round_rules import RoundRules

from windlass.backends.relay import RelayDelivery
from windlass.config import ControlConfig, UpdateMode
from windlass.control.messages import (
    Abort,
    Apply,
    Command,
    Done,
    Failure,
    FailureKind,
    Pause,
    Prepare,
    Publish,
    Result,
    Verified,
    Verify,
    Write,
)
from windlass.control.relay_messages import Relay, RelayWrite, SkipUpstream
from windlass.control.report import Measure, RoundOutcome
from windlass.control.round_state import EngineOutcome, Phase
from windlass.control.rounds import (
    AgentLost,
    DeadlinePassed,
    EnterPhase,
    Finish,
    Instruction,
    Replied,
    RoundMachine,
    RoundSpec,
    Send,
)
from windlass.transfer.bindings import Carried, LinkOutcome, LinkStatus, Relayed, Written

ENGINES = ("a", "b", "c")
CHAIN = {"a/0": ("b/0",), "b/0": ("c/0",), "c/0": ()}


def relayed(
    missing: tuple[str, ...] = (),
    unknown_from: tuple[str, ...] = (),
    unknown_to: tuple[str, ...] = (),
    unreached: tuple[str, ...] = (),
) -> Relayed:
    return Relayed(missing, unknown_from, unknown_to, unreached, 10, 0.5)


class Round:
    """Round of one trainer and three engines in a chain. The test gives the answers."""

    def __init__(self, mode: UpdateMode = UpdateMode.STAGED) -> None:
        self.machine = RoundMachine(
            RoundSpec(
                version=1,
                config=ControlConfig(mode=mode, max_rewrites=0),
                trainers=("t",),
                engines={name: (f"{name}/0",) for name in ENGINES},
                links=frozenset(("t", f"{name}/0") for name in ENGINES),
                delivery=RelayDelivery(CHAIN),
            )
        )
        self.sent: list[Send] = []
        self.entry = 0
        self.finish: Finish | None = None
        self.rules = RoundRules()
        self._take(self.machine.start())

    def _take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self.sent.append(instruction)
                case EnterPhase():
                    self.entry = instruction.entry
                    self.rules.begins(instruction.phase)
                case Finish():
                    self.finish = instruction
        assert not self.rules.broken(self.machine)

    def answer(self, worker: str, kind: type[Command], result: Result) -> None:
        """Answer the newest command of this kind."""
        send = next(s for s in reversed(self.sent) if (s.worker, type(s.command)) == (worker, kind))
        self._take(self.machine.handle(Replied(worker, send.seq, result)))

    def lose(self, worker: str) -> None:
        self._take(self.machine.handle(AgentLost(worker, "gone")))

    def pass_deadline(self) -> None:
        self._take(self.machine.handle(DeadlinePassed(self.entry)))

    def prepare(self) -> None:
        self.answer("t", Prepare, Done())

    def written(self, kind: type[Command], *names: str, status: LinkStatus = LinkStatus.OK) -> None:
        links = tuple(LinkOutcome(f"{n}/0", status, 5, "digest") for n in names)
        self.answer("t", kind, Written(links, 0.0, 1.0))

    def told(self, worker: str, kind: type[Command]) -> list[Command]:
        return [s.command for s in self.sent if s.worker == worker and type(s.command) is kind]

    def complete(self, *names: str) -> Finish:
        """Answer every command that follows the writes."""
        for name in names:
            self.answer(f"{name}/0", Verify, Verified(()))
        for kind in (Pause, Apply, Publish):
            for name in names:
                self.answer(f"{name}/0", kind, Done())
        assert self.finish is not None
        return self.finish


def test_a_relay_round_has_one_feed_and_one_relay_per_engine() -> None:
    round_ = Round()
    round_.prepare()
    (feed,) = round_.told("t", RelayWrite)
    assert isinstance(feed, RelayWrite)
    assert set(feed.destinations) == {"a/0", "b/0", "c/0"}
    (relay,) = round_.told("c/0", Relay)
    assert isinstance(relay, Relay)
    assert relay.deadline_s < feed.deadline_s
    round_.written(RelayWrite, *ENGINES)
    for name in ENGINES:
        round_.answer(f"{name}/0", Relay, relayed())
    (verify,) = round_.told("c/0", Verify)
    assert verify == Verify(1, {"t": "digest"})
    finish = round_.complete(*ENGINES)
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.report.measures[Measure.NBYTES] == 3 * 5 + 3 * 10
    assert not round_.told("t", Write)
    assert not finish.unsettled


def test_relayed_bytes_count_only_for_links_of_the_relay() -> None:
    round_ = Round()
    round_.prepare()
    links = tuple(
        LinkOutcome(f"{name}/0", LinkStatus.OK, nbytes, "digest", wire_s=wire_s)
        for name, nbytes, wire_s in (("a", 5, 0.5), ("b", 0, 0.0), ("c", 5, float("nan")))
    )
    round_.answer("t", RelayWrite, Written(links, 0.0, 1.0))
    for name in ENGINES:
        passed_on = {"b/0": Carried(10, 0.25), "d/0": Carried(1 << 60, 1e300)}
        result = msgspec.structs.replace(relayed(), passed_on=passed_on)
        round_.answer(f"{name}/0", Relay, result)
    assert round_.complete(*ENGINES).carried == {
        ("t", "a/0"): Carried(5, 0.5), ("a/0", "b/0"): Carried(10, 0.25),
    }  # fmt: skip


def test_trainers_write_the_bytes_that_a_relay_did_not_deliver() -> None:
    for engines_first in (False, True):
        round_ = Round()
        round_.prepare()
        if not engines_first:
            round_.written(RelayWrite, *ENGINES)
        round_.answer("c/0", Relay, relayed(missing=("t",)))
        round_.answer("a/0", Relay, relayed())
        round_.answer("b/0", Relay, relayed())
        if engines_first:
            round_.written(RelayWrite, *ENGINES)
        # This round allows no rewrites. Completing a relay does not count as a rewrite.
        assert round_.told("t", Write) == [Write(1, ("c/0",), 108.0)]
        round_.written(Write, "c")
        assert round_.complete(*ENGINES).report.outcome is RoundOutcome.PUBLISHED


def test_engines_skip_a_lost_engine_and_a_failed_trainer() -> None:
    round_ = Round()
    round_.prepare()
    round_.lose("a/0")
    assert round_.told("b/0", SkipUpstream) == [SkipUpstream("a/0")]
    assert not round_.told("c/0", SkipUpstream)
    round_.written(RelayWrite, *ENGINES, status=LinkStatus.FAILED)
    assert SkipUpstream("t") in round_.told("b/0", SkipUpstream)
    for name in ("b", "c"):
        round_.answer(f"{name}/0", Relay, relayed(missing=("t",)))
    round_.written(Write, "b", "c")
    finish = round_.complete("b", "c")
    assert finish.engines["a"] is EngineOutcome.LEFT_OUT
    # The process of the engine is dead.
    assert not finish.unsettled


def test_an_unreached_engine_skips_its_upstream() -> None:
    round_ = Round()
    round_.prepare()
    round_.answer("a/0", Relay, relayed(unreached=("b/0",)))
    assert round_.told("b/0", SkipUpstream) == [SkipUpstream("a/0")]


def test_an_unknown_outcome_quarantines_the_engine_of_its_link() -> None:
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("a/0", Relay, relayed(unknown_to=("b/0",)))
    assert round_.told("b/0", Abort)
    assert round_.told("c/0", SkipUpstream) == [SkipUpstream("b/0")]
    round_.answer("c/0", Relay, relayed(missing=("t",)))
    round_.written(Write, "c")
    finish = round_.complete("a", "c")
    assert finish.engines["b"] is EngineOutcome.QUARANTINED
    # b was left out while it passed bytes on, and may still do that.
    assert finish.unsettled == {"b/0": ("c",)}


def test_a_left_out_engine_that_answered_leaves_no_link_unsettled() -> None:
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("a/0", Relay, relayed(unknown_to=("b/0",)))
    round_.answer("b/0", Relay, relayed(missing=("t",)))
    round_.answer("c/0", Relay, relayed(missing=("t",)))
    round_.written(Write, "c")
    assert not round_.complete("a", "c").unsettled


def test_a_late_answer_of_a_left_out_engine_quarantines_what_its_bytes_may_reach() -> None:
    """c knows only that its connection from b has ended, but the bytes of b may still arrive in its memory."""
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("a/0", Relay, relayed(unknown_to=("b/0",)))
    round_.answer("c/0", Relay, relayed(missing=("t",)))
    round_.answer("b/0", Relay, relayed(missing=("t",), unknown_to=("c/0",)))
    round_.written(Write, "c")
    finish = round_.complete("a")
    assert finish.engines["c"] is EngineOutcome.QUARANTINED
    assert finish.report.engines == ("a",)


def test_a_late_answer_to_another_command_does_not_end_a_relay() -> None:
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("a/0", Relay, relayed(unknown_to=("b/0",)))
    for send in [each for each in round_.sent if not isinstance(each.command, Relay)]:
        event = Replied("b/0", send.seq, Failure(FailureKind.STALE, "has passed"))
        assert round_.machine.handle(event) == []
    round_.answer("c/0", Relay, relayed(missing=("t",)))
    round_.written(Write, "c")
    assert round_.complete("a", "c").unsettled == {"b/0": ("c",)}


def test_a_silent_relay_is_left_out_and_quarantines_its_destination() -> None:
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("b/0", Relay, relayed(missing=("t",), unknown_from=("a/0",)))
    round_.answer("c/0", Relay, relayed(missing=("t",)))
    round_.pass_deadline()
    round_.written(Write, "c")
    finish = round_.complete("c")
    assert finish.report.outcome is RoundOutcome.PUBLISHED
    assert finish.engines["b"] is EngineOutcome.QUARANTINED
    assert finish.unsettled == {"a/0": ("b",)}


def test_a_failure_in_a_relay_leaves_its_engine_out() -> None:
    round_ = Round()
    round_.prepare()
    round_.written(RelayWrite, *ENGINES)
    round_.answer("a/0", Relay, Failure(FailureKind.FAILED, "no group"))
    assert round_.told("b/0", SkipUpstream) == [SkipUpstream("a/0")]
    for name in ("b", "c"):
        round_.answer(f"{name}/0", Relay, relayed(missing=("t",)))
    round_.written(Write, "b", "c")
    assert not round_.complete("b", "c").unsettled


def test_trainers_write_without_relay_when_a_member_is_lost() -> None:
    round_ = Round(UpdateMode.IN_PLACE)
    round_.lose("c/0")
    round_.prepare()
    for name in ("a", "b"):
        round_.answer(f"{name}/0", Pause, Done())
    assert round_.machine.phase is Phase.WRITE
    assert not round_.told("t", RelayWrite)
    assert not round_.told("a/0", Relay)
    (write,) = round_.told("t", Write)
    assert isinstance(write, Write)
    assert set(write.destinations) == {"a/0", "b/0"}
