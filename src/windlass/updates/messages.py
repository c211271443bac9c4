"""What the controller and its agents say: who joins, where bytes will go, what a round says, and its frames.

The first frame of an agent is `Hello`; after that the coordinator sends `Envelope`s, and the agent answers
each with one `Reply` (`net.rpc`); trainer ranks also send `Announce` and `Withdraw`. In the (epoch, round,
seq) of an envelope, `epoch` grows with every change of the fleet and with every restart of the controller,
`round` with every attempt to publish, `seq` with every command of a round. An agent answers a repeated one
with the stored reply and refuses an older epoch or round with `stale`.

Leaders of a trainer that drives an update ask by HTTP. What all engines must carry out is passed on to them as it is.
"""

from __future__ import annotations

import secrets
from enum import StrEnum

import msgspec

from windlass.config import CollectiveFabric, P2pBackend, PauseMode, UpdateBackend, UpdateMode
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.manifest import Role
from windlass.net.messages import Codec, Envelope, Refused, Reply
from windlass.planning.relay import RelayGroup
from windlass.transfer.bindings import (
    DestinationBinding,
    GroupOffer,
    RelayAddress,
    Relayed,
    WireTensor,
    Written,
)
from windlass.transports.base import TransportOffer
from windlass.updates.report import UpdateReport

JOB_VARIABLE = "WINDLASS_JOB"
MAX_COUNT = (1 << 53) - 1
"""Of versions, epochs and rounds: what JSON and float64 hold exactly, far below what msgpack does."""
ABORT_NOTICE = "the update goes on without this rank, or has ended"
"""Why a rank is told to forget a round. What others said about it, of pids and of addresses that
they could not write, is in the log and in the trainers' report, and no engine's to know."""

# --- joining -----------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True):
    """Memory that a rank has registered with its transports before it connects.

    Attributes:
        num_regions: of memory. nbytes: of all of them, gaps between parameters included.
        seconds: that it took.
    """

    num_regions: int = 0
    nbytes: int = 0
    seconds: float = 0.0


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
        offers: every way in which the rank can be written, and can write; at least one, of different
            transports. No other rank of the fleet has an endpoint of these.
        host: `host_identity()` of the rank's process.
        url: HTTP address of the engine, sent by rank 0 of an engine, else empty.
        served_version: version that an engine rank holds, or that a trainer rank was last told is
            published; -1 for none.
        lineage: of the run that `served_version` belongs to (`Publish.lineage`); of a trainer rank
            that knows of none, of the controller that it was connected to before; else empty.
        job: of a trainer rank: the same for all ranks of one start of the trainers, and for no
            other start.
        epoch, round: the last that the agent took part in; a restarted controller learns them here.
        mixed_weights: whether live weights may be of two versions.
        can_send: whether an engine rank can hand its weights on to another engine.
        comes_to_rest: whether this rank brings its engine to rest where requests stay where they are
            (`PauseMode.IN_PLACE`). If rank 0 does not, whoever hosts the controller does, by the engine's own routes.
        not_resumed: see `Done`.
        registered: by an engine rank.
    """

    protocol_version: int
    worker: str
    incarnation: str
    role: Role
    group: str
    rank: int
    world_size: int
    manifest: bytes
    offers: tuple[TransportOffer, ...]
    host: str = ""
    url: str = ""
    served_version: int = -1
    epoch: int = 0
    round: int = 0
    mixed_weights: bool = False
    can_send: bool = False
    comes_to_rest: bool = False
    not_resumed: str = ""
    lineage: str = ""
    job: str = ""
    registered: Registered = Registered()


def group_and_rank(worker: str) -> tuple[str, int]:
    """Return what the name of a rank is made of.

    Raises:
        ConfigError: it is not GROUP/RANK.
    """
    group, _, rank = worker.rpartition("/")
    if not group or not (rank.isascii() and rank.isdecimal()):
        raise ConfigError(f"manifest: worker must be GROUP/RANK, got {worker!r}")
    return group, int(rank)


def job_of(given: str, world_size: int) -> str:
    """Return what tells one start of the trainers from any other.

    Args:
        given: by the owner; WINDLASS_JOB where that is empty, or one that is made where there is one rank.
        world_size: ranks of the trainers.

    Raises:
        ConfigError: several ranks, and nothing is given.
    """
    job = given or environment_value(JOB_VARIABLE)
    if not job and world_size > 1:
        raise ConfigError(
            f"job: must be given, or {JOB_VARIABLE} be set, to the same for all {world_size} ranks of "
            "this start of the trainers and to something else for every other start"
        )
    return job or secrets.token_hex(8)


class CannotJoin(msgspec.Struct, frozen=True, tag="cannot_join"):
    """Instead of Hello: an engine for which others may wait has failed before it could connect.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        group: the engine. message: why, for a person.
    """

    protocol_version: int
    group: str
    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Hello`.

    Attributes:
        epoch: of the controller.
        lineage: of the run whose versions it publishes: random, the same for as long as its journal
            is, or as its process lives where it keeps none.
    """

    epoch: int
    lineage: str


# --- binding: commands, and what answers them ---------------------------------------------


class ConnectEngine(msgspec.Struct, frozen=True, tag="connect_engine"):
    """Register memory for this plan and answer `Bound`. `plan` is the rank's own part.

    With `relays` listen for chunks that others pass on, too.
    """

    plan: bytes
    plan_digest: str
    mode: UpdateMode
    backend: UpdateBackend = P2pBackend()
    relays: bool = False


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """Engine rank: memory is registered; where to write, and where who passes chunks on to it connects."""

    plan_digest: str
    binding: DestinationBinding
    relay: RelayAddress | None = None


class ConnectRelay(msgspec.Struct, frozen=True, tag="connect_relay"):
    """Bind relay groups, after every member has answered `Bound`: a command to engines, part of another to trainers.

    Attributes:
        groups: all of them for a trainer, its own for an engine.
        bindings: of every member for a trainer, of those that it passes on to for an engine.
        addresses: of every root for a trainer, of those that it passes on to for an engine.
    """

    groups: tuple[RelayGroup, ...]
    bindings: tuple[DestinationBinding, ...]
    addresses: tuple[RelayAddress, ...]


class ConnectTrainer(msgspec.Struct, frozen=True, tag="connect_trainer"):
    """Bind the plan to these addresses; answer `Done`, or `Offered` where a group must form.

    `plan` is the rank's own part; `replicated` the `HELD` of boxes that others hold too.
    """

    plan: bytes
    plan_digest: str
    bindings: tuple[DestinationBinding, ...]
    backend: UpdateBackend = P2pBackend()
    replicated: bytes = b""
    relay: ConnectRelay | None = None


class ChangeLinks(msgspec.Struct, frozen=True, tag="change_links"):
    """Trainer: keep what is bound but for some links, and bind others; answer as to `ConnectTrainer`.

    For backends of one-sided writes, without a relay.

    Attributes:
        since: epoch of the command that this rank was bound by last: the links that it has now.
        gone: destinations whose links end, those that are bound anew among them.
        plan: the rank's own part of a plan for the new destinations; empty where there are none.
        bindings: of the new destinations.
    """

    since: int
    gone: tuple[str, ...]
    plan: bytes
    bindings: tuple[DestinationBinding, ...]


class NotBound(msgspec.Struct, frozen=True, tag="not_bound"):
    """Trainer rank: what these destinations offer cannot be written: worker -> why."""

    reasons: dict[str, str]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Trainer rank: the plan is bound, and its engines must join this group."""

    offer: GroupOffer


class JoinGroups(msgspec.Struct, frozen=True, tag="join_groups"):
    """Enter these groups, agree on what they carry, and answer `Done`.

    Sent to all members at once, and to each one in the same order of groups.
    """

    offers: tuple[GroupOffer, ...]
    deadline_s: float


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


class BeginPush(msgspec.Struct, frozen=True, tag="begin_push"):
    """Engine: the trainer drives this update; gather what comes, and change nothing yet."""


class JoinPushGroup(msgspec.Struct, frozen=True, tag="join_push_group"):
    """Engine: enter the group of a leader."""

    offer: GroupOffer
    fabric: CollectiveFabric
    deadline_s: float


class ReceiveTensors(msgspec.Struct, frozen=True, tag="receive_tensors"):
    """Engine: the receiving half of one broadcast of whole tensors, flat, in this order."""

    group: str
    tensors: tuple[WireTensor, ...]
    deadline_s: float


class ReadFiles(msgspec.Struct, frozen=True, tag="read_files"):
    """Engine: read this rank's boxes from a checkpoint folder."""

    folder: str


PushCommand = JoinPushGroup | ReceiveTensors | ReadFiles


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


# --- a leader -> controller, by HTTP -------------------------------------------------------


class PauseCall(msgspec.Struct, frozen=True, tag="pause"):
    """Begin an update, or join it; it ends by itself after `session_s`.

    Attributes:
        stage, num_stages: which of how many leaders this one is, if they declare an order; then
            the update ends when all of them have continued.
    """

    session_s: float
    stage: int = -1
    num_stages: int = 0


class ContinueCall(msgspec.Struct, frozen=True, tag="continue"):
    """This leader has sent everything; the last one publishes. Nobody does if one is negative."""

    version: int


class MembersCall(msgspec.Struct, frozen=True, tag="members"):
    """Which engine ranks take part."""


CallbackCall = PauseCall | ContinueCall | MembersCall | PushCommand


class CallbackRequest(msgspec.Struct, frozen=True):
    """A call of a leader; the same `request_id` is the same call, however often it is asked.

    `number` counts the calls of one leader in one update that all engines carry out.
    """

    request_id: str
    leader: str
    call: CallbackCall
    deadline_s: float
    number: int = 0


class CallbackAnswer(msgspec.Struct, frozen=True):
    """`error` is one line, empty when it was done; `members` answers `MembersCall`."""

    error: str = ""
    members: tuple[str, ...] = ()


# --- frames ------------------------------------------------------------------------------

AgentFrame = Hello | CannotJoin | Announce | Withdraw | Reply[Result]


ControllerFrame = Welcome | Refused | Envelope[Command | Probe] | UpdateReport


AGENT_FRAMES: Codec[AgentFrame] = Codec(AgentFrame, "agent frame")


CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(ControllerFrame, "controller frame")
