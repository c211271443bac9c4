"""From a configuration to a live transport; each one is imported when it is asked for."""

from __future__ import annotations

from typing import assert_never

import msgspec

from windlass.errors import ConfigError
from windlass.memory.cuda.driver import gpu_of
from windlass.net.addresses import own_address
from windlass.transports.base import OneSidedTransport
from windlass.transports.configs import (
    CmaConfig,
    CudaIpcConfig,
    MemoryConfig,
    MooncakeConfig,
    NixlConfig,
    ShmConfig,
    TransportConfig,
    parse_transport,
    transport_names,
)

__all__ = ["create_transport", "parse_transport", "transport_names"]


def create_transport(
    config: TransportConfig, *, towards: str = "", memory_at: int = 0
) -> OneSidedTransport:
    """Start a transport.

    Args:
        config: which, and how.
        towards: URL of the controller; a configuration without a host takes this host's address
            on the way there.
        memory_at: an address in the memory that will be registered. Where it is a GPU's, a transport
            that moves GPU memory is started for that GPU, whatever the configuration says.

    Raises:
        ConfigError: the memory is a GPU's, and the transport moves host memory only.
        ConfigError, PeerUnreachable: this host has no such address; see `own_address`.
        TransportUnavailable: a dependency or kernel feature is missing, or the wire is not the
            one that was asked for.
    """
    if memory_at and (ordinal := gpu_of(memory_at)) >= 0:
        config = _on_gpu(config, ordinal)
    if isinstance(config, MooncakeConfig | NixlConfig) and not config.host:
        config = msgspec.structs.replace(config, host=own_address(towards))
    match config:
        case MemoryConfig():
            from windlass.transports.memory import MemoryTransport

            return MemoryTransport()
        case CmaConfig():
            from windlass.transports.cma import CmaTransport

            return CmaTransport(config.num_threads)
        case ShmConfig():
            from windlass.transports.shm import ShmTransport

            return ShmTransport()
        case MooncakeConfig():
            from windlass.transports.mooncake.transport import MooncakeTransport

            return MooncakeTransport(config)
        case CudaIpcConfig():
            from windlass.transports.cuda_ipc import CudaIpcTransport

            return CudaIpcTransport(config.device, config.num_multiprocessors)
        case NixlConfig():
            from windlass.transports.nixl.transport import NixlTransport

            return NixlTransport(config)
        case _:
            assert_never(config)


def _on_gpu(config: TransportConfig, ordinal: int) -> TransportConfig:
    match config:
        case CudaIpcConfig():
            return msgspec.structs.replace(config, device=ordinal)
        case MooncakeConfig() | NixlConfig():
            return msgspec.structs.replace(config, gpu=ordinal)
        case CmaConfig() | ShmConfig() | MemoryConfig():
            raise ConfigError(
                f"transport: must be cuda_ipc (within one host), nixl or mooncake for weights on GPU "
                f"{ordinal}, got {type(config).__struct_config__.tag}, which moves host memory"
            )
        case _:
            assert_never(config)
