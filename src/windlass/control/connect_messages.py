"""Messages between the controller and an agent while a rank joins the fleet and binds a plan.

They are sent when the ranks of the fleet have changed. `messages` has the messages of a round, and the frames that
carry both kinds.
"""

from __future__ import annotations

import secrets

import msgspec

from windlass.config import P2pBackend, UpdateBackend, UpdateMode
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.layout.manifest import Role
from windlass.transfer.bindings import DestinationBinding, GroupOffer, RelayAddress
from windlass.transports.base import TransportOffer

Identity = tuple[str, str]
"""Identity of a process: worker name and incarnation."""
JOB_VARIABLE = "WINDLASS_JOB"
ALLOW_UNUSED_VARIABLE = "WINDLASS_ALLOW_UNUSED"

# --- joining -----------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True):
    """Memory that a rank has registered with its transports before it connects.

    Attributes:
        num_regions: number of memory regions.
        nbytes: bytes of all regions, including gaps between parameters.
        seconds: seconds that the registration took.
    """

    num_regions: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of an agent.

    Attributes:
        protocol_version: must equal `PROTOCOL_VERSION`.
        worker: identity, unique in the fleet (`trainer/0`, `engine-a/1`).
        incarnation: random per process; it distinguishes two processes with the same name.
        role: trainer or engine.
        group: the trainer job or the engine that this rank belongs to.
        rank: rank in the group.
        world_size: number of ranks in the group.
        manifest: `ShardManifest.encode()`.
        offers: one offer for each transport that the rank can use to write and to be written; at least one. No other
            rank of the fleet has the same endpoints.
        host: `host_identity()` of the rank's process.
        url: HTTP address of the engine, sent by rank 0 of an engine, else empty.
        served_version: version that an engine rank holds, or the published version that the controller last reported
            to a trainer rank; -1 for none.
        lineage: lineage of the run that `served_version` belongs to (`Publish.lineage`). A trainer rank without such a
            version sends the lineage of its previous controller; else empty.
        job: for a trainer rank, identity of its start: equal for all ranks of one start of the trainers, and different
            for every other start.
        epoch: epoch of the newest command that the agent has received; a restarted controller needs it.
        round: round of that command.
        mixed_weights: whether the live weights may be of two versions.
        can_send: whether an engine rank can send its weights to another engine.
        comes_to_rest: whether this rank can pause its engine and keep running requests (`PauseMode.IN_PLACE`). If rank 0
            cannot, the host of the controller pauses the engine over the engine's own HTTP routes.
        not_resumed: see `Done`.
        registered: memory that an engine rank has registered.
        allow_unused: for a trainer rank, patterns of tensors that engines need not have.
        keep: for a trainer rank, patterns of tensors that engines keep if no trainer has them.
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
    """Return the group and the rank of a worker name.

    Raises:
        ConfigError: the name is not GROUP/RANK.
    """
    group, _, rank = worker.rpartition("/")
    if not group or not (rank.isascii() and rank.isdecimal()):
        raise ConfigError(f"manifest: worker must be GROUP/RANK, got {worker!r}")
    return group, int(rank)


def job_of(given: str, world_size: int) -> str:
    """Return the identity of this start of the trainers.

    Args:
        given: identity that the caller gave. If it is empty, the function takes WINDLASS_JOB, or else makes a random
            identity for a single rank.
        world_size: number of trainer ranks.

    Raises:
        ConfigError: several ranks, and neither the caller nor WINDLASS_JOB gives an identity.
    """
    job = given or environment_value(JOB_VARIABLE)
    if not job and world_size > 1:
        raise ConfigError(
            f"job: must be given, or {JOB_VARIABLE} must be set: one value for all {world_size} ranks of "
            "this start of the trainers, and another value for every other start"
        )
    return job or secrets.token_hex(8)


class CannotJoin(msgspec.Struct, frozen=True, tag="cannot_join"):
    """First frame of an engine that cannot join, because it failed to start; sent instead of `Hello`.

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
        epoch: epoch of the controller.
        lineage: random identity of the run that the controller publishes. It stays the same as long as the journal
            exists; without a journal, as long as the controller's process.
    """

    epoch: int
    lineage: str


# --- binding: commands and their answers ---------------------------------------------------


class ConnectEngine(msgspec.Struct, frozen=True, tag="connect_engine"):
    """Command to an engine rank: register memory for this plan and answer `Bound`.

    Attributes:
        plan: the rank's own part of the plan.
        plan_digest: digest of the whole plan.
        mode: see `ControlConfig`.
        backend: see `ControlConfig`.
        relays: whether the rank also listens for chunks that other ranks forward.
        kept: tensors that no trainer has and that must not change.
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
        binding: addresses at which sources write.
        relay: address to which ranks connect that pass chunks on to this rank; None without relays.
    """

    plan_digest: str
    binding: DestinationBinding
    relay: RelayAddress | None = None


class ConnectTrainer(msgspec.Struct, frozen=True, tag="connect_trainer"):
    """Command to a trainer rank: bind the plan to these addresses; answer `Done`, or `Offered` if a group must form.

    Attributes:
        plan: the rank's own part of the plan.
        plan_digest: digest of the whole plan.
        bindings: addresses of the destinations.
        backend: see `ControlConfig`.
        replicated: `HELD` rows of boxes that other ranks hold too.
    """

    plan: bytes
    plan_digest: str
    bindings: tuple[DestinationBinding, ...]
    backend: UpdateBackend = P2pBackend()
    replicated: bytes = b""


class ChangeLinks(msgspec.Struct, frozen=True, tag="change_links"):
    """Command to a trainer rank: end some links, bind new links, and keep all others; the answers are those of `ConnectTrainer`.

    Only backends with one-sided writes get it, and only without a relay.

    Attributes:
        since: epoch of the last command that bound this rank, which identifies its present links.
        gone: destinations of the links that end, including destinations that are bound again.
        plan: the rank's own part of a plan for the new destinations; empty without new destinations.
        bindings: addresses of the new destinations.
    """

    since: int
    gone: tuple[str, ...]
    plan: bytes
    bindings: tuple[DestinationBinding, ...]


class NotBound(msgspec.Struct, frozen=True, tag="not_bound"):
    """Answer of a trainer rank that cannot write to these destinations: worker -> reason."""

    reasons: dict[str, str]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """Answer of a trainer rank that has bound the plan: its engines must join this group."""

    offer: GroupOffer
