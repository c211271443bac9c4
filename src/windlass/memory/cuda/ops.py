"""`MemoryOps` of one GPU: kernels of `put.cu` copy, cast and hash, by tables that are cut once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import numpy as np

from windlass.errors import TransferFailed
from windlass.layout.dtypes import DType
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.kernels import PieceTable
from windlass.memory.cuda.links import (
    WORDS_NBYTES,
    DeviceLink,
    load_link,
    load_table,
    read_digest,
    read_sent,
    read_words,
    unload_links,
)
from windlass.memory.cuda.pieces import (
    MAX_PIECE_NBYTES,
    PieceArray,
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
from windlass.memory.ops import (
    Int64Array,
    PackedPart,
    StridedCopy,
    UInt64Array,
    aligned,
)
from windlass.memory.packing import overflow_text
from windlass.planning.plan import Transform
from windlass.planning.program import DigestKind, LinkProgram

if TYPE_CHECKING:
    import torch

__all__ = ["CudaMemory", "DeviceMemory"]

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

    def allocate(self, nbytes: int) -> DeviceMemory:
        """See `MemoryOps.allocate`."""
        return DeviceMemory(self._gpu, nbytes)

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> _CudaCopies:
        """See `MemoryOps.prepare`."""
        return _CudaCopies(self._gpu, copies, BESIDE_TRANSFERS if beside_transfers else 0)

    def digests(
        self,
        programs: Mapping[str, LinkProgram],
        addresses: UInt64Array,
        *,
        at_source: bool,
        staging_address: int = 0,
    ) -> _CudaDigests:
        """See `MemoryOps.digests`."""
        return _CudaDigests(self._gpu, programs, addresses, at_source, staging_address)

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> _CudaChunks:
        """See `MemoryOps.chunk_digests`."""
        return _CudaChunks(self._gpu, addresses, nbytes, chunk_start)

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """See `MemoryOps.least_pack_nbytes`."""
        return least_packed_nbytes(program)

    def pack_link(
        self,
        program: LinkProgram,
        addresses: UInt64Array,
        places: Sequence[int],
        capacity_nbytes: int,
    ) -> _CudaPack:
        """See `MemoryOps.pack_link`."""
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
        """See `MemoryOps.settle`."""
        self._gpu.settle(deadline_s)

    def finish(self, deadline_s: float) -> None:
        """See `MemoryOps.finish`."""
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


@final
class _CudaCopies:
    def __init__(self, gpu: Gpu, copies: Sequence[StridedCopy], num_multiprocessors: int) -> None:
        self._gpu, self._copies = gpu, tuple(copies)
        self._num_multiprocessors = num_multiprocessors
        self._words = 0
        gpu.refuse_late()
        kinds = [PieceKind(Transform.NONE, copy.src_dtype, copy.dst_dtype) for copy in copies]
        nbytes = [_nbytes_of(copy) for copy in copies]
        self._ends = list(itertools.accumulate(nbytes))
        cut = (
            (kind, cut_copy(copy, end - n))
            for copy, kind, end, n in zip(copies, kinds, self._ends, nbytes, strict=True)
        )
        with ExitStack() as undo:
            self._tables: list[tuple[PieceTable, bool]] = []
            for kind, pieces in join_tables(cut).items():
                table = load_table(gpu, kind, pieces)
                undo.callback(table.close)
                self._tables.append((table, kind.may_overflow))
            if any(may_overflow for _, may_overflow in self._tables):
                self._words = gpu.device.allocate(WORDS_NBYTES)
            undo.pop_all()

    def run(self) -> None:
        if self._words:
            self._gpu.device.clear(self._words, WORDS_NBYTES, self._gpu.stream)
        for table, may_overflow in self._tables:
            # Only kernels that hash tell of an overflow.
            self._gpu.kernels.put(
                table,
                self._gpu.stream,
                self._words if may_overflow else 0,
                num_multiprocessors=self._num_multiprocessors,
            )

    def check(self) -> None:
        if not self._words:
            return
        overflow = read_words(self._gpu, self._words)[2]
        if overflow:
            copy = next(
                c for c, end in zip(self._copies, self._ends, strict=True) if overflow <= end
            )
            raise TransferFailed(overflow_text(copy.tensor, copy.src_dtype, copy.dst_dtype))

    def close(self) -> None:
        tables, self._tables = self._tables, []
        words, self._words = self._words, 0
        if self._gpu.is_late:
            return  # kernels may still read the tables
        for table, _ in tables:
            table.close()
        if words:
            self._gpu.device.free(words)


def _nbytes_of(copy: StridedCopy) -> int:
    return math.prod(copy.sizes) * copy.dst_dtype.itemsize


@final
class _CudaDigests:
    """Tables per link; at the source a cast needs somewhere to store: all pieces share one place."""

    def __init__(
        self,
        gpu: Gpu,
        programs: Mapping[str, LinkProgram],
        addresses: UInt64Array,
        at_source: bool,
        staging_address: int,
    ) -> None:
        gpu.refuse_late()
        self._gpu, self._at_source = gpu, at_source
        self._links: dict[str, DeviceLink] = {}
        self._cast: dict[str, list[PieceTable]] = {}
        self._scratch = 0
        with ExitStack() as undo:
            undo.callback(self.close)
            for peer, program in programs.items():
                if at_source:
                    hashed, cast = _split_source(program, addresses)
                else:
                    hashed, cast = list(_delivered(program, addresses, staging_address)), []
                self._links[peer] = load_link(gpu, program, join_tables(hashed))
                self._cast[peer] = []
                if cast and not self._scratch:
                    self._scratch = gpu.device.allocate(MAX_PIECE_NBYTES)
                for _, pieces in cast:
                    # Digests are of what threads hold: what they store over each other is never read.
                    pieces["dst"], pieces["dst_pitch"] = self._scratch, pieces["pos_pitch"]
                for kind, pieces in join_tables(cast).items():
                    self._cast[peer].append(load_table(gpu, kind, pieces))
            undo.pop_all()

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
            gpu.device.clear(link.digest, WORDS_NBYTES, gpu.stream)
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
        digest, overflow = read_sent(self._gpu, link.digest, link.program)
        if overflow:
            raise TransferFailed(overflow)
        return digest

    def close(self) -> None:
        links, cast, scratch = self._links, self._cast, self._scratch
        self._links, self._cast, self._scratch = {}, {}, 0
        if self._gpu.is_late:
            return  # kernels may still read the tables
        unload_links(self._gpu, links)
        for table in itertools.chain.from_iterable(cast.values()):
            table.close()
        if scratch:
            self._gpu.device.free(scratch)


@final
class _CudaChunks:
    """One table of raw bytes, in the order of the chunks; words for each chunk."""

    def __init__(
        self, gpu: Gpu, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> None:
        gpu.refuse_late()
        self._gpu = gpu
        pieces, first = cut_ranges(addresses, nbytes)
        self._first = first[chunk_start]
        begin = np.append(0, np.cumsum(nbytes))[chunk_start[:-1]]
        counts = np.diff(self._first)
        pieces["pos"] -= np.repeat(begin, counts).astype(np.uint64)
        with ExitStack() as undo:
            self._table = load_table(gpu, _as_it_lies(DType.UINT8), pieces)
            undo.callback(self._table.close)
            self._words = gpu.device.allocate(max(len(begin), 1) * WORDS_NBYTES)
            undo.pop_all()

    def take(self, chunks: Sequence[int], deadline_s: float) -> list[str]:
        gpu = self._gpu
        for chunk in chunks:
            gpu.device.clear(self._at(chunk), WORDS_NBYTES, gpu.stream)
            part = range(int(self._first[chunk]), int(self._first[chunk + 1]))
            gpu.kernels.hash(self._table, gpu.stream, self._at(chunk), part)
        if chunks:
            gpu.finish(deadline_s)
        return [read_digest(gpu, self._at(chunk)) for chunk in chunks]

    def _at(self, chunk: int) -> int:
        return self._words + chunk * WORDS_NBYTES

    def close(self) -> None:
        words, self._words = self._words, 0
        if words and not self._gpu.is_late:
            self._table.close()
            self._gpu.device.free(words)


def _as_it_lies(dtype: DType) -> PieceKind:
    return PieceKind(Transform.NONE, dtype, dtype)


@final
class _CudaPack:
    """Tables per turn. Both ends cut ops alike, because a digest by position depends on how rows are cut."""

    def __init__(
        self,
        gpu: Gpu,
        program: LinkProgram,
        addresses: UInt64Array,
        places: Sequence[int],
        capacity_nbytes: int,
    ) -> None:
        gpu.refuse_late()
        self._gpu, self._program = gpu, program
        self.turns: list[list[PackedPart]] = [[]]
        packed: list[list[tuple[PieceKind, PieceArray]]] = [[]]
        direct: list[tuple[PieceKind, PieceArray]] = []
        self._packed: list[list[PieceTable]] = []
        self._direct: list[PieceTable] = []
        self._words = used = 0
        for index, found in enumerate(cut_ops(program, at_source=True)):
            op, pieces = found.op, found.pieces
            pieces["src"] += addresses[op.src_parameter]
            if op.is_direct:
                pieces["dst"], pieces["dst_pitch"] = pieces["src"], pieces["src_pitch"]
                direct.append((kind_of(op), pieces))
                continue
            for part in payload_parts(found, capacity_nbytes):
                if used + aligned(part.nbytes) > capacity_nbytes:
                    self.turns.append([])
                    packed.append([])
                    used = 0
                address = places[(len(self.turns) - 1) % len(places)] + used
                store_packed(part.pieces, found.position + part.start, address)
                packed[-1].append((kind_of(op), part.pieces))
                self.turns[-1].append(PackedPart(index, part.start, address, part.nbytes))
                used += aligned(part.nbytes)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._words = gpu.device.allocate(WORDS_NBYTES)
            for tables, cut in ((self._direct, direct), *((self._turn(), c) for c in packed)):
                for kind, pieces in join_tables(cut).items():
                    tables.append(load_table(gpu, kind, pieces))
            undo.pop_all()

    def _turn(self) -> list[PieceTable]:
        self._packed.append([])
        return self._packed[-1]

    def pack(self, turn: int, deadline_s: float) -> None:
        self._queue(turn)
        self._gpu.finish(deadline_s)

    def pack_and_hash(self, deadline_s: float) -> str:
        gpu = self._gpu
        gpu.device.clear(self._words, WORDS_NBYTES, gpu.stream)
        for table in self._direct:
            gpu.kernels.hash(table, gpu.stream, self._words)
        for turn in range(len(self.turns)):
            self._queue(turn)
        gpu.finish(deadline_s)
        digest, overflow = read_sent(gpu, self._words, self._program)
        if overflow:
            raise TransferFailed(overflow)
        return digest

    def _queue(self, turn: int) -> None:
        for table in self._packed[turn]:
            self._gpu.kernels.put(table, self._gpu.stream, self._words)

    def close(self) -> None:
        tables = [*self._direct, *itertools.chain.from_iterable(self._packed)]
        words, self._words = self._words, 0
        self._direct, self._packed = [], []
        if self._gpu.is_late:
            return  # kernels may still read the tables
        for table in tables:
            table.close()
        if words:
            self._gpu.device.free(words)


def _delivered(
    program: LinkProgram, addresses: UInt64Array, staging_address: int
) -> Iterator[tuple[PieceKind, PieceArray]]:
    """Where the elements of a link are written."""
    for op, position, pieces in cut_ops(program, at_source=False):
        if op.lands and staging_address:
            store_packed(pieces, position, staging_address + op.staging_offset)
        else:
            pieces["dst"] += addresses[op.dst_parameter]
        yield kind_of(op), pieces


def _split_source(
    program: LinkProgram, addresses: UInt64Array
) -> tuple[list[tuple[PieceKind, PieceArray]], list[tuple[PieceKind, PieceArray]]]:
    """What is hashed as it lies, and what is cast or quantised first."""
    hashed: list[tuple[PieceKind, PieceArray]] = []
    cast: list[tuple[PieceKind, PieceArray]] = []
    for op, _, pieces in cut_ops(program, at_source=True):
        kind = kind_of(op)
        pieces["src"] += addresses[op.src_parameter]
        if op.transform is Transform.NONE and op.src_dtype is op.dst_dtype:
            pieces["dst"], pieces["dst_pitch"] = pieces["src"], pieces["src_pitch"]
            hashed.append((kind, pieces))
        else:
            cast.append((kind, pieces))
    return hashed, cast
