"""Transitions of a round: the table, the refusals of the machine, and the check of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import pytest
from chaos_bugs import Bug
from fake_fleet import FakeFleet
from round_rules import FleetRounds
from test_rounds import ENGINES, Script, make_spec

from windlass.config import ControlConfig, UpdateMode
from windlass.control import round_state, rounds
from windlass.control.engine_state import TRANSITIONS
from windlass.control.messages import Failure, FailureKind
from windlass.control.report import RoundOutcome
from windlass.control.round_state import (
    OUTCOME_TRANSITIONS,
    PHASE_TRANSITIONS,
    EngineOutcome,
    Phase,
)
from windlass.control.rounds import RoundMachine

PAGE = Path(__file__).parents[2] / "docs" / "control.md"


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A bug: the machine uses a table that permits every transition. Its checker keeps the right table."""

    name: str
    module: ModuleType
    table: str
    states: type[StrEnum]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug inside the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self.module, self.table, dict.fromkeys(self.states, frozenset(self.states))
            )
            yield


UNCHECKED_PHASES = OpenTable("any phase may follow any other", rounds, "PHASE_TRANSITIONS", Phase)
UNCHECKED_OUTCOMES = OpenTable(
    "any outcome may follow any other", round_state, "OUTCOME_TRANSITIONS", EngineOutcome
)
SKIPPED_APPLY = Bug(
    "the round publishes what no engine applied",
    RoundMachine,
    "_apply",
    "self._enter(Phase.APPLY)",
    "self._enter(Phase.PUBLISH)",
)
PUBLISHED_EVERYWHERE = Bug(
    "engines that have left publish",
    RoundMachine,
    "_next_phase",
    "for engine in self.engines.active:",
    "for engine in self.engines:",
)
LEFT_WHOLE = Bug(
    "an engine that fails while it applies counts as whole",
    RoundMachine,
    "_may_be_mixed",
    "begun in {Phase.APPLY, Phase.PUBLISH}",
    "False",
)
FORGOTTEN = Bug(
    "the round ends without an outcome for an engine",
    RoundMachine,
    "_next_phase",
    "for engine in self.engines.active:",
    "for engine in self.engines.active[:1]:",
)
REWRITTEN = Bug(
    "a round that has applied writes again",
    RoundMachine,
    "_next_phase",
    "self._enter(Phase.PUBLISH)",
    "self._enter(Phase.WRITE)",
)


def run_with_a_failure(phase: Phase) -> Script:
    """Run a staged round in which engine `b` fails in a phase."""
    script = Script(make_spec(UpdateMode.STAGED))
    waiting = script.run_to(phase)
    of_b = next(send for send in waiting if send.worker == "b/0")
    rest = script.reply(of_b, Failure(FailureKind.FAILED, "told to"))
    script.finish_well([*(send for send in waiting if send is not of_b), *rest])
    return script


@pytest.mark.parametrize(
    ("bugs", "message"),
    [
        ((UNCHECKED_PHASES, SKIPPED_APPLY), "phase pause became publish"),
        ((UNCHECKED_PHASES, REWRITTEN), "phase apply became write"),
        ((UNCHECKED_OUTCOMES, PUBLISHED_EVERYWHERE), "b: mixed became published"),
        ((LEFT_WHOLE,), "b: left apply with weights that count as whole"),
        ((FORGOTTEN,), "c: active after the end of the round"),
    ],
    ids=lambda value: value[-1].name if isinstance(value, tuple) else "",
)
def test_check_of_rounds_finds_a_broken_machine(
    bugs: tuple[Bug | OpenTable, ...], message: str
) -> None:
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug.planted())
        with pytest.raises(AssertionError, match=message):
            run_with_a_failure(Phase.APPLY)
    assert run_with_a_failure(Phase.APPLY).finish is not None


@pytest.mark.parametrize("bug", [SKIPPED_APPLY, PUBLISHED_EVERYWHERE], ids=lambda bug: bug.name)
def test_machine_refuses_a_transition_that_its_table_lacks(bug: Bug) -> None:
    with bug.planted(), pytest.raises(RuntimeError, match="must not become publish"):
        run_with_a_failure(Phase.APPLY)


@pytest.mark.parametrize("mode", UpdateMode)
async def test_fleet_survives_a_bug_in_the_machine(mode: UpdateMode) -> None:
    async with FakeFleet(ControlConfig(mode=mode)) as rig:
        rules = FleetRounds(rig.coordinator)
        await rig.start({name: len(workers) for name, workers in ENGINES.items()})
        assert (await rig.publish(1)).outcome is RoundOutcome.PUBLISHED
        with REWRITTEN.planted():
            report = await rig.publish(2)
        assert report.outcome is RoundOutcome.FAILED
        assert report.reason == ("internal error: RuntimeError: phase apply must not become write")
        assert set(report.left_out) == set(ENGINES)
        assert not rig.routable
        assert all(rank.paused for rank in rig.engines.values())
        assert not rules.broken()
        assert (await rig.publish(3)).outcome is RoundOutcome.PUBLISHED
        assert rig.routable == dict.fromkeys(ENGINES, 3)


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("phase", PHASE_TRANSITIONS),
        ("outcome", OUTCOME_TRANSITIONS),
        ("state", TRANSITIONS),
    ],
    ids=["phase", "outcome", "state"],
)
def test_documentation_shows_the_transitions(
    heading: str, table: Mapping[StrEnum, frozenset[StrEnum]]
) -> None:
    shown, states = dict[str, set[str]](), {state.value for state in table}
    rows = PAGE.read_text().partition(f"| {heading} | next |")[2].splitlines()[2:]
    for row in rows:
        if not row.startswith("|"):
            break
        first, following = row.strip("|").split("|")[:2]
        named = set(re.findall("`([^`]+)`", following))
        shown[first.strip(" `")] = states - named if "all" in following else named
    assert shown == {
        state.value: {each.value for each in following} for state, following in table.items()
    }
