"""`Gpu` in host memory: numpy runs the kernels of put.cu row by row, so that tables run on any machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import cast

import msgspec
import numpy as np
from memory_transport import MemoryFabric, MemoryTransport
from offers import GPU_TRAITS
from position_digest import PositionDigest

from windlass.errors import TransferFailed, TransferOutcomeUnknown
from windlass.layout.dtypes import CASTS, DType
from windlass.memory.cuda.driver import IPC_HANDLE_NBYTES
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PIECE, PieceTable, put_kernel
from windlass.memory.host import pack_quantized
from windlass.planning.plan import Transform
from windlass.transports.peers import MappedRegion, PeerMapper, RemoteRegion

__all__ = ["KernelTransport", "OneProcess", "numpy_gpu"]

FIRST_PAGE_NBYTES = 4096
"""Size of the first page, which is never mapped."""
_CASTS = {put_kernel(*pair): pair for pair in CASTS}


class _NumpyEvent:
    def close(self) -> None:
        pass


class _NumpyDevice:
    ordinal = 0

    def __init__(self) -> None:
        self.allocated: dict[int, np.ndarray] = {}
        self.pinned: dict[int, int] = {}
        self.recorded: list[int] = []
        self.opened: set[bytes] = set()

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 64, 0x5A, np.uint8)
        address = -(-int(memory.ctypes.data) // 64) * 64
        self.allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.allocated[address]

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the allocation around an address; other memory is the test's, one byte at a time."""
        if address < FIRST_PAGE_NBYTES:
            raise TransferFailed(f"CUDA: no allocation around {address:#x}")
        for start, memory in self.allocated.items():
            if start <= address < start + memory.nbytes - 64:
                return start, memory.nbytes - 64
        return address, 1

    def export(self, address: int) -> bytes:
        return address.to_bytes(IPC_HANDLE_NBYTES)

    def open(self, handle: bytes) -> int:
        """Open a handle as CUDA does: a process can open it only once at a time."""
        if handle in self.opened:
            raise TransferFailed("CUDA: the handle is open already")
        self.opened.add(handle)
        return int.from_bytes(handle)

    def close_handle(self, address: int) -> None:
        self.opened.remove(self.export(address))

    def upload(self, address: int, data: memoryview) -> None:
        ctypes.memmove(address, bytes(data), len(data))

    def download(self, address: int, nbytes: int, _: object = None) -> bytes:
        return ctypes.string_at(address, nbytes)

    def clear(self, address: int, nbytes: int, _: object) -> None:
        ctypes.memset(address, 0, nbytes)

    def synchronize(self) -> None:
        pass

    def copy(self, target: int, source: int, nbytes: int, _: object) -> None:
        ctypes.memmove(target, source, nbytes)

    def record(self, stream: int) -> _NumpyEvent:
        self.recorded.append(stream)
        return _NumpyEvent()

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def device_pointer(self, address: int) -> int:
        return address


class _NumpyKernels:
    def put(
        self,
        table: PieceTable,
        _: object,
        digest: int = 0,
        part: range | None = None,
        num_multiprocessors: int = 0,
    ) -> None:
        for piece in _pieces_of(table, part):
            rows, lost = _stored_rows(table, piece)
            if lost and digest:
                overflow = ctypes.c_uint64.from_address(digest + 16)
                overflow.value = max(overflow.value, int(piece["pos"]) + 1)
            for row, stored in enumerate(rows):
                ctypes.memmove(
                    int(piece["dst"]) + row * int(piece["dst_pitch"]), stored, len(stored)
                )
                if digest:
                    _add(digest, stored, int(piece["pos"]) + row * int(piece["pos_pitch"]))

    def hash(self, table: PieceTable, _: object, digest: int, part: range | None = None) -> None:
        for piece in _pieces_of(table, part):
            nbytes = int(piece["row_elems"]) * table.itemsize
            for row in range(int(piece["rows"])):
                held = ctypes.string_at(int(piece["dst"]) + row * int(piece["dst_pitch"]), nbytes)
                _add(digest, held, int(piece["pos"]) + row * int(piece["pos_pitch"]))


class _NumpyStream:
    def record(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NumpyGpu:
    def __init__(self) -> None:
        self.device, self.kernels, self.stream = _NumpyDevice(), _NumpyKernels(), _NumpyStream()

    is_late = False

    def distrust(self, _: str) -> None:
        self.is_late = True

    def finish(self, _: float) -> None:
        self.refuse_late()

    def wait(self, _: object, deadline_s: float) -> None:
        self.refuse_late()

    def settle(self, _: float, step: object = None) -> float:
        self.refuse_late()
        return 0.0

    def refuse_late(self) -> None:
        if self.is_late:
            raise TransferOutcomeUnknown("GPU 0: kernels may still run")


def numpy_gpu() -> Gpu:
    """Return a simulated GPU."""
    return cast("Gpu", _NumpyGpu())


class OneProcess:
    """Mapper of `CudaIpcTransport` for a sender, with all memory in this process."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.gpu = numpy_gpu() if gpu is None else gpu

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Return the region itself."""
        return MappedRegion(region.address, region.address + region.nbytes, 0)

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Unmap nothing."""
        list(regions)


class KernelTransport(MemoryTransport):
    """Memory transport with the traits of `cuda_ipc`; all memory is in this process."""

    traits = msgspec.structs.replace(GPU_TRAITS, strided_stores=True, notifies=True)

    def __init__(self, gpu: Gpu | None = None) -> None:
        super().__init__(MemoryFabric())
        self._mapper = OneProcess(gpu)

    @property
    def mapper(self) -> PeerMapper:
        return self._mapper


def _pieces_of(table: PieceTable, part: range | None) -> np.ndarray:
    raw = ctypes.string_at(table.address, table.num_pieces * PIECE.itemsize)
    pieces = np.frombuffer(raw, PIECE)
    return pieces if part is None else pieces[part.start : part.stop]


def _stored_rows(table: PieceTable, piece: np.void) -> tuple[list[bytes], bool]:
    """Return the rows that the kernel stores of a piece, and whether a cast has overflowed."""
    src, pitch = int(piece["src"]), int(piece["src_pitch"])
    rows, elems = int(piece["rows"]), int(piece["row_elems"])
    if table.kernel.startswith("fp8"):
        _, what, dtype = table.kernel.split("_")
        values = what == "values"
        out = np.zeros(rows * elems if values else 4, np.uint8)
        lost = False
        try:
            pack_quantized(
                transform=Transform.FP8_BLOCK_VALUES if values else Transform.FP8_BLOCK_SCALES,
                sizes=(rows, elems),
                src_address=src,
                src_strides=(pitch, DType(dtype).itemsize),
                src_dtype=DType(dtype),
                dst_address=int(out.ctypes.data),
            )
        except TransferFailed:
            lost = True
        return [bytes(row) for row in out.reshape(rows if values else 1, -1)], lost
    if table.kernel in _CASTS:
        have, want = _CASTS[table.kernel]
        held = [
            np.frombuffer(ctypes.string_at(src + r * pitch, have.itemsize * elems), np.uint8)
            for r in range(rows)
        ]
        values_read = [_decoded(row, have) for row in held]
        made = [_encoded(row, want) for row in values_read]
        lost = any(
            bool((np.isinf(_decoded(after, want)) & np.isfinite(before)).any())
            for before, after in zip(values_read, made, strict=True)
        )
        return [row.tobytes() for row in made], lost
    nbytes = elems * table.itemsize
    return [ctypes.string_at(src + row * pitch, nbytes) for row in range(rows)], False


def _decoded(row: np.ndarray, dtype: DType) -> np.ndarray:
    """Return bytes of a castable dtype as float32."""
    if dtype is DType.BFLOAT16:
        return (row.view("<u2").astype("<u4") << 16).view("<f4")
    return row.view("<f4") if dtype is DType.FLOAT32 else row.view("<f2").astype("<f4")


def _encoded(row: np.ndarray, dtype: DType) -> np.ndarray:
    """Return float32 values rounded to nearest even, as bytes."""
    if dtype is DType.FLOAT32:
        return row.view(np.uint8)
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):
            return row.astype("<f2").view(np.uint8)
    bits = row.view("<u4").astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    rounded[np.isnan(row)] = 0x7FC0
    return rounded.view(np.uint8)


def _add(digest: int, row: bytes, position: int) -> None:
    found = PositionDigest()
    found.add_row(np.frombuffer(row, np.uint8), position)
    words = (ctypes.c_uint64 * 2).from_address(digest)
    for index, word in enumerate(found.words()):
        words[index] = (words[index] + word) % (1 << 64)
