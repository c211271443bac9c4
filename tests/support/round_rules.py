"""Rules that a round must follow after every event, checked from outside."""

from __future__ import annotations

from windlass.control.coordinator import Coordinator
from windlass.control.driver import RoundDriver
from windlass.control.round_state import (
    OUTCOME_TRANSITIONS,
    PHASE_TRANSITIONS,
    EngineOutcome,
    Phase,
)
from windlass.control.rounds import RoundMachine

LIVE_PHASES = {Phase.APPLY, Phase.PUBLISH}
"""Phases in which an engine may have applied a part of the weights."""


class RoundRules:
    """Checks one round. Tell it about each phase that begins, and call `broken` after every event."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._seen: tuple[Phase, dict[str, EngineOutcome]] | None = None
        self._found: list[str] = []

    def begins(self, phase: Phase) -> None:
        """Note that a phase begins."""
        if self._phases and phase not in PHASE_TRANSITIONS[self._phases[-1]]:
            self._found.append(f"phase {self._phases[-1]} became {phase}")
        if not self._phases and phase is not Phase.PREPARE:
            self._found.append(f"the first phase is {phase}")
        if phase in self._phases and phase not in {Phase.WRITE, Phase.VERIFY}:
            self._found.append(f"phase {phase} began twice")
        self._phases.append(phase)

    def broken(self, machine: RoundMachine) -> list[str]:
        """Return the rules that the round has broken since the last call; empty for none."""
        found, self._found = self._found, []
        phase, outcomes = machine.phase, machine.engines.outcomes
        before, known = self._seen or (phase, outcomes)
        if outcomes.keys() != known.keys():
            found.append(f"engines {sorted(known)} became {sorted(outcomes)}")
        for name, outcome in outcomes.items():
            last = known.get(name, outcome)
            if last is not outcome and outcome not in OUTCOME_TRANSITIONS[last]:
                found.append(f"{name}: {last} became {outcome}")
            left = (last, outcome) == (EngineOutcome.ACTIVE, EngineOutcome.LEFT_OUT)
            if left and before in LIVE_PHASES:
                found.append(f"{name}: left {before} with weights that count as whole")
            if outcome is EngineOutcome.PUBLISHED and Phase.PUBLISH not in self._phases:
                found.append(f"{name}: published without a phase {Phase.PUBLISH}")
            if outcome is EngineOutcome.PUBLISHED and phase is not Phase.DONE:
                found.append(f"{name}: published in phase {phase}")
            if outcome is EngineOutcome.ACTIVE and phase is Phase.DONE:
                found.append(f"{name}: active after the end of the round")
        if before is Phase.DONE and (phase, outcomes) != (before, known):
            found.append(f"changed after its end: {known} became {outcomes} in phase {phase}")
        self._seen = phase, outcomes
        return found


class FleetRounds:
    """Checks the rounds of a coordinator, each from its first phase to its end."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._driver: RoundDriver | None = None
        self._rules = RoundRules()
        coordinator.rounds.on_phase(self._begins)

    def _begins(self, version: int, phase: Phase) -> None:
        self._follow()
        self._rules.begins(phase)

    def _follow(self) -> None:
        driver = self._coordinator.rounds.driver
        if driver is not None and driver is not self._driver:
            self._driver, self._rules = driver, RoundRules()

    def broken(self) -> list[str]:
        """Return the rules that the newest round has broken since the last call; empty for none."""
        self._follow()
        return [] if self._driver is None else self._rules.broken(self._driver.machine)
