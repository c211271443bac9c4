"""Finds a transport by the name of its configuration: built in, or installed beside Windlass.

A distribution that brings a transport names its configuration in the entry point group
`windlass.transports`:

    [project.entry-points."windlass.transports"]
    file_mmap = "windlass_file_mmap:FileMmapConfig"

The name of the entry point is the tag of the struct. Names come from users of this machine, and
what they stand for from distributions that are installed on it: a peer's message never says what
to import.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import msgspec

from windlass.errors import ConfigError, TransportUnavailable
from windlass.memory.cuda.driver import gpu_of
from windlass.transports.base import MemoryType, OneSidedTransport, TransportConfig

__all__ = [
    "GROUP",
    "config_type",
    "create_transport",
    "decode_transport",
    "parse_transport",
    "transport_names",
]

GROUP = "windlass.transports"
_BUILT_IN = {
    name: EntryPoint(name, f"windlass.transports.{place}", GROUP)
    for name, place in {
        "auto": "auto:AutoConfig",
        "cma": "cma:CmaConfig",
        "cuda_ipc": "cuda_ipc:CudaIpcConfig",
        "memory": "memory:MemoryConfig",
        "mooncake": "mooncake.config:MooncakeConfig",
        "nixl": "nixl.config:NixlConfig",
        "shm": "shm:ShmConfig",
    }.items()
}


class _Tagged(msgspec.Struct, frozen=True):
    type: str


def transport_names() -> tuple[str, ...]:
    """The names that `config_type` knows, in alphabetical order."""
    return tuple(sorted(_BUILT_IN.keys() | {point.name for point in entry_points(group=GROUP)}))


def config_type(name: str) -> type[TransportConfig]:
    """The configuration of the transport called `name`.

    Raises:
        ConfigError: there is no such transport, there are several, or what its distribution names is
            no configuration of that name.
        TransportUnavailable: its distribution is installed and cannot be imported.
    """
    installed = tuple(entry_points(group=GROUP, name=name))
    found = ((_BUILT_IN[name],) if name in _BUILT_IN else ()) + installed
    if not found:
        raise ConfigError(f"transport must be one of {list(transport_names())}, got {name!r}")
    if len({point.value for point in found}) > 1:
        raise ConfigError(
            f"transport {name!r}: must be of one distribution, got "
            f"{', '.join(_described(point) for point in found)}"
        )
    try:
        loaded: object = found[0].load()
    except (ImportError, AttributeError) as error:
        raise TransportUnavailable(f"{_described(found[0])} cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, TransportConfig)):
        raise ConfigError(f"{_described(found[0])}: must be a TransportConfig, got {loaded!r}")
    if loaded.__struct_config__.tag != name:
        raise ConfigError(
            f"{_described(found[0])}: its tag must be {name!r}, got {loaded.__struct_config__.tag!r}"
        )
    return loaded


def parse_transport(name: str | TransportConfig) -> TransportConfig:
    """The default configuration of the transport called `name`, or the one that it spells out.

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
    return decode_transport(name) if name.startswith("{") else config_type(name)()


def decode_transport(text: str | bytes) -> TransportConfig:
    """A configuration from its JSON, by the transport's own struct.

    Raises:
        ConfigError, TransportUnavailable: see `parse_transport`.
    """
    try:
        tag = msgspec.json.decode(text, type=_Tagged).type
        return msgspec.json.decode(text, type=config_type(tag))
    except msgspec.DecodeError as error:
        shown = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise ConfigError(f"transport {shown}: {error}") from error


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


def _described(point: EntryPoint) -> str:
    dist = point.dist
    owner = "" if dist is None else f" of {dist.name}"
    return f"transport {point.name!r}{owner} ({point.value})"
