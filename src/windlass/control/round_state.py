"""Phases of a round, its engines with their outcomes, and the transitions between them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from windlass.config import PhaseDeadlines


class Phase(StrEnum):
    """Phase of a round; each phase has its own deadline."""

    PREPARE = "prepare"
    WRITE = "write"
    VERIFY = "verify"
    PAUSE = "pause"
    APPLY = "apply"
    PUBLISH = "publish"
    DONE = "done"


def deadline_of(phase: Phase, deadlines: PhaseDeadlines) -> float:
    """Return the seconds that a phase may take. `phase` must not be `DONE`, which has no deadline."""
    return {
        Phase.PREPARE: max(deadlines.prepare_s, deadlines.pause_s),
        Phase.WRITE: deadlines.write_s,
        Phase.VERIFY: deadlines.verify_s,
        Phase.PAUSE: deadlines.pause_s,
        Phase.APPLY: deadlines.apply_s,
        Phase.PUBLISH: deadlines.publish_s,
    }[phase]


class EngineOutcome(StrEnum):
    """Outcome of the round for one engine.

    Attributes:
        ACTIVE: still part of the round.
        LEFT_OUT: serves old weights or none, and gets no traffic until it has the published version.
        MIXED: stays paused, because its live weights may be of two versions.
        QUARANTINED: not written again while its process lives, because bytes may still arrive in its memory.
        PUBLISHED: serves the version.
    """

    ACTIVE = "active"
    LEFT_OUT = "left_out"
    MIXED = "mixed"
    QUARANTINED = "quarantined"
    PUBLISHED = "published"


PHASE_TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREPARE: frozenset({Phase.WRITE, Phase.DONE}),
    # Links are written again after a failure or a wrong digest. Engines without links verify nothing.
    Phase.WRITE: frozenset({Phase.WRITE, Phase.VERIFY, Phase.PAUSE, Phase.APPLY, Phase.DONE}),
    # PAUSE follows only in `staged` mode. In all other modes engines have paused in PREPARE already.
    Phase.VERIFY: frozenset({Phase.WRITE, Phase.PAUSE, Phase.APPLY, Phase.DONE}),
    Phase.PAUSE: frozenset({Phase.APPLY, Phase.DONE}),
    # APPLY makes the received weights live, so the round writes nothing after it has begun.
    Phase.APPLY: frozenset({Phase.PUBLISH, Phase.DONE}),
    Phase.PUBLISH: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
}
"""Phase -> possible next phases."""

OUTCOME_TRANSITIONS: Mapping[EngineOutcome, frozenset[EngineOutcome]] = {
    EngineOutcome.ACTIVE: frozenset(EngineOutcome) - {EngineOutcome.ACTIVE},
    # A source may report an unknown outcome after its destination has left the round.
    EngineOutcome.LEFT_OUT: frozenset({EngineOutcome.QUARANTINED}),
    EngineOutcome.MIXED: frozenset({EngineOutcome.QUARANTINED}),
    EngineOutcome.QUARANTINED: frozenset({EngineOutcome.QUARANTINED}),
    EngineOutcome.PUBLISHED: frozenset(),
}
"""Outcome -> possible next outcomes of the same engine in the same round."""


@dataclass(slots=True)
class RoundEngine:
    """Engine in one round.

    Attributes:
        name: name of the engine.
        workers: its ranks.
        outcome: outcome of the round for this engine; only `end` sets this attribute.
        reason: reason for the outcome; empty for none.
        mixed: whether the engine's live weights may be of two versions.
    """

    name: str
    workers: tuple[str, ...]
    outcome: EngineOutcome = EngineOutcome.ACTIVE
    reason: str = ""
    mixed: bool = False

    def end(self, outcome: EngineOutcome, reason: str = "") -> None:
        """Set the outcome of the round for this engine, and its reason.

        Raises:
            RuntimeError: `OUTCOME_TRANSITIONS` does not allow this outcome after the present one.
        """
        if outcome not in OUTCOME_TRANSITIONS[self.outcome]:
            raise RuntimeError(f"engine {self.name}: {self.outcome} must not become {outcome}")
        self.outcome, self.reason = outcome, reason


@final
class RoundEngines:
    """Engines of one round.

    Args:
        engines: engine name -> its ranks.

    Attributes:
        of: rank -> name of its engine.
    """

    def __init__(self, engines: Mapping[str, tuple[str, ...]]) -> None:
        self._by_name = {name: RoundEngine(name, workers) for name, workers in engines.items()}
        self.of = {worker: name for name, workers in engines.items() for worker in workers}

    def __getitem__(self, name: str) -> RoundEngine:
        return self._by_name[name]

    def __iter__(self) -> Iterator[RoundEngine]:
        return iter(self._by_name.values())

    @property
    def active(self) -> list[RoundEngine]:
        """Engines that are still part of the round."""
        return [engine for engine in self if engine.outcome is EngineOutcome.ACTIVE]

    @property
    def active_workers(self) -> tuple[str, ...]:
        """Ranks of the engines that are still part of the round, in the order of the engines."""
        return tuple(worker for engine in self.active for worker in engine.workers)

    @property
    def published(self) -> list[RoundEngine]:
        """Engines that serve the version."""
        return [engine for engine in self if engine.outcome is EngineOutcome.PUBLISHED]

    @property
    def outcomes(self) -> dict[str, EngineOutcome]:
        """Engine -> outcome of the round for this engine."""
        return {engine.name: engine.outcome for engine in self}

    @property
    def reasons(self) -> dict[str, str]:
        """Engine -> reason for its outcome, for engines with a reason."""
        return {engine.name: engine.reason for engine in self if engine.reason}
