"""`cuda_ipc`: one-sided writes into GPU memory of another process on this host, over NVLink.

The process that owns a region exports the memory that contains it (`gpu_sharing.py`). A peer maps the memory once, and
writes into it with a kernel or a copy engine. The owner's process does nothing during a write. If the memory consists of
chunks, such as torch's expandable segments, the owner's process sends their descriptors while the peer maps them.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, final

import numpy as np

from windlass.errors import PeerUnreachable, RegionError, TransferFailed
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES, Device, pointer_device
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.range_copy import copy_ranges
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.gpu_sharing import (
    Exported,
    PeerMemory,
    export_memory,
    open_handle,
    receive_chunks,
    send_chunks,
)
from windlass.transports.peers import MappedRegion, PeerEndpoint, PeerMapper, RemoteRegion
from windlass.transports.processes import (
    PROVE_S,
    OwnProcess,
    PeerProcesses,
    check_alive,
    connect_within,
    is_own_process,
    is_same_user,
)
from windlass.transports.region_transport import RegionTransport
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import CEILING_BYTES_PER_S, MemoryType, TransportTraits, WireReport

_log = logging.getLogger(__name__)
TOKEN_NBYTES = 16
"""Size of the token in the key of a region that consists of chunks. A peer that sends it gets the descriptors."""
CHUNKS_S = 30.0
"""Seconds within which a peer maps the chunks of a region."""


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
        # Token -> memory of a region that consists of chunks. The threads that send descriptors take no lock: `map_region`
        # holds it while it waits for a peer, and two peers may map each other's memory at the same time.
        self._chunks: dict[bytes, Exported] = {}
        self._own, self._peers = OwnProcess("cuda_ipc", serve=self._accept), PeerProcesses()
        super().__init__(self._own.endpoint)
        self._opened: dict[tuple[PeerEndpoint, bytes], PeerMemory] = {}

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
        """Return a key with the exported memory that contains the region.

        Raises:
            RegionError: the region is on another GPU, not within one allocation, or in memory that no other process can
                map.
        """
        ordinal, device = pointer_device(address), self.gpu.device
        if ordinal != device.ordinal:
            raise RegionError(
                f"register: memory must be on GPU {device.ordinal}, got GPU {ordinal}"
            )
        exported, *others = export_memory(
            device, np.array([address], np.uint64), np.array([nbytes], np.uint64)
        )
        if others:
            raise RegionError(
                f"register: [{address:#x}, {address + nbytes:#x}) must be within one allocation, which "
                f"ends at {exported.stop:#x}"
            )
        handle = exported.handle
        if exported.num_chunks:
            handle = secrets.token_bytes(TOKEN_NBYTES)
            self._chunks[handle] = exported
        return _Key(
            ordinal, address - exported.start, handle, exported.nbytes, exported.num_chunks
        ).encode()

    def _unregister(self, region: MemoryRegion) -> Callable[[], None] | None:
        """Send no more descriptors of the region."""
        self._chunks.pop(_Key.decode(region.remote.key).handle, None)
        return None

    def _accept(self, line: socket.socket) -> None:
        """Serve a new connection in a new thread, because each batch of descriptors waits for the peer."""
        if not is_same_user(line):
            _log.warning("cuda_ipc: refused a process of another user")
            line.close()
            return
        threading.Thread(
            target=self._serve, args=(line,), name="windlass-cuda-ipc-chunks", daemon=True
        ).start()

    def _serve(self, line: socket.socket) -> None:
        """Receive the token of a region, and send the descriptors of its chunks.

        A peer that only wants a proof of this process's identity closes the connection without a token.
        """
        with line:
            line.settimeout(PROVE_S)
            try:
                exported = self._chunks.get(line.recv(TOKEN_NBYTES))
                if exported is not None:
                    send_chunks(line, self.gpu.device, exported)
            except (OSError, TransferFailed) as error:
                _log.warning("cuda_ipc: descriptors of memory could not be sent: %s", error)

    def _is_touched(self, region: MemoryRegion) -> bool:  # noqa: ARG002
        """Return True if a kernel has exceeded its deadline: it may still access any region."""
        return self.gpu.is_late

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map a peer's GPU memory into this process, and keep it mapped. For the errors, see `PeerMapper`.

        First close the mappings of processes that have ended. A region of this process needs no mapping: only make it
        accessible to this transport's GPU.
        """
        stop, key = region.address + region.nbytes, _Key.decode(region.key)
        # CUDA cannot open an IPC handle in the process that exported it. Memory of chunks can be mapped in any process, and
        # this is the only way to it from another GPU.
        is_own, is_near = is_own_process(region.endpoint), key.ordinal == self.gpu.device.ordinal
        if is_own and (is_near or not key.num_chunks):
            if not is_near:
                self.gpu.device.enable_peer(Device(key.ordinal))
            return MappedRegion(region.address, stop, 0)
        self._peers.check(region.endpoint)
        with self._lock:
            self._forget_dead()
            place = (region.endpoint, key.handle)
            if place not in self._opened:
                self._opened[place] = self._open(region.endpoint, key)
            memory = self._opened[place]
        if key.offset < 0 or key.offset + region.nbytes > memory.nbytes:
            raise RegionError(
                f"map: a region of {region.endpoint.address} must be inside its allocation of {memory.nbytes} bytes, got "
                f"{region.nbytes} bytes at offset {key.offset}"
            )
        return MappedRegion(region.address, stop, memory.address + key.offset - region.address)

    def _open(self, owner: PeerEndpoint, key: _Key) -> PeerMemory:
        """Map exported memory of a peer; for errors see `PeerMapper.map_region`."""
        device, deadline = self.gpu.device, Deadline.after(CHUNKS_S, "cuda_ipc: map")
        if not key.num_chunks:
            return open_handle(device, key.handle)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                connect_within(line, owner, PROVE_S)
                line.sendall(key.handle)
                return receive_chunks(line, device, key.nbytes, key.num_chunks, deadline)
            except OSError as error:
                check_alive(owner)
                raise TransferFailed(
                    f"cuda_ipc: pid {owner.address} did not send the descriptors of its memory, see its log: {error}"
                ) from error

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Close the mappings that no region of `regions` needs; see `PeerMapper`.

        Close no mapping if GPU work has missed its deadline (`is_late`): this work may still write through the mappings.
        """
        if self.gpu.is_late:
            return
        needed = {(region.endpoint, _Key.decode(region.key).handle) for region in regions}
        with self._lock:
            for place in self._opened.keys() - needed:
                self._opened.pop(place).close()

    def _forget_dead(self) -> None:
        """Unmap allocations of ended processes, so that the driver frees the GPU memory of these processes."""
        if self.gpu.is_late:
            return
        for endpoint in {endpoint for endpoint, _ in self._opened}:
            try:
                check_alive(endpoint)
            except PeerUnreachable:
                for place in [place for place in self._opened if place[0] == endpoint]:
                    self._opened.pop(place).close()

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


class _Key(NamedTuple):
    """Key of a region.

    Attributes:
        ordinal: the GPU's ordinal in the owner's process.
        offset: offset of the region in the exported memory, in bytes.
        handle: CUDA IPC handle of the exported memory; a token if the memory consists of chunks.
        nbytes: size of the exported memory.
        num_chunks: number of chunks of the exported memory; 0 for an allocation from cudaMalloc.
    """

    ordinal: int
    offset: int
    handle: bytes
    nbytes: int
    num_chunks: int

    def encode(self) -> str:
        """Return the key as text."""
        return ":".join(
            (
                *(str(self.ordinal), str(self.offset), self.handle.hex()),
                *(str(self.nbytes), str(self.num_chunks)),
            )
        )

    @classmethod
    def decode(cls, key: str) -> _Key:
        """Return the key of a text.

        Raises:
            RegionError: the text is malformed.
        """
        try:
            ordinal, offset, handle, nbytes, num_chunks = key.split(":")
            found = cls(
                *(int(ordinal), int(offset), bytes.fromhex(handle), int(nbytes), int(num_chunks))
            )
            if len(found.handle) == (TOKEN_NBYTES if found.num_chunks else IPC_HANDLE_NBYTES):
                return found
        except ValueError:
            pass
        raise RegionError(
            f"map: key of a region must be GPU:OFFSET:HANDLE:NBYTES:CHUNKS, got {key[:80]!r}"
        )
