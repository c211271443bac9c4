"""Messages between the controller and an agent while a rank joins the fleet and binds a plan.

The module `messages` defines the messages of a round, and the unions of all messages of a connection.
"""

from __future__ import annotations

import secrets

import msgspec

from windlass.config import P2pBackend, UpdateBackend, UpdateMode
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Role
from windlass.memory.room import HOST
from windlass.transfer.bindings import DestinationBinding, GroupOffer, RelayAddress
from windlass.transports.base import TransportOffer

Identity = tuple[str, str]
"""Identity of a process: worker name and incarnation."""
JOB_VARIABLE = "WINDLASS_JOB"
"""Environment variable with the identity of this start of the trainers, see `job_of`."""
ALLOW_UNUSED_VARIABLE = "WINDLASS_ALLOW_UNUSED"
"""Environment variable with patterns for `Hello.allow_unused`, separated by spaces."""

# --- joining -----------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True):
    """Memory that a rank registered with its transports before it connected.

    Attributes:
        num_regions: number of memory regions.
        nbytes: total size of the regions, which may include gaps between parameters.
        seconds: duration of the registration.
    """

    num_regions: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class TurnRoom(msgspec.Struct, frozen=True):
    """Memory that a rank uses in turns with other ranks, and the number of bytes that the rank needs there in an update.

    Attributes:
        name: see `windlass.memory.room.Room`; empty if it is not known.
        nbytes: size of the memory; 0 from an engine rank that does not sleep.
        weights_nbytes: bytes of the rank's weights in this memory while engines read; 0 from a trainer rank with a replica
            in other memory.
        caches_nbytes: bytes that an engine rank maps afterwards, before it serves; 0 if they are not known.
    """

    name: str = ""
    nbytes: int = 0
    weights_nbytes: int = 0
    caches_nbytes: int = 0

    @property
    def is_host(self) -> bool:
        """Whether this is memory of the host."""
        return self.name == HOST


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of an agent after it has connected.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        worker: name GROUP/RANK, unique in the fleet (`trainer/0`, `engine-a/1`).
        incarnation: random text of this process; it distinguishes two processes with the same name.
        role: trainer or engine.
        group: name of the engine, or of the trainers' group.
        rank: rank in the group.
        world_size: number of ranks in the group.
        manifest: encoded `ShardManifest` of this rank.
        offers: one offer per transport over which the rank can write and be written; at least one. The endpoints are
            unique in the fleet.
        host: `host_identity()` of the rank's process.
        url: HTTP address of the engine's server, from rank 0 of an engine; empty from other ranks.
        served_version: from an engine rank, the version of its weights; from a trainer rank, the newest published
            version that a controller has reported to it; -1 for none.
        lineage: lineage of the run that `served_version` belongs to (`Publish.lineage`). A trainer rank without such a
            version sends the lineage from its last `Welcome`. Empty if there is none.
        job: from a trainer rank, identity of its job: equal for all ranks of one start of the trainers, and different
            for every other start.
        epoch: epoch of the newest command that the agent has begun.
        round: round of that command.
        received_epoch: epoch of the newest command that the agent has received, at least `epoch`. The agent refuses the
            commands that it had not begun when the connection was lost, and all later commands of their rounds. A
            restarted controller therefore raises its own epoch to at least this one.
        mixed_weights: whether the live weights may be of two versions.
        applied: from an engine rank, version that the rank has verified and made live, if the connection was lost before
            the command to serve it; -1 for none. `mixed_weights` is then True, because other ranks of the engine may
            have another version.
        can_send: whether an engine rank can send its weights to another engine.
        comes_to_rest: whether this rank can pause its engine and keep running requests (`PauseMode.IN_PLACE`). If rank
            0 cannot, the controller's process pauses the engine over HTTP routes of the engine's server.
        not_resumed: see `Done`.
        registered: memory that an engine rank has registered.
        allow_unused: from a trainer rank, name patterns of trainer tensors that engines need not have.
        keep: from a trainer rank, name patterns of engine tensors that stay as they are if no trainer has them.
        unwritten: from an engine rank with a version, names of the tensors that no update has written. They have the
            values that the engine loaded at its start.
        rounded: from an engine rank, tensor -> dtype to which the engine rounds received values. The engine stores the
            rounded values in a parameter of a wider dtype. The manifest contains only the wider dtype.
        releases: whether a trainer rank frees memory for the engines after they have verified its bytes (`Release`).
        room: memory on which the rank takes turns.
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
    received_epoch: int = 0
    mixed_weights: bool = False
    applied: int = -1
    can_send: bool = False
    comes_to_rest: bool = False
    not_resumed: str = ""
    lineage: str = ""
    job: str = ""
    registered: Registered = Registered()
    allow_unused: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    rounded: dict[str, DType] = {}
    releases: bool = False
    room: TurnRoom = TurnRoom()


def group_and_rank(worker: str) -> tuple[str, int]:
    """Return the group and the rank of a worker name.

    Raises:
        ConfigError: the name is not GROUP/RANK.
    """
    group, _, rank = worker.rpartition("/")
    if not group or not (rank.isascii() and rank.isdecimal()):
        raise ConfigError(f"manifest: worker must be GROUP/RANK, got {worker!r}")
    return group, int(rank)


def job_of(given: str, world_size: int) -> str:
    """Return the identity of this trainer job, for `Hello.job`.

    Args:
        given: identity from the caller. If it is empty, the identity is the value of WINDLASS_JOB. If that is empty
            too, a single rank gets a random identity.
        world_size: number of trainer ranks.

    Raises:
        ConfigError: there are several ranks, and both `given` and WINDLASS_JOB are empty.
    """
    job = given or environment_value(JOB_VARIABLE)
    if not job and world_size > 1:
        raise ConfigError(
            f"job: must not be empty for {world_size} trainer ranks; pass `job` or set {JOB_VARIABLE}, with one value "
            "for all ranks and a new value whenever the trainers start again"
        )
    return job or secrets.token_hex(8)


class CannotJoin(msgspec.Struct, frozen=True, tag="cannot_join"):
    """First frame of an engine that failed to start and therefore cannot join; sent instead of `Hello`.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        group: name of the engine.
        message: reason of the failure.
    """

    protocol_version: int
    group: str
    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`.

    Attributes:
        epoch: the controller's present epoch.
        lineage: random identity of the controller's run. A controller that restarts with the same journal keeps the
            lineage. Without a journal, every start of the controller makes a new lineage.
    """

    epoch: int
    lineage: str


# --- binding: commands and their answers ---------------------------------------------------


class ConnectEngine(msgspec.Struct, frozen=True, tag="connect_engine"):
    """Command to an engine rank: register memory for this plan and answer `Bound`.

    Attributes:
        plan: encoded part of the plan for this rank (`TransferPlan.encode`).
        plan_digest: digest of the whole plan.
        mode: see `ControlConfig`.
        backend: see `ControlConfig`.
        relays: whether the rank must also listen for chunks that other ranks of a relay send.
        kept: names of tensors that no source of this plan writes; the engine verifies that they do not change.
    """

    plan: bytes
    plan_digest: str
    mode: UpdateMode
    backend: UpdateBackend = P2pBackend()
    relays: bool = False
    kept: tuple[str, ...] = ()


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """Answer of an engine rank that has registered its memory.

    Attributes:
        plan_digest: digest of the bound plan.
        binding: addresses that sources write to.
        relay: address at which this rank listens for chunks of a relay; None if it is in no relay.
    """

    plan_digest: str
    binding: DestinationBinding
    relay: RelayAddress | None = None


class ConnectTrainer(msgspec.Struct, frozen=True, tag="connect_trainer"):
    """Command to a source: bind the plan to these addresses.

    The source is a trainer rank, or an engine rank in a catch-up. It answers `Done`, or `Offered` if its engines must
    join a collective group, or `NotBound`.

    Attributes:
        plan: encoded part of the plan for this rank (`TransferPlan.encode`).
        bindings: addresses of this rank's destinations.
        backend: see `ControlConfig`.
        replicated: boxes of this rank that other trainer ranks hold too, as bytes of an array of dtype `HELD`. Empty if
            no other rank holds a box of this rank.
    """

    plan: bytes
    bindings: tuple[DestinationBinding, ...]
    backend: UpdateBackend = P2pBackend()
    replicated: bytes = b""


class ChangeLinks(msgspec.Struct, frozen=True, tag="change_links"):
    """Command to a trainer rank: end some links, bind new links, and keep all others.

    The rank answers as it answers `ConnectTrainer`. The controller sends this command only with one-sided writes, and only if
    no engine ranks relay.

    Attributes:
        since: epoch of the last command that bound this rank, as the controller knows it. The rank refuses the command
            if it was bound in another epoch, because its links are then different.
        gone: destinations whose links must end. A destination that gets a new link is included.
        plan: this rank's encoded part of the plan for the new destinations; empty without new destinations.
        bindings: addresses of the new destinations.
    """

    since: int
    gone: tuple[str, ...]
    plan: bytes
    bindings: tuple[DestinationBinding, ...]


class NotBound(msgspec.Struct, frozen=True, tag="not_bound"):
    """Answer of a source that cannot write to some destinations, and therefore has not bound the plan.

    Attributes:
        reasons: destination -> reason.
    """

    reasons: dict[str, str]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Answer of a trainer rank that has bound the plan and offers a collective group, which its engines must join."""

    offer: GroupOffer
