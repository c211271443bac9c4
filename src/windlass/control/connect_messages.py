"""What the controller and an agent say while they connect: who joins, and where bytes will go.

All of it once per topology; `messages` has what a round says, and the frames that carry both.
"""

from __future__ import annotations

import secrets

import msgspec

from windlass.config import P2pBackend, UpdateBackend, UpdateMode
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.manifest import Role
from windlass.planning.relay import RelayGroup
from windlass.transfer.bindings import DestinationBinding, GroupOffer, RelayAddress
from windlass.transports.base import TransportOffer

Identity = tuple[str, str]
"""One process: worker name and incarnation."""
JOB_VARIABLE = "WINDLASS_JOB"
ALLOW_UNUSED_VARIABLE = "WINDLASS_ALLOW_UNUSED"

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
        epoch, round: the last that the agent took part in; a restarted controller finds them here.
        mixed_weights: whether live weights may be of two versions.
        can_send: whether an engine rank can hand its weights on to another engine.
        comes_to_rest: whether this rank brings its engine to rest where requests stay where they are
            (`PauseMode.IN_PLACE`). If rank 0 does not, whoever hosts the controller does, by the engine's own routes.
        not_resumed: see `Done`.
        registered: by an engine rank.
        allow_unused: of a trainer rank: patterns of tensors that engines need not take.
        keep: of a trainer rank: patterns of tensors that engines keep if no trainer has them.
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
    allow_unused: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


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

    With `relays` listen for chunks that others pass on, too. `kept`: tensors that must stay as they are.
    """

    plan: bytes
    plan_digest: str
    mode: UpdateMode
    backend: UpdateBackend = P2pBackend()
    relays: bool = False
    kept: tuple[str, ...] = ()


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
