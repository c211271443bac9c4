"""Phases of a round, outcomes of its engines, and the transitions between them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """Phase of a round; each phase has its own deadline."""

    PREPARE = "prepare"
    WRITE = "write"
    VERIFY = "verify"
    PAUSE = "pause"
    APPLY = "apply"
    PUBLISH = "publish"
    DONE = "done"


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
