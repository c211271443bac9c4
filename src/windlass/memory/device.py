"""`MemoryOps` of one GPU: kernels of `put.cu` copy, cast and hash from tables that are built once."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
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
    GpuTables,
    digest_text,
    item_at,
    read_digest,
    read_sent,
    read_words,
)
from windlass.memory.cuda.pieces import (
    CutLink,
    KindOfPieces,
    PieceKind,
    add_sources,
    block_tables,
    cut_copy,
    cut_link,
    cut_ranges,
    join_tables,
    least_packed_nbytes,
    payload_parts,
    store_packed,
)
from windlass.memory.ops import ChunkDigests, Digests, LinkDigests
from windlass.memory.packing import StridedCopy, Turns, overflow_text
from windlass.planning.plan import Transform
from windlass.planning.program import DigestKind, LinkProgram

if TYPE_CHECKING:
    import torch

BESIDE_TRANSFERS = 16
"""Number of multiprocessors for copies that run while NCCL sends. Copies on all multiprocessors would take the memory
bandwidth that NCCL needs."""


@final
class DeviceMemory:
    """GPU memory from cuMemAlloc, outside every pool, not zeroed. No transport registers it.

    Args:
        gpu: GPU that has the memory.
        nbytes: size in bytes, >= 1.

    Attributes:
        address: address of the first byte; 0 after `close`.

    Raises:
        TransferFailed: the GPU has too little free memory.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, self.nbytes = gpu, nbytes
        self.address = gpu.device.allocate(nbytes)

    def close(self) -> None:
        """Free the memory, unless kernels that exceeded a deadline may still use it. Idempotent."""
        address, self.address = self.address, 0
        if address and not self._gpu.is_late:
            self._gpu.device.free(address)


@final
class CudaMemory:
    """`MemoryOps` of GPU memory. All queued work runs in one stream of the GPU, in the order of the calls."""

    digest_kind = DigestKind.POSITION

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.ordinal = gpu.device.ordinal

    @property
    def gpu(self) -> Gpu:
        """GPU that has the memory."""
        return self._gpu

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the address and size of the GPU allocation that contains `address`.

        Raises:
            RegionError: the address is not in memory of this GPU.
        """
        try:
            return self._gpu.device.allocation(address)
        except TransferFailed as error:
            raise RegionError(
                f"register: {address:#x} must be in memory of GPU {self.ordinal}: {error}"
            ) from error

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return new memory of this GPU."""
        return DeviceMemory(self._gpu, nbytes)

    def prepare(
        self, copies: Sequence[StridedCopy], *, beside_transfers: bool = False
    ) -> _CudaCopies:
        """Prepare copies on this GPU; with `beside_transfers`, they use few multiprocessors. See `MemoryOps.prepare`."""
        return _CudaCopies(self._gpu, copies, BESIDE_TRANSFERS if beside_transfers else 0)

    def sent_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> LinkDigests:
        """Prepare the digests of links that this rank sends; see `MemoryOps`."""
        return _SentDigests(self._gpu, programs, addresses)

    def received_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array, staging_address: int = 0
    ) -> LinkDigests:
        """Prepare the digests of links that this rank receives; see `MemoryOps`."""
        return _ReceivedDigests(self._gpu, programs, addresses, staging_address)

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> ChunkDigests:
        """Prepare the digests of chunks of memory; see `MemoryOps`."""
        return _ChunkDigests(self._gpu, addresses, nbytes, chunk_start)

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """Return the smallest size of a place for `pack_link`; see `MemoryOps`."""
        return least_packed_nbytes(program)

    def pack_link(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> _CudaPack:
        """Prepare to pack a link into `places`, one place after the other; see `MemoryOps`."""
        return _CudaPack(self._gpu, program, addresses, places)

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """See `MemoryOps.view`. Torch reads `__cuda_array_interface__` without a copy."""
        import torch

        from windlass.memory.torch_dtypes import torch_dtype

        reach = sum((n - 1) * s for n, s in zip(sizes, strides_bytes, strict=True)) + dtype.itemsize
        flat = torch.as_tensor(_DeviceBytes(address, reach), device=f"cuda:{self.ordinal}")
        strides = tuple(s // dtype.itemsize for s in strides_bytes)
        return flat.view(torch_dtype(dtype)).as_strided(tuple(sizes), strides)

    def settle(self, deadline_s: float) -> None:
        """Wait for work of this process that may still change the weights; see `Gpu.settle`."""
        self._gpu.settle(deadline_s)

    def finish(self, deadline_s: float) -> None:
        """Wait for the work that this object has queued; see `Gpu.finish`."""
        self._gpu.finish(deadline_s)


class _DeviceBytes:
    """GPU memory as an array that torch can wrap."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@final
class _CudaCopies(GpuTables):
    """`PreparedCopies` on a GPU: one table of pieces per pair of dtypes, and words for casts that may overflow."""

    def __init__(self, gpu: Gpu, copies: Sequence[StridedCopy], num_multiprocessors: int) -> None:
        super().__init__(gpu)
        self._copies, self._num_multiprocessors = tuple(copies), num_multiprocessors
        position, cut = 0, []
        for c in copies:
            kind = PieceKind(Transform.NONE, c.src_dtype, c.dst_dtype)
            cut.append((kind, cut_copy(c, position)))
            position += c.nbytes
        tables = join_tables(cut)
        overflows = [kind.may_overflow for kind in tables]
        with self._building():
            self._tables = list(zip(self._load(tables), overflows, strict=True))
            self._words = self._allocate(WORDS_NBYTES) if any(overflows) else 0

    def run(self) -> None:
        """Clear the words in which kernels report an overflow, and queue a kernel for each table of copies."""
        gpu = self._gpu
        if self._words:
            gpu.device.clear(self._words, WORDS_NBYTES, gpu.stream)
        for table, may_overflow in self._tables:
            # Only the hashing kernels report an overflow. `put` launches them if it gets the address of words.
            words = self._words if may_overflow else 0
            gpu.kernels.put(table, gpu.stream, words, num_multiprocessors=self._num_multiprocessors)

    def check(self) -> None:
        """Raise `TransferFailed` if a cast of the last run has overflowed. The run must have ended."""
        if overflow := read_words(self._gpu, self._words)[2] if self._words else 0:
            copy = item_at(overflow, self._copies, (c.nbytes for c in self._copies))
            raise TransferFailed(overflow_text(copy.tensor, copy.src_dtype, copy.dst_dtype))


class _LinkDigests(GpuTables, Digests[str]):
    """Digests of links. Derived classes queue and read the digest of one link."""

    def take(
        self,
        keys: Iterable[str],
        deadline_s: float,
        threads: Executor | None = None,  # noqa: ARG002
    ) -> dict[str, str]:
        """Queue the hashing of all links, wait for the GPU, and read the digests. See `Digests.take`."""
        wanted = list(keys)
        for peer in wanted:
            self._queue(peer)
        if wanted:
            self._gpu.finish(deadline_s)
        return {peer: self._read(peer) for peer in wanted}

    @abstractmethod
    def _queue(self, peer: str) -> None:
        """Queue the kernels that compute the digest of a peer's link."""

    @abstractmethod
    def _read(self, peer: str) -> str:
        """Return the digest of a peer's link after its kernels have ended; raise TransferFailed if a cast overflowed."""


@final
class _ReceivedDigests(_LinkDigests):
    """Digests of links at their destination: one `DeviceLink` per peer, which hashes the received bytes in place."""

    def __init__(
        self,
        gpu: Gpu,
        programs: Mapping[str, LinkProgram],
        addresses: UInt64Array,
        staging_address: int,
    ) -> None:
        super().__init__(gpu)
        self._links: dict[str, DeviceLink] = {}
        with self._building():
            for peer, program in programs.items():
                tables = block_tables(program, None, addresses, staging_address)
                self._links[peer] = DeviceLink(gpu, program, tables)
                self._held.append(self._links[peer].close)

    @property
    def links(self) -> Mapping[str, DeviceLink]:
        """Tables of each link's pieces; see `Digests`."""
        return self._links

    def _queue(self, peer: str) -> None:
        """Queue the kernels that compute the digest of a peer's link."""
        self._queue_digest(self._links[peer].digest, self._links[peer].tables)

    def _read(self, peer: str) -> str:
        """Return the digest of a link that has been hashed."""
        return read_digest(self._gpu, self._links[peer].digest)


@final
class _SentDigests(_LinkDigests):
    """Tables of each link: `hashed` has pieces to hash in place, `cast` has pieces to cast into scratch memory first."""

    def __init__(
        self, gpu: Gpu, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> None:
        super().__init__(gpu)
        self._programs = programs
        self._links: dict[str, tuple[int, list[PieceTable], list[PieceTable]]] = {}
        with self._building():
            scratch = self._allocate(MAX_PIECE_NBYTES)
            for peer, program in programs.items():
                hashed: dict[PieceKind, StructuredArray] = {}
                cast: dict[PieceKind, StructuredArray] = {}
                for kind, pieces in _hashed_at_source(program, addresses).tables().items():
                    if kind.transform is Transform.NONE and kind.src_dtype is kind.dst_dtype:
                        hashed[kind] = pieces
                        continue
                    # The kernel hashes the cast values in registers. The kernel must also store the values, so all
                    # pieces are stored to one scratch memory that nothing reads.
                    pieces["dst"], pieces["dst_pitch"] = scratch, pieces["pos_pitch"]
                    cast[kind] = pieces
                words = self._allocate(WORDS_NBYTES)
                self._links[peer] = words, self._load(hashed), self._load(cast)

    def _queue(self, peer: str) -> None:
        """Queue the kernels that compute the digest of a peer's link."""
        self._queue_digest(*self._links[peer])

    def _read(self, peer: str) -> str:
        """Return the digest of a link that has been hashed; raise `TransferFailed` if a cast overflowed."""
        return _digest_sent(self._gpu, self._links[peer][0], self._programs[peer])


@final
class _ChunkDigests(GpuTables, Digests[int]):
    """One table of raw bytes in the order of the chunks, and words for each chunk."""

    def __init__(
        self, gpu: Gpu, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> None:
        super().__init__(gpu)
        pieces, first = cut_ranges(addresses, nbytes)
        self._first = first[chunk_start]
        begin = np.append(0, np.cumsum(nbytes))[chunk_start[:-1]]
        pieces["pos"] -= np.repeat(begin, np.diff(self._first)).astype(np.uint64)
        raw = PieceKind(Transform.NONE, DType.UINT8, DType.UINT8)
        with self._building():
            (self._table,) = self._load({raw: pieces})
            self._nbytes = max(len(begin), 1) * WORDS_NBYTES
            self._words = self._allocate(self._nbytes)

    def take(
        self,
        keys: Iterable[int],
        deadline_s: float,
        threads: Executor | None = None,  # noqa: ARG002
    ) -> dict[int, str]:
        """Queue the hashing of all chunks, wait for the GPU, and read the digests. See `Digests.take`."""
        gpu, chunks = self._gpu, list(keys)
        if not chunks:
            return {}
        gpu.device.clear(self._words, self._nbytes, gpu.stream)
        for chunk in chunks:
            part = range(int(self._first[chunk]), int(self._first[chunk + 1]))
            gpu.kernels.hash(self._table, gpu.stream, self._words + chunk * WORDS_NBYTES, part)
        gpu.finish(deadline_s)
        found = np.frombuffer(gpu.device.download(self._words, self._nbytes, gpu.stream), "<u8")
        words = found.reshape(-1, WORDS_NBYTES // 8).tolist()
        return {chunk: digest_text(words[chunk]) for chunk in chunks}


@final
class _CudaPack(GpuTables):
    """Tables of pieces for each turn. A turn packs the part of a payload that fits into one place of packing memory."""

    def __init__(
        self, gpu: Gpu, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> None:
        super().__init__(gpu)
        self._program = program
        turns: Turns[KindOfPieces] = Turns(places)
        cut = _hashed_at_source(program, addresses)
        is_direct = np.fromiter((op.is_direct for op in program.ops), np.bool_, len(program.ops))
        for index, found in enumerate(() if is_direct.all() else cut.by_op()):
            if found.op.is_direct:
                continue
            kind = cut.kinds[index]
            for part in payload_parts(found, len(places[0])):
                address = turns.place(index, part.start, part.nbytes, (kind, part.pieces))
                store_packed(part.pieces, found.position + part.start, address)
        self.turns = turns.parts
        with self._building():
            self._words = self._allocate(WORDS_NBYTES)
            self._direct = self._load(cut.tables(is_direct))
            self._packed = [self._load(join_tables(work)) for work in turns.work]

    def pack(self, turn: int, deadline_s: float) -> None:
        """Pack the parts of one turn, and wait for the GPU; see `LinkPack.pack`."""
        for table in self._packed[turn]:
            self._gpu.kernels.put(table, self._gpu.stream, self._words)
        self._gpu.finish(deadline_s)

    def pack_and_hash(self, deadline_s: float) -> str:
        """Pack all turns, hash the whole link, and wait for the GPU. For the errors, see `LinkPack.pack_and_hash`."""
        self._queue_digest(self._words, self._direct, itertools.chain.from_iterable(self._packed))
        self._gpu.finish(deadline_s)
        return _digest_sent(self._gpu, self._words, self._program)


def _hashed_at_source(program: LinkProgram, addresses: UInt64Array) -> CutLink:
    """Return the pieces of an outgoing link, for hashing at the source.

    Kernels always hash the bytes at a piece's destination, so the destination of each piece is the address of its source.
    For pieces that are packed first, the caller changes the destination.
    """
    cut = cut_link(program, at_source=True)
    add_sources(cut, addresses)
    cut.pieces["dst"], cut.pieces["dst_pitch"] = cut.pieces["src"], cut.pieces["src_pitch"]
    return cut


def _digest_sent(gpu: Gpu, words: int, program: LinkProgram) -> str:
    """Return the digest that kernels added to `words` at the source of a link.

    Raises:
        TransferFailed: a cast overflowed.
    """
    digest, overflow = read_sent(gpu, words, program)
    if overflow:
        raise TransferFailed(overflow)
    return digest
