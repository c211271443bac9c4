"""Settings of the control plane. An instance checks its values when it is created, and cannot change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
    """Return the member of the enumeration `kind` whose value is `value`. `value` may also be the member itself.

    Raises:
        ConfigError: there is no such member. The message begins with `what`.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{what} must be one of {[*map(str, kind)]}, got {value!r}") from None


def take_names(settings: msgspec.Struct, kinds: Mapping[str, type[StrEnum]]) -> None:
    """Replace strings in fields of settings by enumeration members, so that users may write `mode="staged"`.

    `__post_init__` of the settings calls this. Other code compares fields with members by `is`, which would be False
    for a string.

    Args:
        settings: object that is changed.
        kinds: name of a field -> its enumeration.

    Raises:
        ConfigError: an enumeration has no member with the field's value.
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
        least: name of a field -> minimum. If the minimum is an integer, the value must be an integer, too.
        above: names of fields that must be greater than 0.
        where: text before the field's name in an error. If it is empty, the name of the object's class is used.

    Raises:
        ConfigError: a field has a wrong value. The message has the field, the rule and the value.
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
    """Memory of the engine that an update writes.

    IN_PLACE: the live parameters, while the engine is paused.
    STAGED: a shadow copy, while the engine generates. After the write, the engine is paused to copy the shadow copy
        into the live parameters.
    """

    IN_PLACE = "in_place"
    STAGED = "staged"


class ReplicaPlace(StrEnum):
    """Memory of a replica, a copy of the weights that a trainer rank sends.

    OFF: no replica; the rank sends the parameters themselves.
    AUTO: HOST if the weights are in host memory, DEVICE if they are on a GPU.
    HOST: host memory, pinned if the weights are on a GPU.
    DEVICE: memory of the GPU on which the weights are.
    """

    OFF = "off"
    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Reaction(StrEnum):
    """Reaction of the controller to a version that looks like a mistake.

    OFF: the version is not checked.
    WARN: the version is published, with a warning in the log and in the report.
    REFUSE: the version is not published.
    """

    OFF = "off"
    WARN = "warn"
    REFUSE = "refuse"


class PauseMode(StrEnum):
    """Treatment of running requests during a pause; names and meanings as in SGLang.

    ABORT: requests end, and return the tokens generated before the pause.
    RETRACT: requests return to the queue, lose their KV cache, and are prefilled again.
    IN_PLACE: requests stop, keep their KV cache, and continue after the pause.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class PhaseDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of the phases of an update, in seconds.

    Attributes:
        connect_s: all ranks register memory and exchange addresses.
        prepare_s: trainer ranks pack data into their arenas; in `in_place` mode engines pause at the same time.
        pause_s: engines end or stop running requests, and pause.
        write_s: trainer ranks write the bytes.
        verify_s: engines hash the received bytes.
        apply_s: engines unpack the bytes, or copy a staged version into the live parameters.
        publish_s: engines set the new version and resume.
        fleet_s: the controller waits until `ControlConfig.min_engines` engines are connected.

    Raises:
        ConfigError: a deadline is not a number above 0.
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

    OFF: each engine receives the bytes from the trainers.
    CHAIN: one engine receives the bytes from the trainers, and each engine sends them to the next engine.
    TREE: engines form two binary trees, and each tree sends half of the bytes. The depth is logarithmic, and no engine
        sends more than one copy of the bytes.
    AUTO: CHAIN for up to four engines, TREE for more.
    """

    OFF = "off"
    AUTO = "auto"
    CHAIN = "chain"
    TREE = "tree"


class P2pBackend(msgspec.Struct, frozen=True, tag="p2p", omit_defaults=True):
    """Backend with one-sided writes: each trainer rank writes its shards directly into the engines.

    Attributes:
        relay: route of the bytes among engines whose ranks have the same boxes and the same memory layout.
        relay_chunk_nbytes: number of bytes that an engine verifies and then sends on at a time.
    """

    name: ClassVar[str] = "p2p"

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
        num_buffers: number of buckets per rank, 1 or 2. With 2, packing, broadcasting and unpacking overlap.

    Raises:
        ConfigError: a value is out of range, or `bucket_nbytes` is not a multiple of 64.
    """

    name: ClassVar[str] = "xccl"

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
        folder: absolute path of the folder, the same on every rank.
        keep_versions: number of earlier versions that stay on disk when a rank writes a new version, >= 1.

    Raises:
        ConfigError: the folder is not an absolute path, or `keep_versions` is below 1.
    """

    name: ClassVar[str] = "disk"

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
    """Backend that an installed package defines by an entry point of the group `windlass.backends`.

    Attributes:
        name: name of the entry point; every rank must have it, too.
        options: plain values that are passed to the backend's sender and receivers.
    """

    name: str
    options: dict[str, Any] = {}


class PushBackend(msgspec.Struct, frozen=True, tag="push"):
    """Backend of updates that trainer ranks drive themselves with `RolloutCallback`."""

    name: ClassVar[str] = "push"


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Entry of the registry of backends. An entry point of the group `windlass.backends` refers to such an object.

    Attributes:
        make: function that returns the `windlass.backends.Backend` for these `PluginBackend.options`. It raises
            ConfigError if an option is wrong.
    """

    make: Callable[[Any], object]


BACKENDS: Registry[BackendEntry] = Registry(
    noun="backend",
    kind=BackendEntry,
    group="windlass.backends",
    built_in={
        name: f"windlass.backends.{name}:BACKEND" for name in ("p2p", "xccl", "disk", "push")
    },
)


@cache
def find_backend(name: str) -> BackendEntry:
    """Return the entry of the backend with this name. The backend is built in or comes from an installed package.

    Raises:
        ConfigError: no backend has this name, or its package cannot be imported.
    """
    return BACKENDS.find(name)


UpdateBackend = P2pBackend | XcclBackend | DiskBackend | PluginBackend
DrivenBackend = PushBackend | PluginBackend
"""Backend of updates that trainer ranks drive themselves."""
DRIVEN_BACKENDS: tuple[DrivenBackend, ...] = (PushBackend(),)
"""Backends that every controller offers in addition to `ControlConfig.backend`."""


class RouterKind(StrEnum):
    """Interface through which the controller notifies an external router.

    WORKERS: the `/workers` routes of sglang-router (SGLang's model gateway) and of vllm-router.
    WEBHOOK: a POST to one URL, with all engines as JSON.
    """

    WORKERS = "workers"
    WEBHOOK = "webhook"


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """External router in front of the engines. The controller tells the router which engines may receive requests.

    Attributes:
        url: address of the router, or for WEBHOOK the URL of the POST. The controller follows no redirects.
        kind: interface of the router.
        deadline_s: seconds for one try of a notification.
        num_tries: number of tries of a notification. If all fail, the next notification is at the next change of the
            fleet.
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
        mode: whether an update writes the live weights of the engines, or a second copy.
        pause_mode: treatment of running requests during a pause.
        backend: backend that moves the bytes. The controller sends this setting to trainers and engines.
        deadlines: deadline of each phase of an update.
        max_rewrites: number of times that a link may be written again in one round, after a failed write or a wrong
            digest. Also the number of further rounds for a version if a failed round has broken the binding, as with the
            backend `xccl`.
        min_engines: number of engines that must be connected before a round begins.
        compare_share: trainer ranks compare replicated weights for at most this share of the update time, in [0, 1].
            The first update compares all replicated weights; with 1, every update compares all of them.
        unchanged: reaction to a version with the same bytes as the trainers' previous version.
        non_finite: reaction to a version with NaN or infinity in a parameter. REFUSE checks all parameters
            before the first byte is sent. WARN checks a different 4 MiB per rank in each update.
        heartbeat_s: if a peer does not answer a ping within these seconds, the connection counts as dead.
        max_message_nbytes: maximum size of a frame. The controller closes a connection that sends a larger frame.
        routers: external routers that the controller notifies.

    Raises:
        ConfigError: a value is out of range or has a wrong type, or there is no such backend.
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
            raise ConfigError(
                f"ControlConfig: routers must contain only RouterConfig, got {self.routers!r}"
            )
        if not isinstance(self.backend, UpdateBackend):
            raise ConfigError(
                "ControlConfig: backend must be a P2pBackend, XcclBackend, DiskBackend or "
                f"PluginBackend, got {self.backend!r}"
            )
        if isinstance(self.backend, PluginBackend):
            find_backend(self.backend.name).make(self.backend.options)
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
