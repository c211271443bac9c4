"""`MemoryOps` of one GPU: kernels of `put.cu` copy, cast and hash, by tables that are cut once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from windlass.errors import RegionError, TransferFailed
from windlass.layout.columns import Int64Array, StructuredArray, UInt64Array
from windlass.layout.dtypes import DType
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import MAX_PIECE_NBYTES, PieceTable
from windlass.memory.cuda.links import (
    WORDS_NBYTES,
    DeviceLink,
    load_table,
    read_digest,
    read_sent,
    read_words,
)
from windlass.memory.cuda.pieces import (
    PieceKind,
    cut_copy,
    cut_ops,
    cut_ranges,
    join_tables,
    kind_of,
    least_packed_nbytes,
    payload_parts,
    store_packed,
)
from windlass.memory.ops import StridedCopy, Turns
from windlass.memory.packing import overflow_text
from windlass.planning.plan import Transform
from windlass.planning.program import DigestKind, LinkProgram

if TYPE_CHECKING:
    import torch

BESIDE_TRANSFERS = 16
"""Multiprocessors of copies that run while NCCL sends: all of them would take the memory from it."""


@final
class DeviceMemory:
    """GPU memory from cuMemAlloc, outside every pool; not cleared. No transport knows it.

    Raises:
        TransferFailed: the GPU has not so much memory.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, self.nbytes = gpu, nbytes
        self.address = gpu.device.allocate(nbytes)

    def close(self) -> None:
        """Free it, unless kernels that outlived a deadline may still use it. Idempotent."""
        address, self.address = self.address, 0
        if address and not self._gpu.is_late:
            self._gpu.device.free(address)


@final
class CudaMemory:
    """See `MemoryOps`. What is queued runs in one stream of the GPU, in the order of the calls."""

    digest_kind = DigestKind.POSITION

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.ordinal = gpu.device.ordinal

    @property
    def gpu(self) -> Gpu:
        """Whose memory it is."""
        return self._gpu

    def allocation(self, address: int) -> tuple[int, int]:
        try:
            return self._gpu.device.allocation(address)
        except TransferFailed as error:
            raise RegionError(
                f"register: {address:#x} must be in memory of GPU {self.ordinal}: {error}"
            ) from error

    def allocate(self, nbytes: int) -> DeviceMemory:
        return DeviceMemory(self._gpu, nbytes)

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> _CudaCopies:
        return _CudaCopies(self._gpu, copies, BESIDE_TRANSFERS if beside_transfers else 0)

    def digests(
        self,
        programs: Mapping[str, LinkProgram],
        addresses: UInt64Array,
        *,
        at_source: bool,
        staging_address: int = 0,
    ) -> _CudaDigests:
        return _CudaDigests(self._gpu, programs, addresses, at_source, staging_address)

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> _CudaChunks:
        return _CudaChunks(self._gpu, addresses, nbytes, chunk_start)

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        return least_packed_nbytes(program)

    def pack_link(
        self,
        program: LinkProgram,
        addresses: UInt64Array,
        places: Sequence[int],
        capacity_nbytes: int,
    ) -> _CudaPack:
        return _CudaPack(self._gpu, program, addresses, places, capacity_nbytes)

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """See `MemoryOps.view`. By `__cuda_array_interface__`, which torch takes without a copy."""
        import torch

        from windlass.memory.torch_dtypes import torch_dtype

        reach = sum((n - 1) * s for n, s in zip(sizes, strides_bytes, strict=True)) + dtype.itemsize
        flat = torch.as_tensor(_DeviceBytes(address, reach), device=f"cuda:{self.ordinal}")
        strides = tuple(s // dtype.itemsize for s in strides_bytes)
        return flat.view(torch_dtype(dtype)).as_strided(tuple(sizes), strides)

    def settle(self, deadline_s: float) -> None:
        self._gpu.settle(deadline_s)

    def finish(self, deadline_s: float) -> None:
        self._gpu.finish(deadline_s)


class _DeviceBytes:
    """What torch reads an array of another library by."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _OnGpu:
    """Tables and words of one preparation in a GPU's memory, freed together.

    Derived classes build theirs within `_building`, and none under late kernels.
    """

    def __init__(self, gpu: Gpu) -> None:
        gpu.refuse_late()
        self._gpu = gpu
        self._held: list[Callable[[], None]] = []

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Leave nothing behind of a preparation that fails."""
        with ExitStack() as undo:
            undo.callback(self.close)
            yield
            undo.pop_all()

    def _load(self, cut: Iterable[tuple[PieceKind, StructuredArray]]) -> list[PieceTable]:
        """Upload pieces, a table per kind."""
        tables = []
        for kind, pieces in join_tables(cut).items():
            tables.append(load_table(self._gpu, kind, pieces))
            self._held.append(tables[-1].close)
        return tables

    def _allocate(self, nbytes: int) -> int:
        address = self._gpu.device.allocate(nbytes)
        self._held.append(partial(self._gpu.device.free, address))
        return address

    def _clear(self, words: int) -> None:
        self._gpu.device.clear(words, WORDS_NBYTES, self._gpu.stream)

    def close(self) -> None:
        held, self._held = self._held, []
        if self._gpu.is_late:
            return  # kernels may still use it
        for free in held:
            free()


@final
class _CudaCopies(_OnGpu):
    def __init__(self, gpu: Gpu, copies: Sequence[StridedCopy], num_multiprocessors: int) -> None:
        super().__init__(gpu)
        self._copies, self._num_multiprocessors = tuple(copies), num_multiprocessors
        self._ends = list(itertools.accumulate(map(_nbytes_of, copies)))
        cut = [
            (PieceKind(Transform.NONE, c.src_dtype, c.dst_dtype), cut_copy(c, end - _nbytes_of(c)))
            for c, end in zip(copies, self._ends, strict=True)
        ]
        overflows = [kind.may_overflow for kind in dict.fromkeys(kind for kind, _ in cut)]
        with self._building():
            self._tables = list(zip(self._load(cut), overflows, strict=True))
            self._words = self._allocate(WORDS_NBYTES) if any(overflows) else 0

    def run(self) -> None:
        if self._words:
            self._clear(self._words)
        for table, may_overflow in self._tables:
            # Only kernels that hash tell of an overflow.
            self._gpu.kernels.put(
                table,
                self._gpu.stream,
                self._words if may_overflow else 0,
                num_multiprocessors=self._num_multiprocessors,
            )

    def check(self) -> None:
        overflow = read_words(self._gpu, self._words)[2] if self._words else 0
        if overflow:
            copy = next(
                c for c, end in zip(self._copies, self._ends, strict=True) if overflow <= end
            )
            raise TransferFailed(overflow_text(copy.tensor, copy.src_dtype, copy.dst_dtype))


def _nbytes_of(copy: StridedCopy) -> int:
    return math.prod(copy.sizes) * copy.dst_dtype.itemsize


@final
class _CudaDigests(_OnGpu):
    """Tables per link; at the source a cast needs somewhere to store: all pieces share one place."""

    def __init__(
        self,
        gpu: Gpu,
        programs: Mapping[str, LinkProgram],
        addresses: UInt64Array,
        at_source: bool,
        staging_address: int,
    ) -> None:
        super().__init__(gpu)
        self._at_source = at_source
        self._links: dict[str, DeviceLink] = {}
        self._cast: dict[str, list[PieceTable]] = {}
        scratch = 0
        with self._building():
            for peer, program in programs.items():
                if at_source:
                    hashed, cast = _split_source(program, addresses)
                else:
                    hashed, cast = list(_delivered(program, addresses, staging_address)), []
                tables, words = tuple(self._load(hashed)), self._allocate(WORDS_NBYTES)
                self._links[peer] = DeviceLink(program, tables, words)
                if cast and not scratch:
                    scratch = self._allocate(MAX_PIECE_NBYTES)
                for _, pieces in cast:
                    # Digests are of what threads hold: what they store over each other is never read.
                    pieces["dst"], pieces["dst_pitch"] = scratch, pieces["pos_pitch"]
                self._cast[peer] = self._load(cast)

    @property
    def links(self) -> Mapping[str, DeviceLink]:
        return {} if self._at_source else self._links

    def take(
        self,
        peers: Iterable[str],
        deadline_s: float,
        threads: Executor | None = None,  # noqa: ARG002
    ) -> dict[str, str]:
        gpu, wanted = self._gpu, list(peers)
        for peer in wanted:
            link = self._links[peer]
            self._clear(link.digest)
            for table in link.tables:
                gpu.kernels.hash(table, gpu.stream, link.digest)
            for table in self._cast[peer]:
                gpu.kernels.put(table, gpu.stream, link.digest)
        if wanted:
            gpu.finish(deadline_s)
        return {peer: self._read(self._links[peer]) for peer in wanted}

    def _read(self, link: DeviceLink) -> str:
        if not self._at_source:
            return read_digest(self._gpu, link.digest)
        return _digest_sent(self._gpu, link.digest, link.program)


@final
class _CudaChunks(_OnGpu):
    """One table of raw bytes, in the order of the chunks; words for each chunk."""

    def __init__(
        self, gpu: Gpu, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> None:
        super().__init__(gpu)
        pieces, first = cut_ranges(addresses, nbytes)
        self._first = first[chunk_start]
        begin = np.append(0, np.cumsum(nbytes))[chunk_start[:-1]]
        counts = np.diff(self._first)
        pieces["pos"] -= np.repeat(begin, counts).astype(np.uint64)
        raw = PieceKind(Transform.NONE, DType.UINT8, DType.UINT8)
        with self._building():
            (self._table,) = self._load([(raw, pieces)])
            self._nbytes = max(len(begin), 1) * WORDS_NBYTES
            self._words = self._allocate(self._nbytes)

    def take(self, chunks: Sequence[int], deadline_s: float) -> list[str]:
        gpu = self._gpu
        gpu.device.clear(self._words, self._nbytes, gpu.stream)
        for chunk in chunks:
            part = range(int(self._first[chunk]), int(self._first[chunk + 1]))
            gpu.kernels.hash(self._table, gpu.stream, self._words + chunk * WORDS_NBYTES, part)
        if chunks:
            gpu.finish(deadline_s)
        found = np.frombuffer(gpu.device.download(self._words, self._nbytes, gpu.stream), "<u8")
        words = found.reshape(-1, WORDS_NBYTES // 8).tolist()
        return [f"{a:016x}{b:016x}" for a, b, _ in (words[chunk] for chunk in chunks)]


@final
class _CudaPack(_OnGpu):
    """Tables per turn. Both ends cut ops alike, because a digest by position depends on how rows are cut."""

    def __init__(
        self,
        gpu: Gpu,
        program: LinkProgram,
        addresses: UInt64Array,
        places: Sequence[int],
        capacity_nbytes: int,
    ) -> None:
        super().__init__(gpu)
        self._program = program
        turns = Turns(places, capacity_nbytes)
        packed: list[list[tuple[PieceKind, StructuredArray]]] = [[]]
        direct: list[tuple[PieceKind, StructuredArray]] = []
        for index, found in enumerate(cut_ops(program, at_source=True)):
            op, pieces = found.op, found.pieces
            pieces["src"] += addresses[op.src_parameter]
            if op.is_direct:
                pieces["dst"], pieces["dst_pitch"] = pieces["src"], pieces["src_pitch"]
                direct.append((kind_of(op), pieces))
                continue
            for part in payload_parts(found, capacity_nbytes):
                placed = turns.place(index, part.start, part.nbytes)
                store_packed(part.pieces, found.position + part.start, placed.address)
                if len(packed) < len(turns.parts):
                    packed.append([])
                packed[-1].append((kind_of(op), part.pieces))
        self.turns = turns.parts
        with self._building():
            self._words = self._allocate(WORDS_NBYTES)
            self._direct = self._load(direct)
            self._packed = [self._load(cut) for cut in packed]

    def pack(self, turn: int, deadline_s: float) -> None:
        self._queue(turn)
        self._gpu.finish(deadline_s)

    def pack_and_hash(self, deadline_s: float) -> str:
        gpu = self._gpu
        self._clear(self._words)
        for table in self._direct:
            gpu.kernels.hash(table, gpu.stream, self._words)
        for turn in range(len(self.turns)):
            self._queue(turn)
        gpu.finish(deadline_s)
        return _digest_sent(gpu, self._words, self._program)

    def _queue(self, turn: int) -> None:
        for table in self._packed[turn]:
            self._gpu.kernels.put(table, self._gpu.stream, self._words)


def _digest_sent(gpu: Gpu, words: int, program: LinkProgram) -> str:
    digest, overflow = read_sent(gpu, words, program)
    if overflow:
        raise TransferFailed(overflow)
    return digest


def _delivered(
    program: LinkProgram, addresses: UInt64Array, staging_address: int
) -> Iterator[tuple[PieceKind, StructuredArray]]:
    """Yield where the elements of a link are written."""
    for op, position, pieces in cut_ops(program, at_source=False):
        if op.lands and staging_address:
            store_packed(pieces, position, staging_address + op.staging_offset)
        else:
            pieces["dst"] += addresses[op.dst_parameter]
        yield kind_of(op), pieces


def _split_source(
    program: LinkProgram, addresses: UInt64Array
) -> tuple[list[tuple[PieceKind, StructuredArray]], list[tuple[PieceKind, StructuredArray]]]:
    """Return what is hashed as it lies, and what is cast or quantised first."""
    hashed: list[tuple[PieceKind, StructuredArray]] = []
    cast: list[tuple[PieceKind, StructuredArray]] = []
    for op, _, pieces in cut_ops(program, at_source=True):
        kind = kind_of(op)
        pieces["src"] += addresses[op.src_parameter]
        if op.transform is Transform.NONE and op.src_dtype is op.dst_dtype:
            pieces["dst"], pieces["dst_pitch"] = pieces["src"], pieces["src_pitch"]
            hashed.append((kind, pieces))
        else:
            cast.append((kind, pieces))
    return hashed, cast
