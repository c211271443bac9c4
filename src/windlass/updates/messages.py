"""Every message between the coordinator and its agents, as frozen msgspec types.

One WebSocket per agent, opened by the agent, carries msgpack frames both ways: the agent
needs no port of its own, and a dead process is a closed connection, seen at once and not
by polling. The first frame is `Hello`; after that the coordinator sends `Envelope`s and
the agent answers each with one `Reply`; trainer ranks also send `Announce` and `Withdraw`.

Each envelope carries (epoch, round, seq). `epoch` grows with every change of the fleet and
with every restart of the controller, `round` with every attempt to publish, `seq` with
every command of a round. An agent answers a repeated (epoch, round, seq) with the stored
reply and refuses an older epoch or round with `stale`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.config import CollectiveFabric, P2pBackend, PauseMode, UpdateBackend, UpdateMode
from windlass.errors import DECODE_ERRORS, ProtocolError
from windlass.layout.manifest import Role
from windlass.transfer.bindings import DestinationBinding, GroupOffer, LinkOutcome, WireTensor
from windlass.transports.base import PeerEndpoint, WireReport
from windlass.updates.relay_messages import RelayCommand, Relayed, RelayOpened

__all__ = [
    "FAREWELL",
    "MAX_COUNT",
    "PROTOCOL_VERSION",
    "Abort",
    "AgentFrame",
    "Announce",
    "Apply",
    "BeginByHand",
    "Bound",
    "CannotJoin",
    "Command",
    "ConnectEngine",
    "ConnectTrainer",
    "ControllerFrame",
    "Done",
    "Envelope",
    "Failure",
    "FailureKind",
    "Hello",
    "JoinByHand",
    "JoinGroups",
    "Offered",
    "Pause",
    "Prepare",
    "Prepared",
    "Probe",
    "Publish",
    "Receive",
    "Refused",
    "Reply",
    "Result",
    "RoundOutcome",
    "TakeFiles",
    "TakeTensors",
    "UpdateReport",
    "Verified",
    "Verify",
    "Welcome",
    "Withdraw",
    "Write",
    "Written",
    "decode_agent_frame",
    "decode_controller_frame",
    "encode",
]

PROTOCOL_VERSION = 6
MAX_COUNT = (1 << 53) - 1
"""Of versions, epochs and rounds: what JSON and float64 hold exactly, far below what msgpack does."""


FAREWELL = "the update goes on without this rank, or has ended"
"""Why a rank is told to forget a round. What others said about it, of pids and of addresses that
they could not write, is in the log and in the trainers' report, and no engine's to know."""


class FailureKind(StrEnum):
    """What an agent's failure means for the round."""

    FAILED = "failed"
    UNKNOWN = "unknown"
    STALE = "stale"


# --- agent -> controller -----------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of an agent.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        worker: identity, unique in the fleet (`trainer/0`, `engine-a/1`).
        incarnation: random per process; a second process under one name is told apart by it.
        role: trainer or engine.
        group: the trainer job or the engine that this rank belongs to.
        rank: rank in the group. world_size: ranks in the group.
        manifest: `ShardManifest.encode()`.
        wire: what the rank's transport really uses.
        endpoint: where writes to this rank land; no other rank of the fleet has it.
        host: `host_identity()` of the rank's process.
        url: HTTP address of the engine, sent by rank 0 of an engine, else empty.
        served_version: version that an engine rank holds, or that a trainer rank was last told is
            published; -1 for none.
        lineage: of the run that `served_version` belongs to (`Publish.lineage`); of a trainer rank
            that knows of none, of the controller that it was connected to before; else empty.
        job: of a trainer rank: the same for all ranks of one start of the trainers, and for no
            other start.
        epoch, round: the last that the agent took part in; a restarted controller learns them here.
        tainted: whether live weights are mixed.
        can_send: whether an engine rank can hand its weights on to another engine.
        at_rest: see `Done`.
    """

    protocol_version: int
    worker: str
    incarnation: str
    role: Role
    group: str
    rank: int
    world_size: int
    manifest: bytes
    wire: WireReport
    endpoint: PeerEndpoint
    host: str = ""
    url: str = ""
    served_version: int = -1
    epoch: int = 0
    round: int = 0
    tainted: bool = False
    can_send: bool = False
    at_rest: str = ""
    lineage: str = ""
    job: str = ""


class CannotJoin(msgspec.Struct, frozen=True, tag="cannot_join"):
    """Instead of Hello: an engine for which others may wait has failed before it could connect.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        group: the engine. message: why, for a person.
    """

    protocol_version: int
    group: str
    message: str


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


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """Engine rank: memory is registered; where to write."""

    plan_digest: str
    binding: DestinationBinding


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Trainer rank: the plan is bound, and its engines must join this group."""

    offer: GroupOffer


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Trainer rank: ready to write.

    Attributes:
        digested: `DIGESTED` rows of boxes that others hold too.
        compare_s: seconds that it took for them, without what its GPU had to finish first.
    """

    digested: bytes
    compare_s: float


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Trainer rank: the outcome of every link it was asked to write."""

    links: tuple[LinkOutcome, ...]
    pack_s: float
    wire_s: float


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """Engine rank: sources whose bytes did not have the expected digest (empty when all did)."""

    mismatched: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """A command that returns nothing else.

    Attributes:
        at_rest: why the engine does not generate although it was told to go on; else empty.
    """

    at_rest: str = ""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A command that did not do what it should; `message` is one line for a person."""

    kind: FailureKind
    message: str


Result = Bound | Offered | Prepared | Written | Verified | RelayOpened | Relayed | Done | Failure


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The one answer to the envelope with the same (epoch, round, seq)."""

    epoch: int
    round: int
    seq: int
    result: Result


AgentFrame = Hello | CannotJoin | Announce | Withdraw | Reply


# --- controller -> agent -----------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Hello`.

    Attributes:
        epoch: of the controller.
        lineage: of the run whose versions it publishes: random, the same for as long as its journal
            is, or as its process lives where it keeps none.
    """

    epoch: int
    lineage: str


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """Instead of `Welcome`, or before the controller closes the connection.

    Attributes:
        message: one line for a person.
        final: the agent does not belong here, and need not come again. False where only this
            connection went wrong.
    """

    message: str
    final: bool = True


class ConnectEngine(msgspec.Struct, frozen=True, tag="connect_engine"):
    """Register memory for this plan and answer `Bound`. `plan` is the rank's own part."""

    plan: bytes
    plan_digest: str
    mode: UpdateMode
    backend: UpdateBackend = P2pBackend()


class ConnectTrainer(msgspec.Struct, frozen=True, tag="connect_trainer"):
    """Bind the plan to these addresses; answer `Done`, or `Offered` where a group must form.

    `plan` is the rank's own part; `replicated` the `ReplicatedPart` of boxes that others hold too.
    """

    plan: bytes
    plan_digest: str
    bindings: tuple[DestinationBinding, ...]
    backend: UpdateBackend = P2pBackend()
    replicated: bytes = b""


class JoinGroups(msgspec.Struct, frozen=True, tag="join_groups"):
    """Enter these groups, agree on what they carry, and answer `Done`.

    Sent to all members at once, and to each one in the same order of groups.
    """

    offers: tuple[GroupOffer, ...]
    deadline_s: float


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Trainer: pack, cast and quantise into the arena as far as it holds; answer `Done`.

    With a `period` it answers `Prepared` instead, with digests of the blocks that are due of what other
    ranks hold too.

    Attributes:
        version: to be written next.
        turn: counts comparisons, see `BlockSchedule.due`.
        period: in so many turns every block is compared once; 0: nothing is compared now.
    """

    version: int
    turn: int = 0
    period: int = 0


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


class BeginByHand(msgspec.Struct, frozen=True, tag="begin_by_hand"):
    """Engine: trainer heads drive this update; gather what comes, and change nothing yet."""


class JoinByHand(msgspec.Struct, frozen=True, tag="join_by_hand"):
    """Engine: enter a head's group."""

    offer: GroupOffer
    fabric: CollectiveFabric
    deadline_s: float


class TakeTensors(msgspec.Struct, frozen=True, tag="take_tensors"):
    """Engine: the receiving half of one broadcast of whole tensors, flat, in this order."""

    group: str
    tensors: tuple[WireTensor, ...]
    deadline_s: float


class TakeFiles(msgspec.Struct, frozen=True, tag="take_files"):
    """Engine: read this rank's boxes from a checkpoint folder."""

    folder: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget the round. Not answered.

    Attributes:
        reason: one line.
        tainted: the engine's live weights may be mixed: stay paused. Otherwise go on with the old
            weights. Only the controller knows: one-sided writes leave no trace in the engine.
        deadline_s: for the engine to go on; meanwhile no other command is carried out.
    """

    reason: str
    tainted: bool = False
    deadline_s: float = 30.0


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Answer `Done`: commands are carried out in order, so all that came before are over."""


Command = (
    ConnectEngine
    | ConnectTrainer
    | JoinGroups
    | Prepare
    | Pause
    | Write
    | Receive
    | RelayCommand
    | Verify
    | Apply
    | Publish
    | Abort
    | BeginByHand
    | JoinByHand
    | TakeTensors
    | TakeFiles
)


class Envelope(msgspec.Struct, frozen=True, tag="envelope"):
    """A command with its place in the history of the fleet."""

    epoch: int
    round: int
    seq: int
    command: Command | Probe


class RoundOutcome(StrEnum):
    """How a round ended."""

    PUBLISHED = "published"
    ABORTED = "aborted"
    FAILED = "failed"


class UpdateReport(msgspec.Struct, frozen=True, tag="update_report"):
    """Sent to every trainer rank when its announced version is published or given up.

    Attributes:
        version: the announced version.
        outcome: published, aborted (old weights serve) or failed.
        reason: one line when not published.
        engines: engines that serve `version` now.
        left_out: engines that do not: dead, tainted or joining; name -> why.
        nbytes: bytes that travelled.
        wire_s: the slowest trainer rank's time inside transport writes (step 7).
        update_s: first command to last reply (steps 5 to 9).
        pause_s: the longest time that an engine was paused.
        phase_s: seconds per phase, by name.
        digest_ok: every written range had the sender's digest on the receiving side.
        attempt: the `Announce.attempt` that this answers.
        pack_s: the slowest trainer rank's time packing: casts, gathers, digests of what it packs;
            before the pause or beside the writes. 0 where packing is part of the write (GPU memory).
        compared: whether trainer ranks that hold the same boxes were compared.
        compare_s: the slowest trainer rank's time digesting what was compared.
    """

    version: int
    outcome: RoundOutcome
    reason: str
    engines: tuple[str, ...]
    left_out: dict[str, str]
    nbytes: int
    wire_s: float
    update_s: float
    pause_s: float
    phase_s: dict[str, float]
    digest_ok: bool
    attempt: int = 0
    pack_s: float = 0.0
    compared: bool = False
    compare_s: float = 0.0


ControllerFrame = Welcome | Refused | Envelope | UpdateReport

_encoder = msgspec.msgpack.Encoder()
_agent_decoder: msgspec.msgpack.Decoder[AgentFrame] = msgspec.msgpack.Decoder(AgentFrame)
_controller_decoder: msgspec.msgpack.Decoder[ControllerFrame] = msgspec.msgpack.Decoder(
    ControllerFrame
)


def encode(frame: AgentFrame | ControllerFrame) -> bytes:
    """The wire form of a frame."""
    return _encoder.encode(frame)


def decode_agent_frame(data: bytes) -> AgentFrame:
    """Decode what an agent sent.

    Raises:
        ProtocolError: not such a frame.
    """
    try:
        return _agent_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"agent frame of {len(data)} bytes: {error}") from error


def decode_controller_frame(data: bytes) -> ControllerFrame:
    """Decode what the controller sent.

    Raises:
        ProtocolError: not such a frame.
    """
    try:
        return _controller_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"controller frame of {len(data)} bytes: {error}") from error
