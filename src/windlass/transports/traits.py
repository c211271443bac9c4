"""Capabilities of a transport, from which the controller chooses a transport for each link."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

CEILING_BYTES_PER_S: Mapping[str, float] = {
    # Copy engine between two H200s, benchmarks/gpu/bench_nvlink.py.
    "cuda-ipc": 397e9,
    # The same copy, and a request to the reader.
    "cuda-ipc-read": 390e9,
    # A NIC with 400 Gbit/s.
    "rdma": 50e9,
    # 0.95 of memcpy on a 2-core EPYC guest, benchmarks/bench_transports.py.
    "posix-shm": 8.6e9,
    # 0.66 of memcpy.
    "process_vm_writev": 6e9,
    # The same copy, and a request to the reader.
    "process_vm_readv": 5.9e9,
    # UCX copies in one thread.
    "process_vm_writev-ucx": 3e9,
    # A NIC with 10 Gbit/s.
    "tcp": 1.2e9,
}
"""Wire -> highest throughput of one link. Only the order of these figures matters. A transport of
another package has its own figure."""


class MemoryType(StrEnum):
    """Kind of registered memory: host memory or memory of a CUDA GPU."""

    HOST = "host"
    CUDA = "cuda"


class WireReport(msgspec.Struct, frozen=True):
    """Detected protocol and device of a transport. They may differ from the configured protocol and device.

    Attributes:
        transport: registry name.
        protocol: name of the wire in use, for example `process_vm_writev`, `posix-shm`, `cuda-ipc`, `tcp` or `rdma`.
        detail: version, device and similar facts, for status and reports.
    """

    transport: str
    protocol: str
    detail: str


class TransportTraits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capabilities of a running transport, as sent to the controller.

    Attributes:
        same_host: whether both processes must share the host, the PID namespace and the network
            namespace.
        one_sided: whether a write completes even if the target's process is stopped.
        ceiling_bytes_per_s: highest throughput of one link; see `CEILING_BYTES_PER_S`.
        gpu: ordinal of the GPU whose memory the transport registers; -1 for host memory.
        strided_stores: whether kernels of the source write each element at its final address, so that
            the target need not unpack.
        notifies: whether the source, during a write, reports to the target which bytes have arrived.
        allocates: whether peers can only write memory from the transport's `allocator`; regions of
            other memory have an empty key.
        unpinned: whether registered memory may lose its pages and get new ones while no write runs, because the
            transport neither pins nor maps it. Engines sleep only with such a transport.
    """

    same_host: bool
    one_sided: bool
    ceiling_bytes_per_s: float
    gpu: int = -1
    strided_stores: bool = False
    notifies: bool = False
    allocates: bool = False
    unpinned: bool = False

    @property
    def memory(self) -> MemoryType:
        """Kind of memory that the transport registers."""
        return MemoryType.HOST if self.gpu < 0 else MemoryType.CUDA


class MemoryAllocator(Protocol):
    """Allocator of a transport that can expose only memory that it allocated, such as shared memory."""

    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed memory that peers can write, and return its address.

        The transport owns the memory. It is valid until `release` or `close`.

        Raises:
            RegionError: `nbytes` < 1.
            TransportUnavailable: the host has not enough memory.
        """
        ...

    def release(self, address: int) -> None:
        """Free memory from `allocate`.

        Raises:
            RegionError: `address` is not from `allocate`, or the memory is still registered.
        """
        ...
