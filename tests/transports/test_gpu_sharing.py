"""Export and mapping of GPU memory that consists of chunks. Each chunk is a memory file, so no GPU is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from numpy_gpu import numpy_gpu
from recorded_driver import RecordedDriver

from windlass.errors import ProtocolError, RegionError, TransferFailed
from windlass.memory.cuda import driver
from windlass.memory.cuda.driver import Device
from windlass.memory.cuda.gpu import Gpu
from windlass.net.clock import Deadline
from windlass.transports import cuda_ipc as ipc
from windlass.transports.base import MemoryRegion, WriteBatch
from windlass.transports.cuda_ipc import CudaIpcTransport
from windlass.transports.gpu_sharing import (
    BATCH,
    NEXT,
    Exported,
    export_memory,
    receive_chunks,
    send_chunks,
)
from windlass.transports.peers import RemoteRegion
from windlass.transports.pull_gpu import GpuReads

CHUNK = 2 * mmap.PAGESIZE
ANOTHER_PROCESS = 1
MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_munmap = ctypes.CDLL(None, use_errno=True).munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class ChunkDevice:
    """GPU memory of chunks, over a simulated GPU that has memory from cudaMalloc."""

    ordinal = 0

    def __init__(self) -> None:
        self.plain = numpy_gpu().device
        self.chunks: dict[int, int] = {}
        """Address of each chunk, and its memory file."""
        self.reserved: dict[int, int] = {}
        self.fails_at = -1
        """Number of calls of `map_chunk` before one fails; never if it is negative."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def make(self, num_chunks: int, gap: int = 0) -> int:
        """Return the address of new chunks. After each of them, `gap` further chunks have no memory."""
        address = self.reserve(num_chunks * CHUNK * (1 + gap))
        for index in range(num_chunks):
            at = address + index * CHUNK * (1 + gap)
            self.chunks[at] = os.memfd_create("chunk")
            os.ftruncate(self.chunks[at], CHUNK)
            self._map(self.chunks[at], at, CHUNK)
        return address

    def is_chunk(self, address: int) -> bool:
        if any(at <= address < at + CHUNK for at in self.chunks):
            return True
        if any(at <= address < at + nbytes for at, nbytes in self.reserved.items()):
            raise RegionError(f"CUDA: {address:#x} is not in GPU memory")
        return False

    def allocation(self, address: int) -> tuple[int, int]:
        for at in self.chunks:
            if at <= address < at + CHUNK:
                return at, CHUNK
        return self.plain.allocation(address)

    def export_chunk(self, address: int) -> int:
        return os.dup(self.chunks[address])

    def reserve(self, nbytes: int) -> int:
        address: int = _mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[address] = nbytes
        return address

    def map_chunk(self, descriptor: int, address: int, nbytes: int) -> None:
        assert not os.get_inheritable(descriptor)
        if self.fails_at == 0:
            raise TransferFailed("CUDA: cuMemMap failed")
        self.fails_at -= 1
        self._map(descriptor, address, nbytes)

    @staticmethod
    def _map(descriptor: int, address: int, nbytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert _mmap(address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) == address  # fmt: skip

    def allow_access(self, address: int, nbytes: int) -> None:
        assert self.reserved[address] == nbytes

    def unmap_chunks(self, address: int, mapped_nbytes: int, nbytes: int) -> None:
        assert mapped_nbytes <= nbytes == self.reserved.pop(address)
        assert _munmap(address, nbytes) == 0


def chunk_gpu() -> tuple[Gpu, ChunkDevice]:
    gpu, device = numpy_gpu(), ChunkDevice()
    gpu.device = cast("Device", device)
    return gpu, device


def columns(*pieces: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    made = np.array(pieces, np.uint64)
    return made[:, 0], made[:, 1]


def exported(device: ChunkDevice, *pieces: tuple[int, int]) -> list[Exported]:
    return export_memory(cast("Device", device), *columns(*pieces))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def deadline(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "a test")


@contextmanager
def lines() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for line in (ours, theirs):
            line.settimeout(20.0)
        yield ours, theirs


def test_pieces_are_in_runs_of_chunks() -> None:
    device = ChunkDevice()
    first, apart = device.make(4), device.make(2, gap=1)
    whole = device.plain.allocate(64)
    found = exported(
        device,
        # From within a chunk to within the third. The fourth chunk has no piece.
        (first + 5, 2 * CHUNK),
        (first + 9, 3),
        (apart + 1, 1),
        (whole + 8, 8),
        (apart + 2 * CHUNK, CHUNK),
    )
    runs = [
        Exported(first, 3 * CHUNK, num_chunks=3),
        Exported(apart, CHUNK, num_chunks=1),
        Exported(apart + 2 * CHUNK, CHUNK, num_chunks=1),
        Exported(whole, 64, device.plain.export(whole)),
    ]
    assert found == sorted(runs, key=lambda one: one.start)
    assert exported(device, (first + CHUNK, 1), (first, 1)) == [
        Exported(first, 2 * CHUNK, num_chunks=2)
    ]


def test_a_piece_beyond_its_memory_is_refused() -> None:
    device = ChunkDevice()
    apart = device.make(2, gap=1)
    with pytest.raises(RegionError, match="is not in GPU memory"):
        exported(device, (apart, CHUNK + 1))


@pytest.mark.parametrize("num_chunks", [1, BATCH, 2 * BATCH + 3])
def test_mapped_chunks_are_the_owners_memory(num_chunks: int) -> None:
    owner, peer = ChunkDevice(), ChunkDevice()
    address, nbytes = owner.make(num_chunks), num_chunks * CHUNK
    words = np.arange(nbytes // 8, dtype=np.uint64)
    owner.upload(address, words.view(np.uint8).data)
    before = num_descriptors()
    with lines() as (ours, theirs), ThreadPoolExecutor(1) as threads:
        sent = threads.submit(
            send_chunks, ours, cast("Device", owner), Exported(address, nbytes, b"", num_chunks)
        )
        memory = receive_chunks(theirs, cast("Device", peer), nbytes, num_chunks, deadline())
        assert sent.result(20)
        assert num_descriptors() == before + 2
    assert memory.nbytes == nbytes
    assert (np.frombuffer(peer.download(memory.address, nbytes), np.uint64) == words).all()
    memory.close()
    assert not peer.reserved


def test_a_failed_mapping_leaves_nothing_mapped_and_no_descriptor() -> None:
    owner, peer = ChunkDevice(), ChunkDevice()
    address, nbytes, peer.fails_at = owner.make(9), 9 * CHUNK, 4
    before = num_descriptors()
    with lines() as (ours, theirs), ThreadPoolExecutor(1) as threads:
        sent = threads.submit(
            send_chunks, ours, cast("Device", owner), Exported(address, nbytes, b"", 9)
        )
        with pytest.raises(TransferFailed, match="cuMemMap failed"):
            receive_chunks(theirs, cast("Device", peer), nbytes, 9, deadline())
        assert sent.result(20)
    assert not peer.reserved
    assert num_descriptors() == before


def test_a_peer_with_too_few_descriptors_names_the_limit() -> None:
    owner, peer = ChunkDevice(), ChunkDevice()
    address, nbytes = owner.make(20), 20 * CHUNK
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with lines() as (ours, theirs):
        theirs.sendall(NEXT)
        assert send_chunks(ours, cast("Device", owner), Exported(address, nbytes, b"", 20))
        before = num_descriptors()
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
        try:
            with pytest.raises(TransferFailed, match=r"20 descriptors must arrive.*ulimit -n"):
                receive_chunks(theirs, cast("Device", peer), nbytes, 20, deadline())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert num_descriptors() == before
    assert not peer.reserved


def test_the_owner_stops_after_another_answer_and_at_the_end() -> None:
    owner = cast("Device", ChunkDevice())
    one = Exported(4096, CHUNK, b"", 1)
    with lines() as (ours, theirs):
        theirs.sendall(b"an answer")
        assert not send_chunks(ours, owner, one)
        assert ours.recv(64) == b"an answer"
        theirs.close()
        assert not send_chunks(ours, owner, one)


def test_an_owner_that_ends_is_an_error_of_the_connection() -> None:
    peer = ChunkDevice()
    with lines() as (ours, theirs):
        ours.close()
        with pytest.raises(OSError):  # noqa: PT011
            receive_chunks(theirs, cast("Device", peer), CHUNK, 1, deadline())
    assert not peer.reserved


@pytest.mark.parametrize(("nbytes", "num_chunks"), [(5, 2), (0, 0), (4, 8)])
def test_sizes_of_chunks_must_fit(nbytes: int, num_chunks: int) -> None:
    with lines() as (_, theirs), pytest.raises(RegionError, match="chunks of the same size"):
        receive_chunks(theirs, cast("Device", ChunkDevice()), nbytes, num_chunks, deadline())


def test_a_read_maps_the_writers_chunks_and_unmaps_them() -> None:
    (gpu, owner), (reader, device) = chunk_gpu(), chunk_gpu()
    device.plain = owner.plain
    address, plain = owner.make(3), owner.plain.allocate(64)
    words = np.arange(3 * CHUNK, dtype=np.uint64).astype(np.uint8)
    owner.upload(address, words.data)
    target = np.zeros(2 * CHUNK + 64, np.uint8)
    begin = int(target.ctypes.data)
    pieces = (
        np.array([begin, begin + 2 * CHUNK], np.uint64),
        np.array([address + 7, plain], np.uint64),
        np.array([2 * CHUNK, 64], np.uint64),
    )
    found = GpuReads(gpu).exports(pieces)
    assert {one.num_chunks for one in found} == {0, 3}
    with lines() as (ours, theirs), ThreadPoolExecutor(1) as threads:
        sent = threads.submit(
            lambda: [send_chunks(ours, cast("Device", owner), one) for one in found]
        )
        GpuReads(reader).read(
            theirs, ANOTHER_PROCESS, msgspec.msgpack.encode(found), pieces, deadline()
        )
        assert sent.result(20) == [True, True]
    assert (target[: 2 * CHUNK] == words[7 : 2 * CHUNK + 7]).all()
    assert not device.reserved


@pytest.mark.parametrize("handle", [b"", bytes(63)])
def test_exported_memory_without_handle_and_chunks_is_refused(handle: bytes) -> None:
    reads, nothing = GpuReads(numpy_gpu()), np.array([1], np.uint64)
    encoded = msgspec.msgpack.encode([Exported(4096, 64, handle)])
    with lines() as (line, _), pytest.raises(ProtocolError, match="handle must have 64 bytes"):
        reads.read(line, ANOTHER_PROCESS, encoded, (nothing,) * 3, deadline())


class Ends:
    """Two transports `cuda_ipc` of this process, which treat each other as another process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = [chunk_gpu(), chunk_gpu()]
        gpus = iter([gpu for gpu, _ in made])
        monkeypatch.setattr(ipc, "Gpu", lambda *_: next(gpus))
        monkeypatch.setattr(ipc, "pointer_device", lambda _: 0)
        monkeypatch.setattr(ipc, "is_own_process", lambda _: False)
        self.owner, self.writer = CudaIpcTransport(), CudaIpcTransport()
        self.owned, self.mapping = (device for _, device in made)

    def write(self, region: RemoteRegion, data: np.ndarray) -> None:
        self.writer.write(
            WriteBatch(
                endpoint=region.endpoint,
                local_addresses=np.array([data.ctypes.data], np.uint64),
                remote_addresses=np.array([region.address], np.uint64),
                nbytes=np.array([data.nbytes], np.uint64),
                regions=(region,),
            ),
            deadline_s=20.0,
        )


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch)
    with closing(made.owner), closing(made.writer):
        yield made


def test_cuda_ipc_writes_into_chunks_of_a_peer(ends: Ends) -> None:
    address = ends.owned.make(5)
    at, nbytes = address + 100, 3 * CHUNK
    region = ends.owner.register(at, nbytes)
    data = (np.arange(nbytes) % 251).astype(np.uint8)
    local = int(data.ctypes.data)
    # The writer's own memory is in no GPU, so it is not exported.
    ends.writer.table.add(
        MemoryRegion(local, nbytes, RemoteRegion(ends.writer.endpoint(), local, nbytes))
    )
    for _ in range(2):
        ends.write(region.remote, data)
        assert ends.owned.download(at, nbytes) == data.tobytes()
        data += 1
    # One mapping of the four chunks that contain the region.
    assert list(ends.mapping.reserved.values()) == [4 * CHUNK]
    # The same addresses are registered again, as if they were other memory: the peer must not use its old mapping.
    ends.owner.unregister(region)
    again = ends.owner.register(at, nbytes)
    assert again.remote.key != region.remote.key
    ends.writer.keep_mapped(())
    assert not ends.mapping.reserved
    with pytest.raises(TransferFailed, match=r"did not send the descriptors of its memory"):
        ends.write(region.remote, data)
    ends.write(again.remote, data)
    ends.writer.keep_mapped([again.remote])
    assert list(ends.mapping.reserved.values()) == [4 * CHUNK]
    assert ends.owned.download(at, nbytes) == data.tobytes()


def test_peers_that_map_each_others_chunks_at_the_same_time_do_not_block(ends: Ends) -> None:
    ours = ends.owner.register(ends.owned.make(100), 100 * CHUNK).remote
    theirs = ends.writer.register(ends.mapping.make(100), 100 * CHUNK).remote
    together = threading.Barrier(2)

    def map_region(transport: CudaIpcTransport, region: RemoteRegion) -> int:
        together.wait(10)
        return transport.map_region(region).start

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(map_region, (ends.owner, ends.writer), (theirs, ours))
        assert list(found) == [theirs.address, ours.address]


def test_a_malformed_key_is_refused(ends: Ends) -> None:
    region = ends.owner.register(ends.owned.make(1), CHUNK).remote
    for key in ("", "0:0:00", region.key + ":1", region.key[:-1] + "0"):
        with pytest.raises(RegionError, match="key of a region must be"):
            ends.writer.map_region(msgspec.structs.replace(region, key=key))


def test_a_region_beyond_its_chunks_is_refused(ends: Ends) -> None:
    region = ends.owner.register(ends.owned.make(2), CHUNK).remote
    with pytest.raises(RegionError, match="must be inside its allocation"):
        ends.writer.map_region(msgspec.structs.replace(region, nbytes=CHUNK + 1))


# --- calls of the driver ------------------------------------------------------------------------


class Library:
    """The driver's library. `allowed` are the handle types of memory from cuMemCreate."""

    def __init__(self, legacy: int = 0, allowed: int = 0) -> None:
        kinds = driver.driver().CUpointer_attribute
        self.values = {
            kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
            kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: legacy,
            kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: allowed,
        }

    def cuPointerGetAttribute(self, found: Any, kind: int, _address: object) -> int:  # noqa: N802
        found.contents.value = self.values[driver.driver().CUpointer_attribute(kind)]
        return 0


@pytest.mark.parametrize(
    ("legacy", "allowed", "expected"), [(1, 0, False), (0, 1, True), (0, 9, True)]
)
def test_the_driver_says_how_memory_is_shared(
    monkeypatch: pytest.MonkeyPatch, legacy: int, allowed: int, expected: bool
) -> None:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    monkeypatch.setattr(driver, "library", lambda: Library(legacy, allowed))
    assert Device(0).is_chunk(4096) is expected


@pytest.mark.parametrize("allowed", [0, 8])
def test_memory_that_cannot_be_shared_is_refused(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    monkeypatch.setattr(driver, "library", lambda: Library(0, allowed))
    message = f"handles that are file descriptors, got handle types {allowed:#x}; set PYTORCH_CUDA"
    with pytest.raises(RegionError, match=message):
        Device(0).is_chunk(4096)


def test_handles_of_chunks_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    device = Device(0)
    del found.calls[:]
    device.export_chunk(4096)
    device.map_chunk(3, device.reserve(4096), 4096)
    device.allow_access(64, 4096)
    device.unmap_chunks(64, 4096, 4096)
    assert found.names == [
        *("cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemRelease"),
        *("cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemRelease"),
        *("cuMemSetAccess", "cuMemUnmap", "cuMemAddressFree"),
    ]


@pytest.mark.parametrize("failing", ["cuMemExportToShareableHandle", "cuMemMap"])
def test_handles_of_chunks_are_released_after_an_error(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    found = RecordedDriver()
    monkeypatch.setattr(driver, "driver", lambda: found)
    device, found.failing = Device(0), failing
    calls: dict[str, Callable[[], object]] = {
        "cuMemMap": lambda: device.map_chunk(3, 64, 64),
        "cuMemExportToShareableHandle": lambda: device.export_chunk(4096),
    }
    with pytest.raises(TransferFailed, match=failing):
        calls[failing]()
    assert "cuMemRelease" in found.names
