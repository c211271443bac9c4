"""Registry of transports by name: built-in transports and transports of other packages.

A package that provides a transport declares its configuration type in the entry point group
`windlass.transports`. The name of the entry point must be the tag of that configuration type:

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
        "pull": "windlass.transports.pull:PullConfig",
        "shm": "windlass.transports.shm:ShmConfig",
    },
    unavailable=TransportUnavailable,
)
"""Configuration types of all transports, by name."""


class TransportConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True
):
    """Settings of one transport. The tag of a subclass is the transport's name in the registry.

    Decoded from `{"type": "mooncake", "host": "192.0.2.1"}`.

    Attributes:
        memory: kinds of memory that the transport can register.
        between_hosts: whether peers can be on other hosts.
        is_automatic: whether `auto` offers the transport.
        remedy: advice for the user if the transport does not start, in one line.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset({MemoryType.HOST})
    between_hosts: ClassVar[bool] = False
    is_automatic: ClassVar[bool] = True
    remedy: ClassVar[str] = "see the message"

    @property
    def name(self) -> str:
        """Registry name of the transport."""
        return str(type(self).__struct_config__.tag)

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport.

        Args:
            towards: URL of the controller. A network transport whose `host` setting is empty uses
                `own_address(towards)`: the address that WINDLASS_HOST gives, or else this machine's address on the route
                to the controller.
            gpu: ordinal of the GPU whose memory will be registered; it overrides the settings. -1 for
                the GPU of the settings, or for host memory if the settings have no GPU.

        Raises:
            ConfigError, PeerUnreachable: no address of this host can be used; see `own_address`.
            TransportUnavailable: a dependency or kernel feature is missing, or the transport does not use the configured
                protocol or NIC.
        """
        raise ConfigError(f"transport {self.name!r}: its configuration must define create()")


class _Tagged(msgspec.Struct, frozen=True):
    type: str


def transport_names() -> tuple[str, ...]:
    """Return the names of all transports."""
    return TRANSPORTS.names()


def config_type(name: str) -> type[TransportConfig]:
    """Return the configuration type of the transport called `name`.

    Raises:
        ConfigError: no transport has this name, several transports have it, or the entry point of the transport does
            not refer to a `TransportConfig` with the tag `name`.
        TransportUnavailable: the transport's package is installed but cannot be imported.
    """
    found = TRANSPORTS.find(name)
    if not (isinstance(found, type) and issubclass(found, TransportConfig)):
        raise ConfigError(f"transport {name!r}: must be a TransportConfig, got {found!r}")
    if found.__struct_config__.tag != name:
        raise ConfigError(
            f"transport {name!r}: its tag must be {name!r}, got {found.__struct_config__.tag!r}"
        )
    return found


def transport_name(text: str) -> str:
    """Return the name of the transport that `text` describes. This function does not load the transport.

    `text` is a name or a configuration in JSON. If the JSON contains no name, return an empty string; `parse_transport`
    refuses this JSON.
    """
    if not text.startswith("{"):
        return text
    try:
        return msgspec.json.decode(text, type=_Tagged).type
    except msgspec.MsgspecError:
        return ""


def parse_transport(name: str | TransportConfig) -> TransportConfig:
    """Return the configuration of a transport that is given by name, as JSON, or as a configuration.

    Args:
        name: a name such as `mooncake` for the default configuration, or JSON such as `{"type": "mooncake", "host":
            "192.0.2.1"}`. A configuration is returned unchanged.

    Raises:
        ConfigError: the transport or a setting does not exist, or `name` is neither a name nor a configuration.
        TransportUnavailable: see `config_type`.
    """
    if isinstance(name, TransportConfig):
        return name
    if not isinstance(name, str):
        raise ConfigError(
            f"transport must be the name of a transport or a TransportConfig, got {name!r}"
        )
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
        config: configuration of the transport.
        towards: URL of the controller; see `TransportConfig.create`.
        memory_at: an address in the memory that will be registered. If the address is in GPU
            memory, the transport is started for that GPU, even if `config` names another GPU.

    Raises:
        ConfigError: the memory is on a GPU, and the transport can only write host memory.
        ConfigError, PeerUnreachable, TransportUnavailable: see `TransportConfig.create`.
        TransferFailed: see `gpu_of`.
    """
    gpu = gpu_of(memory_at) if memory_at else -1
    if gpu >= 0 and MemoryType.CUDA not in config.memory:
        raise ConfigError(
            f"transport: must be cuda_ipc or pull (within one host), nixl or mooncake for weights on "
            f"GPU {gpu}, got {config.name}, which writes only host memory"
        )
    return config.create(towards=towards, gpu=gpu)
