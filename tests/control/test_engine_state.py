"""States of engines in the fleet: every event leads to a state that the table allows."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec
import pytest
from chaos_bugs import Bug
from fake_agents import engine_manifest, fake_hello
from fleet_rules import FleetRules
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from windlass.control.binding import Binding
from windlass.control.engine_state import EngineState, EngineStatus
from windlass.control.fleet import Agent, Fleet, Group, HalfPublished, signature_of
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.round_state import EngineOutcome
from windlass.control.rounds import Finish
from windlass.net.messages import RoundId

ENGINES = ("a", "b")
NUM_RANKS = 2
RUN = "run"
VERSIONS = st.sampled_from((0, 0, 0, 1, -1))
"""Versions, so drawn that engines often serve."""


def join(
    fleet: Fleet,
    group: str,
    rank: int,
    *,
    incarnation: str = "first",
    version: int = -1,
    lineage: str = RUN,
    mixed_weights: bool = False,
    not_resumed: str = "",
) -> Agent:
    hello = fake_hello(
        engine_manifest(f"{group}/{rank}", 1),
        group=group,
        rank=rank,
        world_size=NUM_RANKS,
        incarnation=incarnation,
        served_version=version,
        lineage=lineage,
        mixed_weights=mixed_weights,
    )
    return fleet.admit(msgspec.structs.replace(hello, not_resumed=not_resumed, epoch=1))


def bind(fleet: Fleet, names: Collection[str]) -> Binding:
    """Return a binding of engines, without links."""
    groups = [group for name in names if (group := fleet.group_of(name)) is not None]
    return Binding(
        signature=signature_of(groups), engines={group.name: group.workers for group in groups}
    )


def end_round(
    fleet: Fleet,
    version: int,
    outcomes: dict[str, EngineOutcome],
    *,
    mixed: Collection[str] = (),
    applied: Collection[str] = (),
    binding: Binding | None = None,
) -> None:
    """Record a round of engines as `RoundRunner.finish` does."""
    is_published = EngineOutcome.PUBLISHED in outcomes.values()
    report = UpdateReport(
        version=version,
        outcome=RoundOutcome.PUBLISHED if is_published else RoundOutcome.FAILED,
        reason="",
        left_out={
            name: f"{name} failed"
            for name, outcome in outcomes.items()
            if outcome is not EngineOutcome.PUBLISHED
        },
    )
    finish = Finish(
        report=report,
        engines=outcomes,
        mixed=frozenset(mixed),
        applied=frozenset(applied),
        unsettled={},
        silent=frozenset(),
        carried={},
    )
    if is_published:
        fleet.publish(version, RUN)
    fleet.note_round(finish, binding or bind(fleet, outcomes), RoundId(1, 1), RUN, ())


class Fleets(RuleBasedStateMachine):
    """Two engines of two ranks, and every event that changes a state."""

    @initialize()
    def begin(self) -> None:
        self.fleet = Fleet(lineage=RUN)
        self.checks = FleetRules()
        self.binding: Binding | None = None
        self.numbers = itertools.count(1)
        self.fleet.publish(0, RUN)
        self.agents = {
            f"{name}/{rank}": join(self.fleet, name, rank, version=0)
            for name in ENGINES
            for rank in range(NUM_RANKS)
        }

    def away(self) -> list[str]:
        names = (f"{name}/{rank}" for name in ENGINES for rank in range(NUM_RANKS))
        return [name for name in names if name not in self.agents]

    def here(self) -> list[str]:
        return sorted(self.agents)

    @precondition(lambda self: self.away())
    @rule(
        data=st.data(),
        version=VERSIONS,
        mixed=st.sampled_from((False, False, False, True)),
        not_resumed=st.sampled_from(("", "", "", "no server")),
    )
    def rank_joins(self, data: st.DataObject, version: int, mixed: bool, not_resumed: str) -> None:
        worker = data.draw(st.sampled_from(self.away()))
        group, _, rank = worker.partition("/")
        self.agents[worker] = join(
            self.fleet,
            group,
            int(rank),
            incarnation=str(next(self.numbers)),
            version=version,
            mixed_weights=mixed,
            not_resumed=not_resumed,
        )

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def rank_leaves(self, data: st.DataObject) -> None:
        self.fleet.remove(self.agents.pop(data.draw(st.sampled_from(self.here()))))

    @precondition(lambda self: self.here())
    @rule(data=st.data(), is_silent=st.booleans())
    def rank_is_silent_or_answers(self, data: st.DataObject, is_silent: bool) -> None:
        agent = self.agents[data.draw(st.sampled_from(self.here()))]
        self.fleet.note_silent(agent, "no answer in phase write" if is_silent else "")

    @precondition(lambda self: self.here())
    @rule(data=st.data(), reason=st.sampled_from(("", "no server")))
    def rank_resumes_or_not(self, data: st.DataObject, reason: str) -> None:
        agent = self.agents[data.draw(st.sampled_from(self.here()))]
        self.fleet.note_not_resumed(agent, reason)

    @precondition(lambda self: self.here())
    @rule(data=st.data(), number=st.integers(1, 4))
    def rank_is_quarantined(self, data: st.DataObject, number: int) -> None:
        # A quarantine lasts as long as the process, so it must be rare.
        assume(number == 1)
        agent = self.agents[data.draw(st.sampled_from(self.here()))]
        self.fleet.quarantine([agent.identity])

    @rule(version=VERSIONS)
    def trainers_say_what_is_published(self, version: int) -> None:
        self.fleet.publish(version, RUN)

    @precondition(lambda self: self.binding is None and self.fleet.writable_engines())
    @rule()
    def round_begins(self) -> None:
        self.binding = bind(self.fleet, [engine.name for engine in self.fleet.writable_engines()])

    @precondition(lambda self: self.binding is not None)
    @rule(data=st.data(), is_in_place=st.booleans())
    def round_ends(self, data: st.DataObject, is_in_place: bool) -> None:
        assert self.binding is not None
        possible = sorted(set(EngineOutcome) - {EngineOutcome.ACTIVE})
        outcomes = {name: data.draw(st.sampled_from(possible)) for name in self.binding.engines}
        mixed = {
            name
            for name, outcome in outcomes.items()
            if outcome is EngineOutcome.MIXED
            or (outcome is EngineOutcome.QUARANTINED and is_in_place)
        }
        version = self.fleet.published + 1
        end_round(self.fleet, version, outcomes, mixed=mixed, binding=self.binding)
        for name, outcome in outcomes.items():
            group = self.fleet.group_of(name)
            if group is not None and group.identities == self.binding.identities_of(
                self.binding.engines[name]
            ):
                assert name not in mixed or group.version == -1
                assert outcome is not EngineOutcome.PUBLISHED or group.version == version
        self.binding = None

    @invariant()
    def no_rule_is_broken(self) -> None:
        assert self.checks.broken(self.fleet) == []


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def state_of(fleet: Fleet, name: str = "a") -> EngineState:
    return next(state for state in fleet.states() if state.name == name)


def serving_fleet(version: int = 0) -> tuple[Fleet, list[Agent]]:
    fleet = Fleet(lineage=RUN)
    fleet.publish(version, RUN)
    ranks = [join(fleet, "a", rank, version=version) for rank in range(NUM_RANKS)]
    assert state_of(fleet).status is EngineStatus.SERVING
    return fleet, ranks


def test_engine_with_mixed_weights_stays_so_while_a_rank_is_silent_or_away() -> None:
    fleet, ranks = serving_fleet()
    end_round(fleet, 1, {"a": EngineOutcome.MIXED}, mixed={"a"})
    for change in (
        lambda: fleet.note_silent(ranks[0], "no answer"),
        lambda: fleet.note_silent(ranks[0], ""),
        lambda: fleet.note_not_resumed(ranks[1], "no server"),
        lambda: fleet.note_not_resumed(ranks[1], ""),
        lambda: fleet.remove(ranks[1]),
        lambda: join(fleet, "a", 1, version=0),
        lambda: fleet.publish(0, RUN),
    ):
        change()
        state = state_of(fleet)
        assert (state.status, state.reason) == (EngineStatus.MIXED_WEIGHTS, "a failed")
    end_round(fleet, 1, {"a": EngineOutcome.PUBLISHED})
    assert state_of(fleet).status is EngineStatus.SERVING


def test_engine_that_answers_again_shows_why_it_is_behind() -> None:
    fleet, ranks = serving_fleet()
    fleet.note_silent(ranks[0], "a/0: no answer")
    assert state_of(fleet).status is EngineStatus.SILENT
    fleet.publish(1, RUN)
    fleet.note_silent(ranks[0], "")
    state = state_of(fleet)
    assert (state.status, state.reason) == (EngineStatus.LEFT_OUT, "a/0: no answer")
    fleet.publish(0, RUN)
    assert state_of(fleet).status is EngineStatus.SERVING


def test_quarantined_engine_serves_until_the_next_version() -> None:
    fleet, ranks = serving_fleet()
    fleet.quarantine([ranks[0].identity])
    assert state_of(fleet).status is EngineStatus.SERVING
    assert fleet.writable_engines() == ()
    fleet.publish(1, RUN)
    assert state_of(fleet).status is EngineStatus.QUARANTINED
    fleet.remove(ranks[0])
    join(fleet, "a", 0, incarnation="second")
    assert state_of(fleet).status is EngineStatus.MIXED_WEIGHTS
    assert [engine.name for engine in fleet.writable_engines()] == ["a"]


def test_engine_that_waits_shows_why_it_does_not_generate() -> None:
    fleet = Fleet(lineage=RUN)
    for rank in range(NUM_RANKS):
        join(fleet, "a", rank, not_resumed="no server")
    state = state_of(fleet)
    assert (state.status, state.reason) == (EngineStatus.WAITING, "no server")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EngineStatus.MIXED_WEIGHTS, EngineStatus.LEFT_OUT),
        (EngineStatus.QUARANTINED, EngineStatus.WAITING),
        (EngineStatus.INCOMPLETE, EngineStatus.LEFT_OUT),
    ],
)
def test_engine_in_a_forbidden_transition_is_written_again_before_it_serves(
    before: EngineStatus, after: EngineStatus
) -> None:
    fleet, _ = serving_fleet()
    engine = fleet.group_of("a")
    assert isinstance(engine, Group)
    engine.move(before, "told to")
    engine.move(after)
    state = state_of(fleet)
    assert (state.status, state.version) == (EngineStatus.MIXED_WEIGHTS, -1)
    assert state.reason == f"internal error: {before} must not become {after}"
    assert FleetRules().broken(fleet) == [f"a: {state.reason}"]
    end_round(fleet, 1, {"a": EngineOutcome.PUBLISHED})
    assert state_of(fleet).status is EngineStatus.SERVING


BUGS = (
    Bug(
        "an engine with mixed weights is only left out",
        Fleet,
        "_next_state",
        "return EngineStatus.MIXED_WEIGHTS, reason",
        "return EngineStatus.LEFT_OUT, reason",
    ),
    Bug(
        "an engine that did not resume serves",
        Fleet,
        "_next_state",
        "EngineStatus.NOT_RESUMED if engine.not_resumed else EngineStatus.SERVING",
        "EngineStatus.SERVING",
    ),
    Bug(
        "an engine serves although a rank is silent",
        Fleet,
        "note_silent",
        "self._update_state_of(agent)",
        "pass",
    ),
    Bug(
        "an engine serves although a rank has left",
        Fleet,
        "remove",
        "self._update_state(group)",
        "pass",
    ),
    Bug(
        "an engine that waits for the new version still serves",
        Fleet,
        "publish",
        "self._update_state(engine)",
        "pass",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_check_of_fleets_finds_a_broken_fleet(bug: Bug) -> None:
    few = settings(TestFleets.settings, phases=[Phase.generate], derandomize=True, database=None)
    with bug.planted(), pytest.raises(AssertionError):
        run_state_machine_as_test(Fleets, settings=few)


@pytest.mark.parametrize(
    ("incarnation", "applied", "is_half"),
    [("first", 5, True), ("first", -1, False), ("second", 5, False), ("second", -1, False)],
)
def test_only_processes_of_the_round_count_as_half_published(
    incarnation: str, applied: int, is_half: bool
) -> None:
    fleet = Fleet(lineage=RUN)
    agents = [join(fleet, "a", rank) for rank in range(NUM_RANKS)]
    binding = bind(fleet, ["a"])
    fleet.remove(agents[1])
    left = {"a": EngineOutcome.MIXED}
    end_round(fleet, 5, left, mixed=["a"], applied=["a"], binding=binding)
    assert not fleet.half_published()
    back = msgspec.structs.replace(
        agents[1].hello, incarnation=incarnation, applied=applied, mixed_weights=True
    )
    fleet.admit(back)
    expected = {"a": HalfPublished(5, ("a/0", "a/1"))} if is_half else {}
    assert fleet.half_published() == expected
    # A later round that fails in WRITE may leave bytes of another version.
    end_round(fleet, 6, left, mixed=["a"])
    assert not fleet.half_published()
