"""What goes into a round and what comes out: events, instructions, and their vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.config import PauseMode, UpdateMode
from windlass.planning.replicated import Replicated
from windlass.updates.messages import Command, Result, RoundOutcome

__all__ = [
    "AgentLost",
    "Blocked",
    "DeadlinePassed",
    "EngineFate",
    "EnterPhase",
    "Event",
    "Finish",
    "Instruction",
    "Phase",
    "Replied",
    "RoundSpec",
    "Send",
]


class Phase(StrEnum):
    """Where a round is; each has its own deadline."""

    PREPARE = "prepare"
    WRITE = "write"
    VERIFY = "verify"
    PAUSE = "pause"
    APPLY = "apply"
    PUBLISH = "publish"
    DONE = "done"


class EngineFate(StrEnum):
    """What became of an engine in this round.

    ACTIVE: still part of it. LEFT_OUT: serves old weights or none; not routed until it holds the
    published version. TAINTED: live weights may be mixed; stays paused. POISONED: bytes may still
    land in its memory; not written again by this incarnation. PUBLISHED: serves the version.
    """

    ACTIVE = "active"
    LEFT_OUT = "left_out"
    TAINTED = "tainted"
    POISONED = "poisoned"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpec:
    """What a round is about.

    Attributes:
        version: to publish.
        mode: where writes land. pause_mode: what happens to running requests.
        trainers: source workers.
        engines: engine name -> its rank workers.
        links: (source, destination) workers that exchange bytes.
        max_rewrites: how often a failed or mismatched link is written again.
        pause_s, write_s, publish_s: deadlines passed on to the agents.
        collective: both halves of a write are told to enter it, and all links of a source at once.
        lands_live: whether `in_place` writes touch live memory before they are verified.
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
    collective: bool = False
    lands_live: bool = True
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
class Blocked:
    """The phase that was just entered must not begin: the controller cannot record it."""

    reason: str


Event = Replied | AgentLost | DeadlinePassed | Blocked


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command. `expects_reply` is false for farewells that nothing waits for."""

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
        outcome: published, aborted (old weights serve) or failed (nobody could be published).
        reason: one line, empty when published.
        fates: per engine. reasons: per engine that does not serve the version.
        mixed: engines whose live weights may be of two versions, poisoned or not.
        unsettled: workers that were told to write and did not answer, and the engines that their
            bytes may still reach.
        nbytes: bytes written. wire_s, pack_s: the slowest trainer's sums.
        digest_ok: no engine reported a wrong digest in the end.
        compared: whether ranks that hold the same boxes were compared, by digests of them.
        compare_s: that the slowest rank took for its digests.
    """

    outcome: RoundOutcome
    reason: str
    fates: Mapping[str, EngineFate]
    reasons: Mapping[str, str]
    mixed: frozenset[str]
    unsettled: Mapping[str, tuple[str, ...]]
    nbytes: int
    wire_s: float
    pack_s: float
    digest_ok: bool
    compared: bool
    compare_s: float


Instruction = Send | EnterPhase | Finish
