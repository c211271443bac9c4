"""What a round says: commands of the controller, what agents answer, and the frames that carry them.

The first frame of an agent is `Hello`; after that the coordinator sends `Envelope`s, and the agent answers
each with one `Reply` (`net.rpc`); trainer ranks also send `Announce` and `Withdraw`. In the (epoch, round,
seq) of an envelope, `epoch` grows with every change of the fleet and with every restart of the controller,
`round` with every attempt to publish, `seq` with every command of a round. An agent answers a repeated one
with the stored reply and refuses an older epoch or round with `stale`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.config import PauseMode, Reaction
from windlass.control.connect_messages import (
    Bound,
    CannotJoin,
    ChangeLinks,
    ConnectEngine,
    ConnectRelay,
    ConnectTrainer,
    Hello,
    JoinGroups,
    NotBound,
    Offered,
    Welcome,
)
from windlass.control.push_messages import BeginPush, PushCommand
from windlass.control.report import UpdateReport
from windlass.net.messages import Codec, Envelope, Refused, Reply
from windlass.transfer.bindings import Relayed, Written

MAX_COUNT = (1 << 53) - 1
"""Of versions, epochs and rounds: what JSON and float64 hold exactly, far below what msgpack does."""
ABORT_NOTICE = "the update goes on without this rank, or has ended"
"""Why a rank is told to forget a round. What others said about it, of pids and of addresses that
they could not write, is in the log and in the trainers' report, and no engine's to know."""

# --- trainer -> controller, unasked ------------------------------------------------------


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """A trainer rank stands still with the weights of `version` and wants them published.

    Attributes:
        version: to publish.
        attempt: counts the calls of `announce` in this process, from 1; the same number after a
            reconnection repeats an announcement, a higher one replaces it.
    """

    version: int
    attempt: int


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """The rank's caller gave up waiting: announcement `attempt` must not begin a round any more."""

    attempt: int


# --- rounds: controller -> agent -----------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Trainer: pack, cast and quantise into the arena as far as it holds; answer `Done`.

    With a `period` it answers `Prepared` instead, with digests of the blocks that are due of what other
    ranks hold too.

    Attributes:
        version: to be written next.
        turn: counts comparisons, see `due_pieces`.
        period: in so many turns every block is compared once; 0: nothing is compared now.
        non_finite: see `ControlConfig`.
    """

    version: int
    turn: int = 0
    period: int = 0
    non_finite: Reaction = Reaction.OFF


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Engine: answer only once no kernel of this rank reads weights any more."""

    mode: PauseMode
    deadline_s: float


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Trainer: write the links to these destinations and answer `Written`."""

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Engine: the receiving half of `Write` where that is a collective.

    Its answer is not awaited: what arrived is seen by `Verify`.

    Attributes:
        groups: source -> all destinations that enter; a group that lacks a member is not entered.
    """

    version: int
    groups: dict[str, tuple[str, ...]]
    deadline_s: float


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Engine: compare what landed with `expected` (source worker -> digest)."""

    version: int
    expected: dict[str, str]


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Engine, paused and verified: unpack, flip the shadow into place, finalise derived state."""

    version: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Engine: stamp `version` and resume, or say by `deadline_s` that it does not.

    `lineage` tells versions of different runs apart that have the same number.
    """

    version: int
    deadline_s: float
    lineage: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget the round. Not answered.

    Attributes:
        reason: one line.
        mixed_weights: live weights may be of two versions: stay paused. Otherwise go on with the old
            weights. Only the controller knows: one-sided writes leave no trace in the engine.
        deadline_s: for the engine to go on; meanwhile no other command is carried out.
    """

    reason: str
    mixed_weights: bool = False
    deadline_s: float = 30.0


class RelayWrite(msgspec.Struct, frozen=True, tag="relay_write"):
    """Trainer: as `Write`, but bound relay groups are written at their roots; answer `Written`."""

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Engine: verify chunks that land and pass them on; answer `Relayed` once all is over."""

    version: int
    deadline_s: float


class SkipUpstream(msgspec.Struct, frozen=True, tag="skip_upstream"):
    """Engine, in a relay: this upstream will not come. Carried out at once; its answer is not awaited."""

    upstream: str


RelayCommand = ConnectRelay | Relay | SkipUpstream


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Answer `Done`: commands are carried out in order, so all that came before are over."""


TrainerCommand = ConnectTrainer | ChangeLinks | JoinGroups | Prepare | Write | RelayWrite | Abort
"""What a trainer rank carries out."""


SourceCommand = ConnectTrainer | Prepare | Write
"""What an engine rank carries out as the source of another engine's weights."""


EngineCommand = (
    ConnectEngine
    | JoinGroups
    | Pause
    | Receive
    | RelayCommand
    | Verify
    | Apply
    | Publish
    | Abort
    | BeginPush
    | PushCommand
    | SourceCommand
)
"""What an engine rank carries out."""


Command = TrainerCommand | EngineCommand


# --- agent -> controller, in answer ------------------------------------------------------


class FailureKind(StrEnum):
    """What an agent's failure means for the round.

    TIMED_OUT: the rank waited for others in vain, when it entered a group.
    """

    FAILED = "failed"
    UNKNOWN = "unknown"
    STALE = "stale"
    TIMED_OUT = "timed_out"


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Trainer rank: ready to write.

    Attributes:
        digested: `DIGESTED` rows of boxes that others hold too.
        compare_s: seconds that it took for them, without what its GPU had to finish first.
    """

    digested: bytes
    compare_s: float


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """Engine rank: sources whose bytes did not have the expected digest (empty when all did)."""

    mismatched: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """A command that returns nothing else.

    Attributes:
        not_resumed: why the engine does not generate although it was told to go on; else empty.
    """

    not_resumed: str = ""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A command that did not do what it should; `message` is one line for a person."""

    kind: FailureKind
    message: str


Result = Bound | NotBound | Offered | Prepared | Written | Verified | Relayed | Done | Failure


# --- frames ------------------------------------------------------------------------------

AgentFrame = Hello | CannotJoin | Announce | Withdraw | Reply[Result]


ControllerFrame = Welcome | Refused | Envelope[Command | Probe] | UpdateReport


AGENT_FRAMES: Codec[AgentFrame] = Codec(AgentFrame, "agent frame")


CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(ControllerFrame, "controller frame")
