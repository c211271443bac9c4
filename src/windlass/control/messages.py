"""Messages of a round: the controller's commands, the agents' answers, and the frames that carry them.

The first frame of an agent is `Hello`. After that the coordinator sends `Envelope`s, and the agent answers each with
one `Reply` (`net.rpc`). Trainer ranks also send `Announce` and `Withdraw`. An envelope has the numbers (epoch, round,
seq). `epoch` grows with every change of the fleet and with every restart of the controller, `round` with every attempt
to publish, and `seq` with every command of a round. An agent answers a repeated command with the stored reply, and a
command with an older epoch or round with `stale`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.config import DrivenBackend, PauseMode, Reaction
from windlass.control.connect_messages import (
    Bound,
    CannotJoin,
    ChangeLinks,
    ConnectEngine,
    ConnectTrainer,
    Hello,
    NotBound,
    Offered,
    Welcome,
)
from windlass.control.group_messages import GroupCommand
from windlass.control.push_messages import PushCommand
from windlass.control.relay_messages import RELAY_WRITING, RelayCommand
from windlass.control.report import UpdateReport
from windlass.net.messages import Codec, Envelope, Refused, Reply
from windlass.transfer.bindings import Relayed, Written

MAX_COUNT = (1 << 53) - 1
"""Largest version, epoch, or round: the largest integer that float64, and so JSON, represents exactly."""
ABORT_NOTICE = "the update continues without this rank, or has ended"
"""Reason that a rank gets with `Abort`. Details such as pids and addresses of other ranks are only in the log and in
the trainers' report, because engines need not know them."""

# --- trainer -> controller, unasked ------------------------------------------------------


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """Request of a trainer rank to publish `version`. The rank keeps its weights unchanged until the report.

    Attributes:
        version: version to publish.
        attempt: number of the `announce` call in this process, from 1. After a reconnection, a rank repeats its
            announcement with the same number. An announcement with a higher number replaces the earlier announcement.
    """

    version: int
    attempt: int


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Withdrawal of the announcement with this number. The controller must not begin a round for it any more."""

    attempt: int


# --- rounds: controller -> agent -----------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Command to a trainer: pack, cast and quantise as much as fits into the arena, and answer `Done`.

    If `period` is not 0, the trainer also computes digests of the replicated boxes, for the comparison of ranks that
    hold the same box. It then answers `Prepared`.

    Attributes:
        version: version that is written next.
        turn: number of earlier comparisons; selects the blocks of the boxes to compare (`due_pieces`).
        period: number of turns that compare every block once; 0 for no comparison in this round.
        non_finite: see `ControlConfig`.
    """

    version: int
    turn: int = 0
    period: int = 0
    non_finite: Reaction = Reaction.OFF


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Command to an engine: pause, and answer once no kernel of this rank reads weights any more."""

    mode: PauseMode
    deadline_s: float


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Command to an engine between two rounds: pause, and free weights and caches until the next round writes weights."""

    mode: PauseMode
    deadline_s: float


class BeginDriven(msgspec.Struct, frozen=True, tag="begin_driven"):
    """Command to an engine: receive the bytes of this round through `backend`, whose commands a trainer triggers.

    The round binds no plan, and it changes no live weights before `Apply`.
    """

    backend: DrivenBackend


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Command to a trainer: write its links to these destinations and answer `Written`."""

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Command to a trainer: every engine has verified its bytes, so free memory for the engines' caches."""


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Command to an engine: compare the digests of the received bytes with `expected` (source worker -> digest)."""

    version: int
    expected: dict[str, str]


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Command to a paused engine whose bytes are verified: make them the live weights.

    The engine unpacks staged data, copies the shadow copy (`staged`) into the parameters, and computes derived state.
    """

    version: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Command to an engine: resume, and give new tokens the number `version`.

    The answer `Done` says whether the engine has resumed within `deadline_s` seconds. `lineage` distinguishes versions of
    different runs that have the same number.
    """

    version: int
    deadline_s: float
    lineage: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Command to an agent: discard the round. The controller does not await the answer.

    Attributes:
        reason: reason in one line.
        mixed_weights: whether the engine's live weights may be of two versions. If so, the engine stays paused; if not,
            it resumes with the old weights. The engine cannot decide this, because it does not notice one-sided writes.
        deadline_s: seconds for the engine to resume. The agent carries out no other command before the engine has
            resumed or the time is over.
    """

    reason: str
    mixed_weights: bool = False
    deadline_s: float = 30.0


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Command that does nothing and is answered with `Done`.

    Agents carry out commands in order, so the answer shows that all earlier commands have ended.
    """


class PluginCommand(msgspec.Struct, frozen=True, tag="plugin"):
    """Command of a backend of another package, in that backend's own encoding."""

    body: bytes


BackendCommand = GroupCommand | RelayCommand | PushCommand | PluginCommand
"""Commands that a backend sends to its own senders and receivers (`control.backend.TakesCommands`)."""
TrainerCommand = ConnectTrainer | ChangeLinks | Prepare | Write | Release | Abort | BackendCommand
"""Commands to a trainer rank."""
SourceCommand = ConnectTrainer | Prepare | Write
"""Commands to an engine rank that is the source of another engine's weights."""
EngineCommand = (
    ConnectEngine
    | Pause
    | Sleep
    | Verify
    | Apply
    | Publish
    | Abort
    | BeginDriven
    | SourceCommand
    | BackendCommand
)
"""Commands to an engine rank."""
WRITING = (Write, *RELAY_WRITING)
"""Commands that make a rank write into memory of other ranks."""
Command = TrainerCommand | EngineCommand


# --- agent -> controller, in answer ------------------------------------------------------


class FailureKind(StrEnum):
    """Consequence of an agent's failure for the round.

    Attributes:
        FAILED: the command failed.
        UNKNOWN: the outcome of a write is unknown.
        STALE: the command has an older epoch or round than the agent has seen.
        TIMED_OUT: the rank timed out while it waited for other ranks to join a collective group.
    """

    FAILED = "failed"
    UNKNOWN = "unknown"
    STALE = "stale"
    TIMED_OUT = "timed_out"


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Answer of a trainer rank that is ready to write.

    Attributes:
        digested: digests of boxes that other trainer ranks hold too, as an array of dtype `DIGESTED` in bytes.
        compare_s: seconds in which the rank computed these digests, without the wait for earlier work on its GPU.
    """

    digested: bytes
    compare_s: float


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """Answer of an engine rank: the sources with a wrong digest; empty if all digests were right."""

    mismatched: tuple[str, ...]


SLEEPS = "it sleeps until the next version"
"""Value of `Done.not_resumed` of an engine whose weights are lost. Only a round can make it generate again."""


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """Answer to a command that returns no other result.

    Attributes:
        not_resumed: reason why the engine does not generate although it was told to resume, or `SLEEPS`; else empty.
        memory_nbytes: bytes of the rank's memory that are in use at the end of the command (`used_nbytes`); 0 if not
            measured.
    """

    not_resumed: str = ""
    memory_nbytes: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Answer to a command that failed; `message` is one line for the log and the reports."""

    kind: FailureKind
    message: str


class PluginResult(msgspec.Struct, frozen=True, tag="plugin"):
    """Answer to a `PluginCommand`, in the backend's own encoding."""

    body: bytes


Result = (
    Bound
    | NotBound
    | Offered
    | Prepared
    | Written
    | Verified
    | Relayed
    | PluginResult
    | Done
    | Failure
)


# --- frames ------------------------------------------------------------------------------

AgentFrame = Hello | CannotJoin | Announce | Withdraw | Reply[Result]
ControllerFrame = Welcome | Refused | Envelope[Command | Probe] | UpdateReport
AGENT_FRAMES: Codec[AgentFrame] = Codec(AgentFrame, "agent frame")
CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(ControllerFrame, "controller frame")
