"""Settings of the control plane, frozen and checked when they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from windlass.errors import ConfigError
from windlass.plugins import Registry

NameT = TypeVar("NameT", bound=StrEnum)


def take_name(what: str, value: str, kind: type[NameT]) -> NameT:
    """The member of an enumeration that has this name, or is it.

    Raises:
        ConfigError: no such member; begins with `what`.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{what} must be one of {[*map(str, kind)]}, got {value!r}") from None


def take_names(settings: msgspec.Struct, kinds: Mapping[str, type[StrEnum]]) -> None:
    """Accept the name of a member (`mode="staged"`) where settings hold an enumeration.

    Called by `__post_init__`: later members are told apart by identity, and a mere string would
    be none of them.

    Raises:
        ConfigError: no such member.
    """
    for field, kind in kinds.items():
        value = msgspec.structs.asdict(settings)[field]
        member = take_name(f"{type(settings).__name__}: {field}", value, kind)
        msgspec.structs.force_setattr(settings, field, member)


def check_numbers(
    settings: object, least: Mapping[str, float], above: Collection[str] = (), *, where: str = ""
) -> None:
    """Refuse what is no number, or too small, in the fields of a frozen value.

    Args:
        settings: read by field name.
        least: field -> smallest value; an integer there asks for integers.
        above: fields that must be greater than 0.
        where: what stands before a field's name in an error; empty for the type's name.

    Raises:
        ConfigError: names type, field, rule and value.
    """
    for field in (*least, *above):
        value = attrgetter(field)(settings)
        kinds = (int,) if isinstance(least.get(field), int) else (int, float)
        rule = f">= {least[field]}" if field in least else "> 0"
        known = isinstance(value, kinds) and not isinstance(value, bool)
        if not known or not (value >= least[field] if field in least else value > 0):
            kind = "an integer " if kinds == (int,) and not known else ""
            name = where or f"{type(settings).__name__}: "
            raise ConfigError(f"{name}{field} must be {kind}{rule}, got {value!r}")


class UpdateMode(StrEnum):
    """Where one-sided writes land.

    IN_PLACE: in the live parameters, inside the pause.
    STAGED: in a shadow while the engine generates; the pause is one local copy.
    """

    IN_PLACE = "in_place"
    STAGED = "staged"


class ReplicaPlace(StrEnum):
    """Where the copy lies that a trainer rank sends from.

    OFF: there is none, parameters are read where they lie. AUTO: in memory of the weights' kind.
    HOST: in host memory, pinned where weights are on a GPU. DEVICE: in the memory of the weights' GPU.
    """

    OFF = "off"
    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Reaction(StrEnum):
    """What happens to a version that looks like a mistake.

    OFF: nobody looks. WARN: it is published, with a line in the log and a count in its report. REFUSE: it is not published.
    """

    OFF = "off"
    WARN = "warn"
    REFUSE = "refuse"


class PauseMode(StrEnum):
    """What happens to running requests, with SGLang's names and meanings.

    ABORT: they end now and return their partial tokens.
    RETRACT: they go back to the queue, lose their KV cache, and are prefilled again.
    IN_PLACE: they stop where they are and keep their KV cache.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class PhaseDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    """One deadline per phase, in seconds: the phases wait for different things.

    Attributes:
        connect_s: bind a plan: register memory, exchange addresses.
        prepare_s: pack into the arena; engines pause at the same time in `in_place` mode.
        pause_s: drain or retract running requests, and come to rest.
        write_s: move the bytes.
        verify_s: hash what landed. apply_s: unpack, flip, finalise. publish_s: stamp and resume.
        fleet_s: wait for enough engines before a round begins.
    """

    connect_s: float = 60.0
    prepare_s: float = 60.0
    pause_s: float = 30.0
    write_s: float = 120.0
    verify_s: float = 60.0
    apply_s: float = 60.0
    publish_s: float = 30.0
    fleet_s: float = 120.0

    def __post_init__(self) -> None:
        check_numbers(self, {}, self.__struct_fields__)


class CollectiveFabric(StrEnum):
    """What carries collectives: gloo between CPUs, NCCL between GPUs."""

    GLOO = "gloo"
    NCCL = "nccl"


class RelayShape(StrEnum):
    """How engines that want the same bytes get them.

    OFF: every engine from the trainers. CHAIN: one engine from the trainers, each hands on to the
    next. TREE: two binary trees that carry half of the bytes each, so that the depth is
    logarithmic and nobody sends more than one copy. AUTO: a chain of up to four, else trees.
    """

    OFF = "off"
    AUTO = "auto"
    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """What the control plane must know of how bytes travel.

    Attributes:
        one_sided: by the ranks' transports: from a replica as well, and into memory of another
            process.
        collective: both halves of a write enter it, so that one rank that fails breaks the group.
        lands_live: `in_place` writes touch live memory before they are verified.
        catches_up: an engine can hand the published version on to another one.
        relays: engines can pass on what they have verified, while it arrives.
        driven_by_trainer: the trainer's own calls move the bytes, and not a plan.
    """

    one_sided: bool = False
    collective: bool = False
    lands_live: bool = True
    catches_up: bool = False
    relays: bool = False
    driven_by_trainer: bool = False


PUSH_TRAITS = BackendTraits(lands_live=False, driven_by_trainer=True)
"""Of updates that a trainer drives itself (`RolloutCallback`): they land in a shadow copy."""


class P2pBackend(msgspec.Struct, frozen=True, tag="p2p", omit_defaults=True):
    """One-sided writes, straight from the trainer rank that owns the bytes.

    Attributes:
        relay: whether engines whose ranks hold the same boxes in the same memory layout pass the
            bytes on among themselves.
        relay_chunk_nbytes: what is verified and passed on at a time.
    """

    traits: ClassVar[BackendTraits] = BackendTraits(one_sided=True, catches_up=True, relays=True)

    relay: RelayShape = RelayShape.OFF
    relay_chunk_nbytes: int = 4 << 20

    def __post_init__(self) -> None:
        take_names(self, {"relay": RelayShape})
        check_numbers(self, {"relay_chunk_nbytes": 1})


class XcclBackend(msgspec.Struct, frozen=True, tag="xccl"):
    """Collective broadcast: every trainer rank to the engine ranks that need its bytes.

    Attributes:
        fabric: gloo or NCCL.
        bucket_nbytes: bytes per broadcast; two buckets are held at once on each rank.
        num_buffers: 2 overlaps packing, broadcast and loading; 1 does them one after another.
    """

    traits: ClassVar[BackendTraits] = BackendTraits(collective=True)

    fabric: CollectiveFabric = CollectiveFabric.GLOO
    bucket_nbytes: int = 32 << 20
    num_buffers: int = 2

    def __post_init__(self) -> None:
        take_names(self, {"fabric": CollectiveFabric})
        check_numbers(self, {"bucket_nbytes": 64, "num_buffers": 1})
        if self.bucket_nbytes % 64:
            raise ConfigError(
                f"XcclBackend: bucket_nbytes must be a positive multiple of 64, got {self.bucket_nbytes}"
            )
        if self.num_buffers not in {1, 2}:
            raise ConfigError(f"XcclBackend: num_buffers must be 1 or 2, got {self.num_buffers}")


class DiskBackend(msgspec.Struct, frozen=True, tag="disk"):
    """Safetensors files in a folder that trainers and engines share.

    Attributes:
        folder: absolute path; the same for every rank.
        keep_versions: versions that stay on disk, >= 1.
    """

    traits: ClassVar[BackendTraits] = BackendTraits(lands_live=False)

    folder: str
    keep_versions: int = 2

    def __post_init__(self) -> None:
        given: object = self.folder
        if not isinstance(given, str | Path) or not Path(given).is_absolute():
            raise ConfigError(f"DiskBackend: folder must be an absolute path, got {self.folder!r}")
        msgspec.structs.force_setattr(self, "folder", str(self.folder))  # a Path does not travel
        check_numbers(self, {"keep_versions": 1})


class PluginBackend(msgspec.Struct, frozen=True, tag="plugin", omit_defaults=True):
    """A backend that an installed package registers as an entry point of `windlass.backends`.

    Attributes:
        name: of the entry point, on the controller and on every rank.
        options: for both halves; plain values.
    """

    name: str
    options: dict[str, object] = {}

    @property
    def traits(self) -> BackendTraits:
        """What the registered backend states.

        Raises:
            ConfigError: see `find_backend`.
        """
        return find_backend(self.name).traits


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBackend:
    """What an entry point of `windlass.backends` leads to; see `transfer.backends.Backend`.

    Attributes:
        traits: what the control plane must know of it.
    """

    traits: BackendTraits


BACKENDS: Registry[RegisteredBackend] = Registry(
    noun="backend", kind=RegisteredBackend, group="windlass.backends"
)
"""Backends of other packages, by name."""


@cache
def find_backend(name: str) -> RegisteredBackend:
    """Return the backend that an installed package has registered under this name.

    Raises:
        ConfigError: none has, or it is not usable.
    """
    return BACKENDS.find(name)


UpdateBackend = P2pBackend | XcclBackend | DiskBackend | PluginBackend


class RouterKind(StrEnum):
    """What a router of others understands.

    WORKERS: the `/workers` routes of sglang-router (SGLang's model gateway) and of vllm-router.
    WEBHOOK: the whole fleet as JSON, posted to one address.
    """

    WORKERS = "workers"
    WEBHOOK = "webhook"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A router in front of the engines that is told which of them may be sent requests.

    Attributes:
        url: of the router; of a webhook the address that is posted to. A redirect is not followed.
        kind: what it understands.
        deadline_s: of one try.
        num_tries: until it waits for the next change of the fleet.
    """

    url: str
    kind: RouterKind = RouterKind.WORKERS
    deadline_s: float = 10.0
    num_tries: int = 8

    def __post_init__(self) -> None:
        take_names(self, {"kind": RouterKind})
        check_numbers(self, {"num_tries": 1}, ("deadline_s",))


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet is updated.

    Attributes:
        mode: where writes land. pause_mode: what happens to running requests.
        backend: how bytes travel; trainers and engines are told.
        deadlines: per phase.
        max_rewrites: how often a failed or mismatched link is written again in one round.
        min_engines: engines that must be there before a round begins.
        compare_share: of the time of updates that may go into comparing what trainer ranks hold in
            common, in [0, 1]; the first update compares everything in any case, 1 compares in every one.
        unchanged: what happens to a version of which every byte is that of the version before it, from the same trainers.
        non_finite: what happens to a version in which a parameter contains NaN or infinity. REFUSE looks at all
            parameters before anything is sent; WARN at 4 MiB of each rank, by turns.
        heartbeat_s: a connection that answers no ping for this long is dead.
        max_message_nbytes: larger frames close their connection.
        routers: of others, that are told which engines may be sent requests.
    """

    mode: UpdateMode = UpdateMode.IN_PLACE
    pause_mode: PauseMode = PauseMode.ABORT
    backend: UpdateBackend = P2pBackend()
    deadlines: PhaseDeadlines = PhaseDeadlines()
    max_rewrites: int = 2
    min_engines: int = 1
    compare_share: float = 0.02
    unchanged: Reaction = Reaction.WARN
    non_finite: Reaction = Reaction.WARN
    heartbeat_s: float = 20.0
    max_message_nbytes: int = 256 << 20
    routers: tuple[RouterConfig, ...] = ()

    def __post_init__(self) -> None:
        take_names(
            self,
            {
                "mode": UpdateMode,
                "pause_mode": PauseMode,
                "unchanged": Reaction,
                "non_finite": Reaction,
            },
        )
        if not all(isinstance(each, RouterConfig) for each in self.routers):
            raise ConfigError(f"ControlConfig: routers must be RouterConfig, got {self.routers!r}")
        if not isinstance(self.backend, UpdateBackend):
            raise ConfigError(
                "ControlConfig: backend must be a P2pBackend, XcclBackend, DiskBackend or "
                f"PluginBackend, got {self.backend!r}"
            )
        if isinstance(self.backend, PluginBackend):
            find_backend(self.backend.name)
        if not isinstance(self.deadlines, PhaseDeadlines):
            raise ConfigError(
                f"ControlConfig: deadlines must be PhaseDeadlines, got {self.deadlines!r}"
            )
        check_numbers(
            self,
            {"max_message_nbytes": 1, "max_rewrites": 0, "min_engines": 1, "compare_share": 0.0},
            ("heartbeat_s",),
        )
        if self.compare_share > 1:
            raise ConfigError(
                f"ControlConfig: compare_share must be in [0, 1], got {self.compare_share!r}"
            )
