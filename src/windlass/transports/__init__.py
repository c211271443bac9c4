"""Transports: one interface for one-sided writes into another process, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.net.clock import Deadline as Deadline
    from windlass.transports.auto import AutoConfig as AutoConfig
    from windlass.transports.base import MemoryRegion as MemoryRegion
    from windlass.transports.base import OneSidedTransport as OneSidedTransport
    from windlass.transports.base import TransportOffer as TransportOffer
    from windlass.transports.base import WriteBatch as WriteBatch
    from windlass.transports.cma import CmaConfig as CmaConfig
    from windlass.transports.cuda_ipc import CudaIpcConfig as CudaIpcConfig
    from windlass.transports.mooncake.transport import MooncakeConfig as MooncakeConfig
    from windlass.transports.nixl.transport import NixlConfig as NixlConfig
    from windlass.transports.peers import MappedRegion as MappedRegion
    from windlass.transports.peers import PeerEndpoint as PeerEndpoint
    from windlass.transports.peers import PeerMapper as PeerMapper
    from windlass.transports.peers import RemoteRegion as RemoteRegion
    from windlass.transports.processes import OwnProcess as OwnProcess
    from windlass.transports.processes import PeerProcesses as PeerProcesses
    from windlass.transports.processes import check_alive as check_alive
    from windlass.transports.pull import PullConfig as PullConfig
    from windlass.transports.region_transport import RegionTransport as RegionTransport
    from windlass.transports.registry import TransportConfig as TransportConfig
    from windlass.transports.registry import create_transport as create_transport
    from windlass.transports.registry import parse_transport as parse_transport
    from windlass.transports.registry import transport_names as transport_names
    from windlass.transports.shm import ShmConfig as ShmConfig
    from windlass.transports.traits import MemoryAllocator as MemoryAllocator
    from windlass.transports.traits import MemoryType as MemoryType
    from windlass.transports.traits import TransportTraits as TransportTraits
    from windlass.transports.traits import WireReport as WireReport

# Hidden from type checkers: with a module `__getattr__` they would accept unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
