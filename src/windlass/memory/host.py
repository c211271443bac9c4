"""`MemoryOps` of host memory. torch copies and casts, xxh3 hashes, and `pack_quantized` quantises."""

from __future__ import annotations

import contextlib
import importlib
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, final

import numpy as np

from windlass.errors import PlanError, TransferFailed
from windlass.layout.columns import Int64Array, UInt8Array, UInt64Array
from windlass.layout.dtypes import DType
from windlass.layout.quantization import BLOCK, scale_shape
from windlass.memory.ops import ChunkDigests, Digests, Key, LinkDigests, MemoryOps
from windlass.memory.packing import (
    ALIGNMENT,
    PreparedCopies,
    StridedCopy,
    Turns,
    bytes_at,
    copy_cast,
    hash_strided,
    is_contiguous,
    new_digest,
    offset_of,
    overflow_text,
    row_major_blocks,
    strided_view,
)
from windlass.planning.plan import Transform
from windlass.planning.program import BoundOp, DigestKind, LinkProgram

if TYPE_CHECKING:
    import torch

SCRATCH_NBYTES = 1 << 20
"""Bytes of scratch memory for casting before hashing: small enough to stay in cache between cast and hash."""
_PER_MAX = 1.0 / 448.0
"""Reciprocal of the largest finite e4m3 number."""
_FLOOR = 1e-4
"""Smallest absolute maximum of a block from which a scale is computed."""


@final
class HostMemory(MemoryOps):
    """`MemoryOps` of host memory. Every method has finished its work on return; nothing is queued."""

    ordinal = -1
    digest_kind = DigestKind.XXH3

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return new host memory."""
        return HostBuffer(nbytes)

    def prepare(
        self,
        copies: Sequence[StridedCopy],
        *,
        beside_transfers: bool = False,  # noqa: ARG002
    ) -> _HostCopies:
        """Prepare copies in host memory; see `MemoryOps.prepare`."""
        return _HostCopies(copies)

    def sent_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array
    ) -> LinkDigests:
        """Prepare the digests of links that this rank sends; see `MemoryOps`."""
        _import_torch(programs)
        return _HostDigests(lambda peer: _hash_sent(programs[peer], addresses))

    def received_digests(
        self, programs: Mapping[str, LinkProgram], addresses: UInt64Array, staging_address: int = 0
    ) -> LinkDigests:
        """Prepare the digests of links that this rank receives; see `MemoryOps`."""
        _import_torch(programs)
        return _HostDigests(lambda peer: _hash_received(programs[peer], addresses, staging_address))

    def chunk_digests(
        self, addresses: UInt64Array, nbytes: Int64Array, chunk_start: Int64Array
    ) -> ChunkDigests:
        """Prepare the digests of chunks of memory; see `MemoryOps`."""

        def hash_chunk(chunk: int) -> str:
            of_chunk = slice(int(chunk_start[chunk]), int(chunk_start[chunk + 1]))
            return _hash_ranges(addresses[of_chunk], nbytes[of_chunk])

        return _HostDigests(hash_chunk)

    def least_pack_nbytes(self, program: LinkProgram) -> int:
        """Return the smallest size of a place for `pack_link`; see `MemoryOps`."""
        return least_half(program)

    def pack_link(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> _HostPack:
        """Prepare to pack a link into `places`, one place after the other; see `MemoryOps`."""
        return _HostPack(program, addresses, places)

    def view(
        self, address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
    ) -> torch.Tensor:
        """See `MemoryOps.view`."""
        return strided_view(address, sizes, strides_bytes, dtype)


def _import_torch(programs: Mapping[str, LinkProgram]) -> None:
    """Import torch if an op packs or gathers elements.

    Call this when links are bound: an import during an update could exceed the deadline of a phase.
    """
    if "torch" not in sys.modules and any(
        not op.is_direct
        or not is_contiguous(op.src_sizes, op.src_strides, op.src_dtype.itemsize)
        or not is_contiguous(op.sizes, op.dst_strides, op.dst_dtype.itemsize)
        for program in programs.values()
        for op in program.ops
    ):
        importlib.import_module("torch")


@final
class HostBuffer:
    """Zeroed pages of host memory. Linux allocates each page at the first access.

    The memory is freed after `close`, when no other view of `bytes` exists.

    Args:
        nbytes: size in bytes, >= 1.

    Attributes:
        bytes: (nbytes,) uint8; empty after `close`.
        address: address of the first byte.
    """

    def __init__(self, nbytes: int) -> None:
        mapping = mmap.mmap(-1, nbytes)
        # Huge pages mean fewer page faults and fewer pages to pin. If Linux refuses them, small pages work too.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.bytes: UInt8Array = np.frombuffer(mapping, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def close(self) -> None:
        """Drop this object's view of the memory. Idempotent."""
        self.bytes = np.empty(0, np.uint8)


@final
class _HostCopies(PreparedCopies):
    """`PreparedCopies` in host memory: pairs of torch views."""

    def __init__(self, copies: Sequence[StridedCopy]) -> None:
        self._copies = [
            (
                strided_view(c.dst_address, c.sizes, c.dst_strides, c.dst_dtype),
                strided_view(c.src_address, c.sizes, c.src_strides, c.src_dtype),
                c.tensor,
            )
            for c in copies
        ]

    def run(self) -> None:
        """Run all copies, and cast where the dtypes differ. Raise `TransferFailed` if a cast fails; see `copy_cast`."""
        for target, source, tensor in self._copies:
            copy_cast(target, source, tensor)


@final
class _HostDigests(Digests[Key]):
    """`Digests` in host memory. `digest` is a function that hashes one link or chunk."""

    def __init__(self, digest: Callable[[Key], str]) -> None:
        self._digest = digest

    def take(
        self,
        keys: Iterable[Key],
        deadline_s: float,  # noqa: ARG002
        threads: Executor | None = None,
    ) -> dict[Key, str]:
        """Hash the memory of each link or chunk. Without `threads`, hash in the calling thread. See `Digests.take`."""
        wanted = list(keys)
        found = (map if threads is None else threads.map)(self._digest, wanted)
        return dict(zip(wanted, found, strict=True))


@final
class _HostPack:
    """`LinkPack` in host memory."""

    def __init__(
        self, program: LinkProgram, addresses: UInt64Array, places: Sequence[range]
    ) -> None:
        self._program, self._addresses = program, addresses
        turns: Turns[BoundOp] = Turns(places)
        self._packed: dict[int, list[tuple[BoundOp, int]]] = {}
        for index, op in enumerate(program.ops):
            start = 0
            for part in () if op.is_direct else split_op(op, len(places[0])):
                address = turns.place(index, start, part.nbytes, part)
                self._packed.setdefault(index, []).append((part, address))
                start += part.nbytes
        self.turns, self._ops = turns.parts, turns.work

    def pack(self, turn: int, deadline_s: float) -> None:  # noqa: ARG002
        """Pack the parts of a turn into their place. For the errors, see `LinkPack.pack`."""
        for op, part in zip(self._ops[turn], self.turns[turn], strict=True):
            pack_op(op, int(self._addresses[op.src_parameter]), part.address)

    def pack_and_hash(self, deadline_s: float) -> str:  # noqa: ARG002
        """Pack all turns, and return the digest of the link; see `LinkPack.pack_and_hash`."""
        return _hash_source(
            self._program, self._addresses, lambda index, _: self._packed.get(index, ())
        )

    def close(self) -> None:
        """Do nothing: the caller owns the packed memory."""


def least_half(program: LinkProgram) -> int:
    """Return the minimum size in bytes of the packing memory for one turn. The largest row of blocks must fit into it."""
    rows_of_blocks = (
        min(op.nbytes, _row_of_blocks(op))
        for op in program.ops
        if op.transform is not Transform.NONE
    )
    return max((ALIGNMENT, *rows_of_blocks))


def _row_of_blocks(op: BoundOp) -> int:
    """Return the size in bytes of one row of blocks in the payload. A row of blocks is never cut."""
    return op.packed_strides[0] * (1 if op.transform is Transform.FP8_BLOCK_SCALES else BLOCK)


def pack_op(op: BoundOp, src_parameter: int, address: int) -> None:
    """Gather, cast or quantise the elements of an op, and store the packed payload at `address`.

    `op` may also be a part from `split_op`. `src_parameter` is the address of the op's source parameter.

    Raises:
        TransferFailed: a cast or quantisation fails; see `copy_cast` and `pack_quantized`.
    """
    if op.transform is not Transform.NONE:
        pack_quantized(
            transform=op.transform,
            sizes=op.src_sizes,
            src_address=src_parameter + op.src_offset,
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=address,
            tensor=op.tensor,
        )
        return
    source = strided_view(src_parameter + op.src_offset, op.sizes, op.src_strides, op.src_dtype)
    target = strided_view(address, op.sizes, op.packed_strides, op.dst_dtype)
    copy_cast(target, source, op.tensor)


def _hash_sent(program: LinkProgram, sources: UInt64Array) -> str:
    """Return the digest of a link's payload, computed at its source. Casts use scratch memory. Thread-safe."""
    limit = max(SCRATCH_NBYTES, least_half(program))
    scratch: UInt8Array = np.empty(limit, np.uint8)

    def parts(_: int, op: BoundOp) -> Iterable[tuple[BoundOp, int]]:
        if op.transform is Transform.NONE and op.src_dtype is op.dst_dtype:
            return ()
        return ((part, int(scratch.ctypes.data)) for part in split_op(op, limit))

    return _hash_source(program, sources, parts)


def _hash_source(
    program: LinkProgram,
    sources: UInt64Array,
    parts: Callable[[int, BoundOp], Iterable[tuple[BoundOp, int]]],
) -> str:
    """Return the digest of a link. Each part is hashed right after packing, while it is in the cache.

    `parts` gets the index of an op and the op. It returns the parts to pack, each with its destination address. If it
    returns no part, the op is hashed in place.
    """
    digest = new_digest()
    for index, op in enumerate(program.ops):
        parameter, is_packed = int(sources[op.src_parameter]), False
        for part, address in parts(index, op):
            is_packed = True
            pack_op(part, parameter, address)
            digest.update(bytes_at(address, part.nbytes))
        if not is_packed:
            address = parameter + op.src_offset
            hash_strided(digest, address, op.sizes, op.src_strides, op.src_dtype)
    return digest.hexdigest()


def _hash_received(program: LinkProgram, addresses: UInt64Array, staging_address: int) -> str:
    """Return the digest of a link's payload at its destination; see `MemoryOps.received_digests`."""
    digest = new_digest()
    for op in program.ops:
        if op.lands and staging_address:
            address, strides = staging_address + op.staging_offset, op.packed_strides
        else:
            address = int(addresses[op.dst_parameter]) + op.dst_offset
            strides = op.dst_strides
        hash_strided(digest, address, op.sizes, strides, op.dst_dtype)
    return digest.hexdigest()


def _hash_ranges(addresses: UInt64Array, nbytes: Int64Array) -> str:
    """Return one digest of all ranges in order.

    Many short ranges of equal size are hashed faster after they are copied into one array, `GATHERED` ranges at a time.
    """
    digest = new_digest()
    if len(nbytes) > 1 and nbytes[0] <= SHORT_NBYTES and (nbytes == nbytes[0]).all():
        within = np.arange(int(nbytes[0]), dtype=np.uint64)
        for at in range(0, len(addresses), GATHERED):
            part = addresses[at : at + GATHERED]
            start = int(part.min())
            memory = np.frombuffer(bytes_at(start, int(part.max()) - start + len(within)), np.uint8)
            found = memory[(part - np.uint64(start))[:, None] + within]
            digest.update(np.ascontiguousarray(found).reshape(-1).data)
    else:
        for address, size in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            digest.update(bytes_at(address, size))
    return digest.hexdigest()


SHORT_NBYTES = 64
"""Longest range in bytes that is gathered before hashing."""
GATHERED = 1 << 16
"""Number of short ranges gathered at a time."""


_Cut = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Part of an op: index of the part's first element, its sizes at the source, and its sizes in the payload."""


def split_op(op: BoundOp, limit: int) -> Iterator[BoundOp]:
    """Cut an op into parts of at most `limit` bytes of payload.

    In the packed payload, the bytes of each part follow the bytes of the previous part. The destination fields of a
    part are those of the whole op, so the caller must compute where each part goes.

    Raises:
        PlanError: the op quantises, and one row of blocks has more than `limit` bytes.
    """
    if op.nbytes <= limit:
        yield op
        return
    if op.transform is Transform.NONE:
        blocks = row_major_blocks(op.sizes, limit // op.dst_dtype.itemsize)
        cut: Iterable[_Cut] = ((start, sizes, sizes) for start, sizes in blocks)
    else:
        cut = _rows_of_blocks(op, limit)
    for start, src_sizes, sizes in cut:
        yield replace(
            op,
            sizes=sizes,
            src_sizes=src_sizes,
            src_offset=op.src_offset + offset_of(start, op.src_strides),
            nbytes=math.prod(sizes) * op.dst_dtype.itemsize,
        )


def _rows_of_blocks(op: BoundOp, limit: int) -> Iterator[_Cut]:
    """Yield parts of whole rows of blocks, each at most `limit` bytes; raise PlanError if one row is larger."""
    step = _row_of_blocks(op)
    if step > limit:
        raise PlanError(
            f"arena_nbytes: half of the arena must have at least {step} bytes (a row of quantisation blocks), got {limit}"
        )
    num_rows = limit // step * BLOCK
    rows, columns = op.src_sizes
    for first in range(0, rows, num_rows):
        src_sizes = min(num_rows, rows - first), columns
        scales = op.transform is Transform.FP8_BLOCK_SCALES
        yield (first, 0), src_sizes, scale_shape(src_sizes) if scales else src_sizes


def pack_quantized(
    *,
    transform: Transform,
    sizes: Sequence[int],
    src_address: int,
    src_strides: Sequence[int],
    src_dtype: DType,
    dst_address: int,
    tensor: str = "",
) -> None:
    """Quantise a matrix, one row of blocks at a time, so that scratch memory is about 128 rows of float32.

    The result equals `per_block_cast_to_fp8` (DeepGEMM) of the whole matrix on a GPU, bit for bit.

    Args:
        transform: which of the two results to store: the values or the scales.
        sizes: rows and columns of the matrix.
        src_address: address of the first element of the matrix.
        src_strides: strides of the matrix in bytes.
        src_dtype: dtype of the matrix.
        dst_address: address of the row-major result: float8 of `sizes`, or float32 of `scale_shape(sizes)`.
        tensor: name of the tensor, for the error.

    Raises:
        TransferFailed: a finite weight is too large for bfloat16.
    """
    import torch

    rows, columns = sizes
    source = strided_view(src_address, sizes, src_strides, src_dtype)
    scaled = transform is Transform.FP8_BLOCK_VALUES
    out_sizes = (rows, columns) if scaled else scale_shape((rows, columns))
    out_dtype = DType.FLOAT8_E4M3 if scaled else DType.FLOAT32
    step = out_dtype.itemsize
    out = strided_view(dst_address, out_sizes, (out_sizes[1] * step, step), out_dtype)
    for index, first in enumerate(range(0, rows, BLOCK)):
        given = source[first : first + BLOCK]
        part = given.to(torch.bfloat16).float()
        scales = _scales(part)
        if not bool(scales.isfinite().all()) and bool((part.isinf() & given.isfinite()).any()):
            raise TransferFailed(overflow_text(tensor, src_dtype, DType.BFLOAT16))
        if scaled:
            factor = (1.0 / scales).repeat_interleave(BLOCK)[:columns]
            out[first : first + BLOCK].copy_(part.mul_(factor).to(torch.float8_e4m3fn))
        else:
            out[index].copy_(scales)


def _scales(part: torch.Tensor) -> torch.Tensor:
    """Return the scales of one row of blocks, (columns / 128,) float32."""
    import torch

    columns = part.shape[1]
    amax = part.abs().amax(dim=0)
    padded = torch.nn.functional.pad(amax, (0, -columns % BLOCK))
    return padded.view(-1, BLOCK).amax(dim=1).clamp(_FLOOR) * _PER_MAX
