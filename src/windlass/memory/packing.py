"""Gather, cast, scatter and hash elements at raw addresses, for ops with the modes PACKED and SCATTER.

`torch.Tensor.copy_` between two strided views gathers, casts and stores in one pass. Addresses are
in host memory. Torch is imported when the first view is made.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, final

import xxhash

from windlass.errors import TransferFailed
from windlass.layout.dtypes import DType, can_overflow, cast_refusal
from windlass.planning.program import BoundOp

if TYPE_CHECKING:
    import torch

Work = TypeVar("Work")

ALIGNMENT = 64
"""Alignment in bytes of each object in an arena."""
RUN_NBYTES = 1024
"""Shortest run in bytes that is hashed in place; shorter runs are gathered first."""
GATHER_NBYTES = 1 << 20
"""Bytes of scratch memory for gathering: small enough to stay in cache between gather and hash."""

new_digest = xxhash.xxh3_128


def aligned(nbytes: int) -> int:
    """Return the number of bytes that an object of `nbytes` occupies in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PackedPart(NamedTuple):
    """Bytes [start, start + nbytes) of the payload of a packed op. `op` is the op's index in the link."""

    op: int
    start: int
    address: int
    nbytes: int


@final
class Turns(Generic[Work]):
    """Distribution of a payload over turns. Each turn fills one place with the next parts of the payload.

    Args:
        places: address ranges of packing memory. Turn i fills place i modulo their number.

    Attributes:
        parts: parts of the payload that each turn packs, in the order of the payload.
        work: for each of these parts, the work that packs it.
    """

    def __init__(self, places: Sequence[range]) -> None:
        self._places = places
        self._at = self._stop = 0
        self.parts: list[list[PackedPart]] = []
        self.work: list[list[Work]] = []

    def place(self, op: int, start: int, nbytes: int, work: Work) -> int:
        """Assign an address to the next part of the payload, and return the address.

        If the part does not fit into the memory of the current turn, begin a new turn.

        Args:
            op: index of the part's op in the link.
            start: position of the part in the op's payload, in bytes.
            nbytes: size of the part.
            work: entry to append to `self.work` for the part.
        """
        if not self.parts or self._at + aligned(nbytes) > self._stop:
            place = self._places[len(self.parts) % len(self._places)]
            self._at, self._stop = place.start, place.stop
            self.parts.append([])
            self.work.append([])
        address = self._at
        self._at += aligned(nbytes)
        self.parts[-1].append(PackedPart(op, start, address, nbytes))
        self.work[-1].append(work)
        return address


_PYBUF_WRITE = 0x200
# A single C call: a ctypes array would create a Python class per length, at 50 us each.
_memoryview_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_from_memory.restype = ctypes.py_object
_memoryview_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """Elements to copy between two strided layouts, cast if the dtypes differ.

    Attributes:
        sizes: number of elements per dim, each >= 1; at least one dim.
        src_address, dst_address: addresses of the first element.
        src_strides, dst_strides: stride of each dim in bytes, a multiple of the item size.
        src_dtype, dst_dtype: the same dtype, or a pair of `CASTS`.
        tensor: name of the tensor, for errors.
    """

    sizes: tuple[int, ...]
    src_address: int
    src_strides: tuple[int, ...]
    src_dtype: DType
    dst_address: int
    dst_strides: tuple[int, ...]
    dst_dtype: DType
    tensor: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes stored at the destination."""
        return math.prod(self.sizes) * self.dst_dtype.itemsize

    @classmethod
    def of_op(cls, op: BoundOp, src_address: int, dst_address: int) -> StridedCopy:
        """Return the copy that an op without a transform makes. The addresses are those of the op's first element."""
        return cls(
            sizes=op.sizes,
            src_address=src_address,
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=dst_address,
            dst_strides=op.dst_strides,
            dst_dtype=op.dst_dtype,
            tensor=op.tensor,
        )

    @classmethod
    def of_bytes(cls, src_address: int, dst_address: int, nbytes: int) -> StridedCopy:
        """Return the copy of `nbytes` contiguous bytes, without a cast."""
        return cls(
            sizes=(nbytes,),
            src_address=src_address,
            src_strides=(1,),
            src_dtype=DType.UINT8,
            dst_address=dst_address,
            dst_strides=(1,),
            dst_dtype=DType.UINT8,
        )


class PreparedCopies(Protocol):
    """Copies between fixed addresses that can be run any number of times."""

    def run(self) -> None:
        """Run all copies. On a GPU, only queue them: the caller must call `MemoryOps.finish`, and then `check`.

        Raises:
            TransferFailed: a cast in host memory overflowed.
        """
        ...

    def check(self) -> None:
        """Check the result of the last `run`, which must have ended.

        Raises:
            TransferFailed: a cast made a finite number infinite; the stored values must not be
                used.
        """
        return

    def close(self) -> None:
        """Free the prepared data. No copy may be running. Idempotent."""
        return


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return raw memory as a writable buffer. The caller keeps the memory allocated while the buffer is used."""
    view: memoryview = _memoryview_from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def split_inner(
    sizes: Sequence[int], strides_bytes: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """Split the dims of an array into outer dims and inner dims. The inner dims are contiguous in row-major order.

    Returns:
        (number of outer dims, bytes of one contiguous run over the inner dims).
    """
    step, outer = itemsize, len(sizes)
    while outer and (sizes[outer - 1] == 1 or strides_bytes[outer - 1] == step):
        outer -= 1
        step *= sizes[outer]
    return outer, step


def is_contiguous(sizes: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> bool:
    """Return whether elements in row-major order are contiguous in memory."""
    return split_inner(sizes, strides_bytes, itemsize)[0] == 0


def row_major_blocks(
    sizes: Sequence[int], max_numel: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an array into blocks of at most `max_numel` elements, each contiguous in row-major order.

    Yields:
        (index of the block's first element, sizes of the block); each has one number per dim of the array.
    """
    dim, inner = 0, math.prod(sizes)
    while inner > max_numel:
        inner //= sizes[dim]
        dim += 1
    if dim == 0:
        yield (0,) * len(sizes), tuple(sizes)
        return
    # Cut the dim with index `dim - 1`. A block has one index of each earlier dim, a range of indices of this dim, and all
    # indices of each later dim.
    chunk, size, rest = max(max_numel // inner, 1), sizes[dim - 1], sizes[dim:]
    for outer in itertools.product(*map(range, sizes[: dim - 1])):
        for first in range(0, size, chunk):
            count = min(chunk, size - first)
            yield (*outer, first, *(0,) * len(rest)), (*(1,) * (dim - 1), count, *rest)


def copy_cast(target: torch.Tensor, source: torch.Tensor, tensor: str) -> None:
    """Copy `source` into `target`, which has the same shape, and cast according to `CASTS`.

    Raises:
        TransferFailed: a finite number became infinite, or no cast exists between the dtypes.
    """
    from windlass.memory.torch_dtypes import dtype_of

    have, want = dtype_of(tensor, source), dtype_of(tensor, target)
    if refusal := cast_refusal(have, want):
        raise TransferFailed(f"tensor {tensor!r}: {refusal}")
    target.copy_(source)
    if have is want or not can_overflow(have, want) or not target.numel():
        return
    # The comparison with the source is slow, so first look for an infinity or NaN in the stored values.
    least, most = target.aminmax()
    if least.isfinite() and most.isfinite():
        return
    if bool((target.isinf() & source.isfinite()).any()):
        raise TransferFailed(overflow_text(tensor, have, want))


def overflow_text(tensor: str, have: DType, want: DType) -> str:
    """Return the error text for a cast that overflowed, on a GPU or in host memory."""
    return f"tensor {tensor!r}: a finite {have} is too large for {want} and would become infinite"


def strided_view(
    address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
) -> torch.Tensor:
    """Return the host memory at `address` as a tensor, without a copy. The caller keeps the memory allocated."""
    import torch

    from windlass.memory.torch_dtypes import torch_dtype

    itemsize = dtype.itemsize
    reach = sum((n - 1) * s for n, s in zip(sizes, strides_bytes, strict=True)) + itemsize
    flat = torch.frombuffer(bytes_at(address, reach), dtype=torch_dtype(dtype))
    return flat.as_strided(tuple(sizes), tuple(s // itemsize for s in strides_bytes))


def hash_strided(
    digest: xxhash.xxh3_128,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    dtype: DType,
) -> None:
    """Add the elements of an array in host memory to a digest, in row-major order of `sizes`.

    The digest of a link covers the ops in plan order, and for each op the elements in row-major
    order and in the destination's dtype. Therefore source and destination compute the same digest, although
    their strides differ. This function uses at most 1 MiB of scratch memory.
    """
    outer, run_nbytes = split_inner(sizes, strides_bytes, dtype.itemsize)
    if outer == 0:
        digest.update(bytes_at(address, run_nbytes))
    elif run_nbytes >= RUN_NBYTES:
        for start, _ in row_major_blocks(sizes[:outer], 1):
            digest.update(bytes_at(address + offset_of(start, strides_bytes), run_nbytes))
    else:
        _hash_gathered(digest, address, sizes, strides_bytes, dtype)


def _hash_gathered(
    digest: xxhash.xxh3_128,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    dtype: DType,
) -> None:
    """Add an array to a digest as `hash_strided` does. First gather its elements, block by block, into scratch memory."""
    import torch

    from windlass.memory.torch_dtypes import torch_dtype

    scratch = torch.empty(GATHER_NBYTES // dtype.itemsize, dtype=torch_dtype(dtype))
    raw = scratch.view(torch.uint8).numpy()
    for start, block in row_major_blocks(sizes, len(scratch)):
        view = strided_view(address + offset_of(start, strides_bytes), block, strides_bytes, dtype)
        scratch[: view.numel()].view(block).copy_(view)
        digest.update(raw[: view.numel() * dtype.itemsize].data)


def offset_of(index: Sequence[int], strides_bytes: Sequence[int]) -> int:
    """Return the byte offset of the element at `index`. Inner dims that `index` omits count as 0."""
    return sum(i * s for i, s in zip(index, strides_bytes, strict=False))
