"""Finds a transport by the name of its configuration: built in, or installed beside Windlass.

A distribution that brings a transport names its configuration in the entry point group
`windlass.transports`; the name of the entry point is the tag of the struct:

    [project.entry-points."windlass.transports"]
    file_mmap = "windlass_file_mmap:FileMmapConfig"
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from windlass.errors import ConfigError, TransportUnavailable
from windlass.memory.cuda.driver import gpu_of
from windlass.plugins import Registry
from windlass.transports.base import OneSidedTransport
from windlass.transports.traits import MemoryType

TRANSPORTS: Registry[object] = Registry(
    noun="transport",
    kind=object,
    group="windlass.transports",
    built_in={
        "auto": "windlass.transports.auto:AutoConfig",
        "cma": "windlass.transports.cma:CmaConfig",
        "cuda_ipc": "windlass.transports.cuda_ipc:CudaIpcConfig",
        "mooncake": "windlass.transports.mooncake.transport:MooncakeConfig",
        "nixl": "windlass.transports.nixl.transport:NixlConfig",
        "shm": "windlass.transports.shm:ShmConfig",
    },
    unavailable=TransportUnavailable,
)
"""The configurations of all transports, by name."""


class TransportConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True
):
    """Settings of one transport; the tag of a subclass is the transport's name in the registry.

    Decoded from `{"type": "mooncake", "host": "192.0.2.1"}`.

    Attributes:
        memory: kinds of memory that it can register.
        between_hosts: whether peers can be on other hosts.
        is_automatic: whether `auto` offers it.
        remedy: what a person can do where it does not start; one line.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset({MemoryType.HOST})
    between_hosts: ClassVar[bool] = False
    is_automatic: ClassVar[bool] = True
    remedy: ClassVar[str] = "see the message"

    @property
    def name(self) -> str:
        """Registry name."""
        return str(type(self).__struct_config__.tag)

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport.

        Args:
            towards: URL of the controller; a network transport without a host takes this host's
                address on the way there.
            gpu: ordinal of the GPU whose memory will be registered, whatever the settings say; -1
                for host memory, or for what the settings say.

        Raises:
            ConfigError, PeerUnreachable: this host has no such address; see `own_address`.
            TransportUnavailable: a dependency or kernel feature is missing, or the wire is not the
                one that was asked for.
        """
        raise ConfigError(f"transport {self.name!r}: its configuration must define create()")


class _Tagged(msgspec.Struct, frozen=True):
    type: str


def transport_names() -> tuple[str, ...]:
    """Return the names that `config_type` knows."""
    return TRANSPORTS.names()


def config_type(name: str) -> type[TransportConfig]:
    """Return the configuration of the transport called `name`.

    Raises:
        ConfigError: there is no such transport, there are several, or what its distribution names is
            no configuration of that name.
        TransportUnavailable: its distribution is installed and cannot be imported.
    """
    found = TRANSPORTS.find(name)
    if not (isinstance(found, type) and issubclass(found, TransportConfig)):
        raise ConfigError(f"transport {name!r}: must be a TransportConfig, got {found!r}")
    if found.__struct_config__.tag != name:
        raise ConfigError(
            f"transport {name!r}: its tag must be {name!r}, got {found.__struct_config__.tag!r}"
        )
    return found


def parse_transport(name: str | TransportConfig) -> TransportConfig:
    """Return the default configuration of the transport called `name`, or the one that it spells out.

    Args:
        name: `mooncake`, or JSON: `{"type": "mooncake", "host": "192.0.2.1", "protocol": "rdma"}`;
            a configuration is returned as it is.

    Raises:
        ConfigError: no such transport, no such setting, or neither a name nor a configuration.
        TransportUnavailable: see `config_type`.
    """
    if isinstance(name, TransportConfig):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"transport must be a name or a configuration of one, got {name!r}")
    if not name.startswith("{"):
        return config_type(name)()
    try:
        tag = msgspec.json.decode(name, type=_Tagged).type
        return msgspec.json.decode(name, type=config_type(tag))
    except msgspec.DecodeError as error:
        raise ConfigError(f"transport {name}: {error}") from error


def create_transport(
    config: TransportConfig, *, towards: str = "", memory_at: int = 0
) -> OneSidedTransport:
    """Start a transport.

    Args:
        config: which, and how.
        towards: URL of the controller; see `TransportConfig.create`.
        memory_at: an address in the memory that will be registered. Where it is a GPU's, a transport
            that moves GPU memory is started for that GPU, whatever the configuration says.

    Raises:
        ConfigError: the memory is a GPU's, and the transport moves host memory only.
        ConfigError, PeerUnreachable, TransportUnavailable: see `TransportConfig.create`.
    """
    gpu = gpu_of(memory_at) if memory_at else -1
    if gpu >= 0 and MemoryType.CUDA not in config.memory:
        raise ConfigError(
            f"transport: must be cuda_ipc (within one host), nixl or mooncake for weights on GPU "
            f"{gpu}, got {config.name}, which moves host memory"
        )
    return config.create(towards=towards, gpu=gpu)
