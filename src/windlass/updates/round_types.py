"""What goes into a round and what comes out: events, instructions, and their vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.config import BackendTraits, P2pBackend, PauseMode, UpdateMode
from windlass.planning.replicated import Replicated
from windlass.updates.measures import Measure
from windlass.updates.messages import Command, Result, RoundOutcome

__all__ = [
    "AgentLost",
    "DeadlinePassed",
    "EngineOutcome",
    "EnterPhase",
    "Event",
    "Finish",
    "GiveUp",
    "Instruction",
    "Phase",
    "Replied",
    "RoundSpec",
    "Send",
    "Sent",
    "reply_budget_s",
]


ANSWER_S = 2.0


class Phase(StrEnum):
    """Where a round is; each has its own deadline."""

    PREPARE = "prepare"
    WRITE = "write"
    VERIFY = "verify"
    PAUSE = "pause"
    APPLY = "apply"
    PUBLISH = "publish"
    DONE = "done"


class EngineOutcome(StrEnum):
    """What became of an engine in this round.

    ACTIVE: still part of it. LEFT_OUT: serves old weights or none; not routed until it holds the
    published version. MIXED: live weights may be of two versions; stays paused. QUARANTINED: bytes
    may still land in its memory; not written again by this incarnation. PUBLISHED: serves the
    version.
    """

    ACTIVE = "active"
    LEFT_OUT = "left_out"
    MIXED = "mixed"
    QUARANTINED = "quarantined"
    PUBLISHED = "published"


def reply_budget_s(deadline_s: float) -> float:
    """The share of a deadline, in seconds, that a peer may use before it must answer.

    It must be able to say how far it came even where an engine that cannot be reached took all of
    its time: silence would end the round for everybody.
    """
    return deadline_s - max(0.1 * deadline_s, min(0.3 * deadline_s, ANSWER_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpec:
    """What a round is about.

    Attributes:
        version: to publish; -1 until the trainer names it, where it drives the update.
        mode: where writes land. pause_mode: what happens to running requests.
        trainers: source workers.
        engines: engine name -> its rank workers.
        links: (source, destination) workers that exchange bytes.
        max_rewrites: how often a failed or mismatched link is written again.
        pause_s, write_s, publish_s: deadlines passed on to the agents.
        traits: of the backend. `driven_by_trainer`: the trainer's own calls fill the Write phase,
            which ends with `Sent`; trainers and links are empty, and every engine verifies.
        relay: member of a relay group -> those that it passes on to; empty without a relay.
        replicated: what trainers hold in common and must agree about; None if this round compares
            nothing.
        turn, period: see `BlockSchedule.due`.
        lineage: see `Publish`.
    """

    version: int
    mode: UpdateMode
    pause_mode: PauseMode
    trainers: tuple[str, ...]
    engines: Mapping[str, tuple[str, ...]]
    links: frozenset[tuple[str, str]]
    max_rewrites: int = 2
    pause_s: float = 30.0
    write_s: float = 120.0
    publish_s: float = 30.0
    traits: BackendTraits = P2pBackend.traits
    relay: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replicated: Replicated | None = None
    turn: int = 0
    period: int = 1
    lineage: str = ""


# --- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replied:
    """An agent's answer to `Send.seq`."""

    worker: str
    seq: int
    result: Result


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent's connection is closed: the process is dead or unreachable."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of the phase that `EnterPhase.entry` began; ignored when that is over."""

    entry: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The round must end.

    Attributes:
        reason: for a person.
        is_blocked: the phase that was just entered cannot be recorded and has not begun: none of
            its commands was sent. Otherwise the trainer that drives the round has failed.
    """

    reason: str
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """The trainer that drives the update has sent everything for `version`."""

    version: int


Event = Replied | AgentLost | DeadlinePassed | GiveUp | Sent


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command. `expects_reply` is false for notices that nothing waits for."""

    worker: str
    seq: int
    command: Command
    expects_reply: bool = True


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """A phase begins: start its deadline. `entry` tells a phase from its repetition."""

    phase: Phase
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The round is over.

    Attributes:
        version: of the round; -1 where the trainer had not named one.
        outcome: published, aborted (old weights serve) or failed (nobody could be published).
        reason: one line, empty when published.
        engines: what became of each. reasons: per engine that does not serve the version.
        mixed: engines whose live weights may be of two versions, quarantined or not.
        unsettled: workers that were told to write and did not answer, and the engines that their
            bytes may still reach.
        silent: engine ranks that did not answer by a deadline.
        measures: what ranks reported.
        digest_ok: no engine reported a wrong digest in the end.
    """

    version: int
    outcome: RoundOutcome
    reason: str
    engines: Mapping[str, EngineOutcome]
    reasons: Mapping[str, str]
    mixed: frozenset[str]
    unsettled: Mapping[str, tuple[str, ...]]
    silent: frozenset[str]
    measures: Mapping[Measure, float]
    digest_ok: bool


Instruction = Send | EnterPhase | Finish
