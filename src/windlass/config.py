"""Settings of the control plane. They are frozen, and checked when they are created."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from windlass.errors import ConfigError
from windlass.plugins import Registry

NameT = TypeVar("NameT", bound=StrEnum)


def take_name(what: str, value: str, kind: type[NameT]) -> NameT:
    """Return the member of an enumeration that has this name; a member is returned as it is.

    Raises:
        ConfigError: no member has this name. The message begins with `what`.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{what} must be one of {[*map(str, kind)]}, got {value!r}") from None


def take_names(settings: msgspec.Struct, kinds: Mapping[str, type[StrEnum]]) -> None:
    """Replace the names of enumeration members (`mode="staged"`) in settings by the members.

    `__post_init__` calls this, because other code compares members with `is`, which is False for a string.

    Raises:
        ConfigError: no member has such a name.
    """
    for field, kind in kinds.items():
        value = msgspec.structs.asdict(settings)[field]
        member = take_name(f"{type(settings).__name__}: {field}", value, kind)
        msgspec.structs.force_setattr(settings, field, member)


def check_numbers(
    settings: object, least: Mapping[str, float], above: Collection[str] = (), *, where: str = ""
) -> None:
    """Check that fields of an object are numbers and large enough.

    Args:
        settings: object that has the fields.
        least: field -> minimum. If the minimum is an integer, the value must be an integer too.
        above: fields that must be greater than 0.
        where: text before the name of the field in an error; empty for the name of the type.

    Raises:
        ConfigError: a field is wrong. The message contains the type, the field, the rule and the value.
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
    """Target of one-sided writes.

    IN_PLACE: the live parameters, while the engine is paused.
    STAGED: a shadow copy, while the engine generates. The pause then lasts for one local copy.
    """

    IN_PLACE = "in_place"
    STAGED = "staged"


class ReplicaPlace(StrEnum):
    """Memory of the replica, the copy of the weights that a trainer rank sends.

    OFF: no replica; the parameters are read in place. AUTO: HOST or DEVICE, the same kind of memory as the weights.
    HOST: host memory, pinned if the weights are on a GPU. DEVICE: memory of the GPU that has the weights.
    """

    OFF = "off"
    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Reaction(StrEnum):
    """Reaction to a version that looks like a mistake.

    OFF: the version is not checked. WARN: it is published, with a line in the log and a count in its report.
    REFUSE: it is not published.
    """

    OFF = "off"
    WARN = "warn"
    REFUSE = "refuse"


class PauseMode(StrEnum):
    """Treatment of running requests during a pause, with SGLang's names and meanings.

    ABORT: requests end now and return their partial tokens.
    RETRACT: requests return to the queue, lose their KV cache, and are prefilled again.
    IN_PLACE: requests stop, keep their KV cache, and continue after the pause.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class PhaseDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of the phases of an update, in seconds.

    Attributes:
        connect_s: binding a plan: ranks register memory and exchange addresses.
        prepare_s: trainer ranks pack data into their arenas; in `in_place` mode engines pause at the same time.
        pause_s: engines end or stop running requests, and pause.
        write_s: the bytes are written.
        verify_s: engines hash the received bytes.
        apply_s: engines unpack the bytes, or make a staged version the live one.
        publish_s: engines set the new version and resume.
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
    """Library that runs collectives: gloo between CPUs, NCCL between GPUs."""

    GLOO = "gloo"
    NCCL = "nccl"


class RelayShape(StrEnum):
    """Route of bytes that several engines need.

    OFF: each engine receives the bytes from the trainers. CHAIN: one engine receives them from the trainers, and each
    engine sends them to the next. TREE: each of two binary trees of engines transports half of the bytes, so that the
    depth is logarithmic and no engine sends more than one copy. AUTO: CHAIN for up to four engines, TREE for more.
    """

    OFF = "off"
    AUTO = "auto"
    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """Properties of a backend that the control plane takes into account.

    Attributes:
        one_sided: whether transports move the bytes. They can also send from a replica and write into memory of
            another process.
        collective: whether sender and receivers both take part in each write, so that a rank that fails breaks the
            group.
        lands_live: whether `in_place` writes change live parameters before they are verified.
        catches_up: whether an engine can send the published version to another engine.
        relays: whether engines can pass verified bytes on while they receive more.
        driven_by_trainer: whether the trainer's code sends the bytes itself, without a plan.
    """

    one_sided: bool = False
    collective: bool = False
    lands_live: bool = True
    catches_up: bool = False
    relays: bool = False
    driven_by_trainer: bool = False


PUSH_TRAITS = BackendTraits(lands_live=False, driven_by_trainer=True)
"""Traits of updates that a trainer drives itself (`RolloutCallback`). They write to a shadow copy."""


class P2pBackend(msgspec.Struct, frozen=True, tag="p2p", omit_defaults=True):
    """Backend with one-sided writes, directly from the trainer rank that has the bytes.

    Attributes:
        relay: route of the bytes among engines whose ranks have the same boxes and the same memory layout.
        relay_chunk_nbytes: number of bytes that an engine verifies and passes on at a time.
    """

    traits: ClassVar[BackendTraits] = BackendTraits(one_sided=True, catches_up=True, relays=True)

    relay: RelayShape = RelayShape.OFF
    relay_chunk_nbytes: int = 4 << 20

    def __post_init__(self) -> None:
        take_names(self, {"relay": RelayShape})
        check_numbers(self, {"relay_chunk_nbytes": 1})


class XcclBackend(msgspec.Struct, frozen=True, tag="xccl"):
    """Backend with broadcasts: every trainer rank broadcasts to the engine ranks that need its bytes.

    Attributes:
        fabric: gloo or NCCL.
        bucket_nbytes: bytes per broadcast. Each rank allocates `num_buffers` buckets of this size.
        num_buffers: number of buckets. With 2, packing, broadcast and loading overlap; with 1, they run one after
            another.
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
    """Backend that writes safetensors files to a folder that trainers and engines share.

    Attributes:
        folder: absolute path, the same on every rank.
        keep_versions: number of versions that stay on disk, >= 1.
    """

    traits: ClassVar[BackendTraits] = BackendTraits(lands_live=False)

    folder: str
    keep_versions: int = 2

    def __post_init__(self) -> None:
        given: object = self.folder
        if not isinstance(given, str | Path) or not Path(given).is_absolute():
            raise ConfigError(f"DiskBackend: folder must be an absolute path, got {self.folder!r}")
        # msgspec cannot encode a Path.
        msgspec.structs.force_setattr(self, "folder", str(self.folder))
        check_numbers(self, {"keep_versions": 1})


class PluginBackend(msgspec.Struct, frozen=True, tag="plugin", omit_defaults=True):
    """A backend that an installed package registers as an entry point of `windlass.backends`.

    Attributes:
        name: name of the entry point, on the controller and on every rank.
        options: plain values that the backend's sender and receivers receive.
    """

    name: str
    options: dict[str, Any] = {}

    @property
    def traits(self) -> BackendTraits:
        """Return the traits of the registered backend.

        Raises:
            ConfigError: see `find_backend`.
        """
        return find_backend(self.name).traits


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredBackend:
    """Base class of the objects of entry points in `windlass.backends`; see `transfer.backends.Backend`.

    Attributes:
        traits: properties that the control plane takes into account.
    """

    traits: BackendTraits


BACKENDS: Registry[RegisteredBackend] = Registry(
    noun="backend", kind=RegisteredBackend, group="windlass.backends"
)
"""Registry of backends that other packages define."""


@cache
def find_backend(name: str) -> RegisteredBackend:
    """Return the backend that an installed package has registered under this name.

    Raises:
        ConfigError: no package has registered this name, or the registered backend is not usable.
    """
    return BACKENDS.find(name)


UpdateBackend = P2pBackend | XcclBackend | DiskBackend | PluginBackend


class RouterKind(StrEnum):
    """Interface through which the controller notifies an external router.

    WORKERS: the `/workers` routes of sglang-router (SGLang's model gateway) and of vllm-router.
    WEBHOOK: a POST of all engines as JSON to one address.
    """

    WORKERS = "workers"
    WEBHOOK = "webhook"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An external router in front of the engines; the controller reports to it which engines may receive requests.

    Attributes:
        url: address of the router, or the address to which a webhook's data is posted. Redirects are not followed.
        kind: interface of the router.
        deadline_s: seconds for one try.
        num_tries: number of tries. After the last one the controller waits for the next change of the fleet.
    """

    url: str
    kind: RouterKind = RouterKind.WORKERS
    deadline_s: float = 10.0
    num_tries: int = 8

    def __post_init__(self) -> None:
        take_names(self, {"kind": RouterKind})
        check_numbers(self, {"num_tries": 1}, ("deadline_s",))


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for updates of the fleet.

    Attributes:
        mode: target of writes. pause_mode: treatment of running requests.
        backend: backend that moves the bytes. The controller sends it to trainers and engines.
        deadlines: deadline of each phase.
        max_rewrites: number of times that a link is written again in one round after a failure or a wrong digest.
        min_engines: number of engines that must be connected before a round begins.
        compare_share: largest share of the update time, in [0, 1], that trainer ranks spend on comparing replicated
            weights. The first update always compares all of them; with 1, every update does.
        unchanged: reaction to a version whose bytes all equal the previous version of the same trainers.
        non_finite: reaction to a version in which a parameter contains NaN or infinity. REFUSE checks all
            parameters before the first byte is sent. WARN checks 4 MiB per rank and update, a different part each
            time.
        heartbeat_s: seconds without an answer to a ping after which a connection counts as dead.
        max_message_nbytes: maximum size of a frame. A larger frame closes its connection.
        routers: external routers, which the controller tells which engines may receive requests.
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
