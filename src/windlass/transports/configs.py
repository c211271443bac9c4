"""Which transport, and its settings: one frozen type per transport."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.config import take_names
from windlass.errors import ConfigError

__all__ = [
    "CmaConfig",
    "CudaIpcConfig",
    "MemoryConfig",
    "MooncakeConfig",
    "MooncakeProtocol",
    "NixlConfig",
    "NixlWire",
    "ShmConfig",
    "TransportConfig",
    "parse_transport",
    "transport_names",
]


class MemoryConfig(msgspec.Struct, frozen=True, tag="memory", forbid_unknown_fields=True):
    """All peers in one process; the reference that the others are compared with."""


class CmaConfig(msgspec.Struct, frozen=True, tag="cma", forbid_unknown_fields=True):
    """`process_vm_writev` into another process of this host.

    Attributes:
        num_threads: threads that share the copying of one batch, >= 1.
    """

    num_threads: int = 2


class ShmConfig(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """POSIX shared memory that the transport allocates; for hosts that refuse `cma`."""


class MooncakeProtocol(StrEnum):
    """The wire that Mooncake must use; AUTO takes what it finds and reports it."""

    AUTO = "auto"
    TCP = "tcp"
    RDMA = "rdma"


class MooncakeConfig(msgspec.Struct, frozen=True, tag="mooncake", forbid_unknown_fields=True):
    """Mooncake TransferEngine.

    Attributes:
        host: address that peers reach this process at; empty for `addresses.own_address`.
        protocol: refused when Mooncake chooses another one.
        device: comma-separated NIC names; empty for all. Writes are striped over them.
        max_registration_nbytes: larger regions are registered in steps of this; 0 for the least
            of what the NICs say and MC_MAX_MR_SIZE.
        gpu: ordinal of the GPU whose memory is registered; -1 for host memory. Work on that memory
            must be over before a write begins.
    """

    host: str = ""
    protocol: MooncakeProtocol = MooncakeProtocol.AUTO
    device: str = ""
    max_registration_nbytes: int = 0
    gpu: int = -1

    def __post_init__(self) -> None:
        take_names(self, {"protocol": MooncakeProtocol})
        _check_gpu(self.gpu)
        _check_registration(self.max_registration_nbytes)


class CudaIpcConfig(msgspec.Struct, frozen=True, tag="cuda_ipc", forbid_unknown_fields=True):
    """NVLink between GPUs of one host.

    Attributes:
        device: ordinal of the GPU whose memory is registered, and which does the storing.
        num_multiprocessors: that a write may occupy; 0 for all.
    """

    device: int = 0
    num_multiprocessors: int = 0


class NixlWire(StrEnum):
    """The wire that UCX must write through; AUTO takes what it finds and reports it."""

    AUTO = "auto"
    CMA = "cma"
    TCP = "tcp"
    RC = "rc"
    UD = "ud"


class NixlConfig(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    """NIXL with its UCX backend.

    Attributes:
        host: address that peers reach this process at; empty for `addresses.own_address`.
        wire: refused when UCX chooses another one.
        device: comma-separated UCX device names (`mlx5_0:1`, `eth0`); empty for all. Writes are
            striped over those that are named.
        max_registration_nbytes: larger regions are registered in steps of this; 0 for one
            registration per region.
        gpu: ordinal of the GPU whose memory is registered; -1 for host memory. Work on that memory
            must be over before a write begins.
    """

    host: str = ""
    wire: NixlWire = NixlWire.AUTO
    device: str = ""
    max_registration_nbytes: int = 0
    gpu: int = -1

    def __post_init__(self) -> None:
        take_names(self, {"wire": NixlWire})
        _check_gpu(self.gpu)
        _check_registration(self.max_registration_nbytes)


def _check_gpu(ordinal: int) -> None:
    if ordinal < -1:
        raise ConfigError(f"gpu: must be -1 or the ordinal of a GPU, got {ordinal}")


def _check_registration(nbytes: int) -> None:
    if nbytes < 0 or nbytes % 4096:
        raise ConfigError(
            f"max_registration_nbytes: must be 0 or a positive multiple of 4096, got {nbytes}"
        )


TransportConfig = MemoryConfig | CmaConfig | ShmConfig | MooncakeConfig | CudaIpcConfig | NixlConfig

_BY_NAME: dict[str, TransportConfig] = {
    "memory": MemoryConfig(),
    "cma": CmaConfig(),
    "shm": ShmConfig(),
    "mooncake": MooncakeConfig(),
    "cuda_ipc": CudaIpcConfig(),
    "nixl": NixlConfig(),
}


def parse_transport(name: str | TransportConfig) -> TransportConfig:
    """The default configuration of the transport called `name`, or the one that it spells out.

    Args:
        name: `mooncake`, or JSON: `{"type": "mooncake", "host": "192.0.2.1", "protocol": "rdma"}`;
            a configuration is returned as it is.

    Raises:
        ConfigError: no such transport, no such setting, or neither a name nor a configuration.
    """
    if isinstance(name, TransportConfig):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"transport must be a name or a configuration of one, got {name!r}")
    if name.startswith("{"):
        try:
            config: TransportConfig = msgspec.json.decode(name, type=TransportConfig)
        except msgspec.DecodeError as error:
            raise ConfigError(f"transport {name}: {error}") from error
        return config
    if name not in _BY_NAME:
        raise ConfigError(f"transport must be one of {list(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name]


def transport_names() -> tuple[str, ...]:
    """The names that `parse_transport` knows."""
    return tuple(_BY_NAME)
