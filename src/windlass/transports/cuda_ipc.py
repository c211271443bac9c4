"""`cuda_ipc`: one-sided writes into GPU memory of another process on this host, over NVLink.

The process that owns a region exports the CUDA IPC handle of the allocation that contains it. A peer
maps the allocation once, and writes into it with a kernel or a copy engine. The owner's process does
nothing during a write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, Device, pointer_device
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.peers import MappedRegion, PeerEndpoint, PeerMapper, RemoteRegion
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive, is_own_process
from windlass.transports.region_transport import RegionTransport
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import CEILING_BYTES_PER_S, MemoryType, TransportTraits, WireReport


class CudaIpcConfig(TransportConfig, frozen=True, tag="cuda_ipc"):
    """Configuration of writes over NVLink between GPUs of one host.

    Attributes:
        device: ordinal of this rank's GPU. It runs the kernels that write, and its memory is registered.
        num_multiprocessors: number of multiprocessors (SMs) that a write may occupy; 0 for all.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset({MemoryType.CUDA})
    remedy: ClassVar[str] = "containers of one host must share their IPC namespace"

    device: int = 0
    num_multiprocessors: int = 0

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport on `gpu`, or on the configured GPU if it is below 0."""
        return CudaIpcTransport(self.device if gpu < 0 else gpu, self.num_multiprocessors)


@final
class CudaIpcTransport(RegionTransport):
    """`OneSidedTransport` and `PeerMapper` between GPUs of one host.

    Attributes:
        gpu: this rank's GPU, which runs the kernels that write. Other code of the rank uses the same object for its
            work on this GPU.

    Raises:
        TransportUnavailable: the NVIDIA driver, the GPU or NVRTC is missing.
    """

    def __init__(self, ordinal: int = 0, num_multiprocessors: int = 0) -> None:
        self.gpu = Gpu(ordinal, num_multiprocessors)
        self._own, self._peers = OwnProcess("cuda_ipc"), PeerProcesses()
        super().__init__(self._own.endpoint)
        self._opened: dict[tuple[PeerEndpoint, bytes], int] = {}

    @property
    def traits(self) -> TransportTraits:
        """See `OneSidedTransport.traits`."""
        return TransportTraits(
            same_host=True,
            one_sided=True,
            ceiling_bytes_per_s=CEILING_BYTES_PER_S["cuda-ipc"],
            gpu=self.gpu.device.ordinal,
            strided_stores=True,
            notifies=True,
        )

    @property
    def mapper(self) -> PeerMapper:
        """This transport, which maps memory of peers."""
        return self

    def report(self) -> WireReport:
        """Return the wire of this transport: CUDA IPC, with the number of the GPU."""
        return WireReport("cuda_ipc", "cuda-ipc", f"GPU {self.gpu.device.ordinal}")

    def _register(self, address: int, nbytes: int) -> str:
        """Return a key with the IPC handle of the allocation that contains the memory.

        Raises:
            RegionError: the memory is on another GPU, or not within one allocation.
        """
        ordinal = pointer_device(address)
        if ordinal != self.gpu.device.ordinal:
            raise RegionError(
                f"register: memory must be on GPU {self.gpu.device.ordinal}, got GPU {ordinal}"
            )
        start, size = self.gpu.device.allocation(address)
        if address + nbytes > start + size:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) must be within one allocation, which "
                f"ends at {start + size:#x}"
            )
        return f"{ordinal}:{address - start}:{self.gpu.device.export(start).hex()}"

    def _is_touched(self, region: MemoryRegion) -> bool:  # noqa: ARG002
        """Return True if a kernel has exceeded its deadline: it may still access any region."""
        return self.gpu.is_late

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map a peer's GPU memory into this process, and keep it mapped. For the errors, see `PeerMapper`.

        First close the mappings of processes that have ended. A region of this process needs no mapping: only make it
        accessible to this transport's GPU.
        """
        stop = region.address + region.nbytes
        ordinal, offset, handle = _parse_key(region.key)
        # CUDA cannot open an IPC handle in the process that exported it.
        if is_own_process(region.endpoint):
            if ordinal != self.gpu.device.ordinal:
                self.gpu.device.enable_peer(Device(ordinal))
            return MappedRegion(region.address, stop, 0)
        self._peers.check(region.endpoint)
        with self._lock:
            self._forget_dead()
            place = (region.endpoint, handle)
            if place not in self._opened:
                self._opened[place] = self.gpu.device.open(handle)
            base = self._opened[place]
        _, size = self.gpu.device.allocation(base)
        if offset < 0 or offset + region.nbytes > size:
            raise RegionError(
                f"map: a region of {region.endpoint.address} must be inside its allocation of {size} bytes, got "
                f"{region.nbytes} bytes at offset {offset}"
            )
        return MappedRegion(region.address, stop, base + offset - region.address)

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Close the mappings that no region of `regions` needs; see `PeerMapper`.

        Close no mapping if GPU work has missed its deadline (`is_late`): this work may still write through the mappings.
        """
        if self.gpu.is_late:
            return
        needed = {(region.endpoint, _parse_key(region.key)[2]) for region in regions}
        with self._lock:
            for place in self._opened.keys() - needed:
                self.gpu.device.close_handle(self._opened.pop(place))

    def _forget_dead(self) -> None:
        """Unmap allocations of ended processes, so that the driver frees the GPU memory of these processes."""
        if self.gpu.is_late:
            return
        for endpoint in {endpoint for endpoint, _ in self._opened}:
            try:
                check_alive(endpoint)
            except PeerUnreachable:
                for place in [place for place in self._opened if place[0] == endpoint]:
                    self.gpu.device.close_handle(self._opened.pop(place))

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Map the peer's regions, copy all ranges, and wait for the copies.

        Check that the peer is alive, both at the beginning and at the end.
        """
        check_alive(batch.endpoint)
        mapped = sorted((self.map_region(r) for r in batch.regions), key=lambda m: m.start)
        starts = np.array([m.start for m in mapped], np.uint64)
        shifts = np.array([m.shift for m in mapped], np.int64)
        owner = np.searchsorted(starts, batch.remote_addresses, "right") - 1
        remote = (batch.remote_addresses.astype(np.int64) + shifts[owner]).astype(np.uint64)
        copy_ranges(self.gpu, batch.local_addresses, remote, batch.nbytes, deadline.remaining_s)
        check_alive(batch.endpoint)

    def close(self) -> None:
        """See `OneSidedTransport.close`. If a kernel has exceeded its deadline, the memory of peers stays mapped."""
        self._own.close()
        super().close()
        with self._lock:
            self._free_untouched(keep=True)
        if self.gpu.is_late:
            return
        self.keep_mapped(())
        self.gpu.stream.close()


def _parse_key(key: str) -> tuple[int, int, bytes]:
    """Return the GPU's ordinal, the region's offset in its allocation, and the IPC handle of the allocation.

    Raises:
        RegionError: the key is malformed.
    """
    try:
        ordinal, offset, handle = key.split(":")
        raw = bytes.fromhex(handle)
        if len(raw) == IPC_HANDLE_NBYTES:
            return int(ordinal), int(offset), raw
    except ValueError:
        pass
    raise RegionError(f"map: key of a region must be GPU:OFFSET:HANDLE, got {key[:80]!r}")
