"""Gather, cast, scatter and hash at raw addresses: the kernels behind PACKED and SCATTER.

`torch.Tensor.copy_` between two strided views is the kernel: it gathers, casts and stores in one
pass. Addresses are of host memory. Torch is imported when the first view is made.
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
"""Bytes; whatever shares an arena begins at a multiple of it."""
RUN_NBYTES = 1024
"""Runs of this size and more are hashed where they lie; shorter ones are gathered first."""
GATHER_NBYTES = 1 << 20
"""Scratch memory for gathering: small enough to stay in cache between gather and hash."""

new_digest = xxhash.xxh3_128


def aligned(nbytes: int) -> int:
    """Return bytes that something of `nbytes` takes up in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PackedPart(NamedTuple):
    """Bytes [start, start + nbytes) of the payload of an op that is packed. `op`: its index in the link."""

    op: int
    start: int
    address: int
    nbytes: int


@final
class Turns(Generic[Work]):
    """Parts of a payload, placed one behind the other in memory that is packed again and again.

    Attributes:
        parts: by turn, in the order of the payload.
        work: what packs each of them.
    """

    def __init__(self, places: Sequence[range]) -> None:
        self._places = places
        self._at = self._stop = 0
        self.parts: list[list[PackedPart]] = []
        self.work: list[list[Work]] = []

    def place(self, op: int, start: int, nbytes: int, work: Work) -> int:
        """Return the address of a part: in the turn of the last one, or in another."""
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
# One C call: a ctypes array would make a new Python class per length, at 50 us each.
_memoryview_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_from_memory.restype = ctypes.py_object
_memoryview_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """Elements to copy between two strided layouts, cast where dtypes differ.

    Attributes:
        sizes: elements per dim, each >= 1; one dim at least.
        src_address, dst_address: of the first element.
        src_strides, dst_strides: bytes per dim, multiples of the item size.
        src_dtype, dst_dtype: the same, or one of `CASTS`.
        tensor: its name, for errors.
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
        """What is stored."""
        return math.prod(self.sizes) * self.dst_dtype.itemsize

    @classmethod
    def of_op(cls, op: BoundOp, src_address: int, dst_address: int) -> StridedCopy:
        """Return what an op that computes nothing copies or casts, from and to where its elements begin."""
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
        """Return a copy of bytes as they lie."""
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
    """Copies between fixed addresses, to be run any number of times."""

    def run(self) -> None:
        """Copy all, or queue it: `MemoryOps.finish` waits, and `check` tells how it went.

        Raises:
            TransferFailed: in host memory, a cast overflowed.
        """
        ...

    def check(self) -> None:
        """Refuse what the last `run`, which is over, has stored.

        Raises:
            TransferFailed: a finite number became infinite in a cast; what was stored must not be used.
        """
        return

    def close(self) -> None:
        """Free what was prepared; nothing of it may be under way. Idempotent."""
        return


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Raw memory as a writable buffer. The caller keeps it alive and in place."""
    view: memoryview = _memoryview_from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def split_inner(
    sizes: Sequence[int], strides_bytes: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """Return how far elements in row-major order are consecutive in memory.

    Returns:
        (number of outer dims that step over gaps, bytes of one consecutive run).
    """
    step, outer = itemsize, len(sizes)
    while outer and (sizes[outer - 1] == 1 or strides_bytes[outer - 1] == step):
        outer -= 1
        step *= sizes[outer]
    return outer, step


def is_contiguous(sizes: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> bool:
    """Return whether elements in row-major order are consecutive in memory."""
    return split_inner(sizes, strides_bytes, itemsize)[0] == 0


def row_major_blocks(
    sizes: Sequence[int], max_numel: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an array into blocks that follow each other in row-major order.

    Yields:
        (index of the block's first element, sizes of the block), both with all dims.
    """
    dim, inner = 0, math.prod(sizes)
    while inner > max_numel:
        inner //= sizes[dim]
        dim += 1
    if dim == 0:
        yield (0,) * len(sizes), tuple(sizes)
        return
    # Dims before `dim - 1` are walked one index at a time, `dim - 1` in chunks, the rest whole.
    chunk, size, rest = max(max_numel // inner, 1), sizes[dim - 1], sizes[dim:]
    for outer in itertools.product(*map(range, sizes[: dim - 1])):
        for first in range(0, size, chunk):
            count = min(chunk, size - first)
            yield (*outer, first, *(0,) * len(rest)), (*(1,) * (dim - 1), count, *rest)


def copy_cast(target: torch.Tensor, source: torch.Tensor, tensor: str) -> None:
    """Copy `source` into `target`, of the same shape, and cast as `CASTS` says.

    Raises:
        TransferFailed: a finite number has become infinite, or nothing casts between the dtypes.
    """
    from windlass.memory.torch_dtypes import dtype_of

    have, want = dtype_of(tensor, source), dtype_of(tensor, target)
    if refusal := cast_refusal(have, want):
        raise TransferFailed(f"tensor {tensor!r}: {refusal}")
    target.copy_(source)
    if have is want or not can_overflow(have, want) or not target.numel():
        return
    # One pass over what was just written; only where it holds an infinity or a NaN it is looked at again.
    least, most = target.aminmax()
    if least.isfinite() and most.isfinite():
        return
    if bool((target.isinf() & source.isfinite()).any()):
        raise TransferFailed(overflow_text(tensor, have, want))


def overflow_text(tensor: str, have: DType, want: DType) -> str:
    """Why an update with an overflow ends, on a GPU and in host memory."""
    return f"tensor {tensor!r}: a finite {have} is too large for {want} and would become infinite"


def strided_view(
    address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
) -> torch.Tensor:
    """Host memory as a tensor of `sizes`. The caller keeps it alive and in place."""
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
    """Add elements to a digest in row-major order of `sizes`; uses at most 1 MiB of scratch.

    The digest of a link runs over its ops in plan order and over each op's elements so, in the
    destination's dtype, however the bytes are laid out and whichever way they travelled.
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
    import torch

    from windlass.memory.torch_dtypes import torch_dtype

    scratch = torch.empty(GATHER_NBYTES // dtype.itemsize, dtype=torch_dtype(dtype))
    raw = scratch.view(torch.uint8).numpy()
    for start, block in row_major_blocks(sizes, len(scratch)):
        view = strided_view(address + offset_of(start, strides_bytes), block, strides_bytes, dtype)
        scratch[: view.numel()].view(block).copy_(view)
        digest.update(raw[: view.numel() * dtype.itemsize].data)


def offset_of(index: Sequence[int], strides_bytes: Sequence[int]) -> int:
    """Return bytes from the first element to the one at `index`, of the outer dims or of all."""
    return sum(i * s for i, s in zip(index, strides_bytes, strict=False))
