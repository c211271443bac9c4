"""Gather, cast and scatter between raw addresses: the kernels behind PACKED and SCATTER.

`torch.Tensor.copy_` between two strided views is the kernel: it gathers, casts and stores in one
pass on every device torch has. Torch is imported when the first view is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from windlass.layout.dtypes import DType

if TYPE_CHECKING:
    import torch

__all__ = ["bytes_at", "copy_strided", "hash_strided", "is_contiguous", "new_digest"]

new_digest = xxhash.xxh3_128


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Raw memory as a writable buffer. The caller keeps it alive and in place."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def is_contiguous(sizes: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> bool:
    """Whether elements in row-major order are consecutive in memory."""
    step = itemsize
    for size, stride in zip(reversed(sizes), reversed(strides_bytes), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def copy_strided(
    *,
    sizes: Sequence[int],
    src_address: int,
    src_strides: Sequence[int],
    src_dtype: DType,
    dst_address: int,
    dst_strides: Sequence[int],
    dst_dtype: DType,
) -> None:
    """Copy elements between two strided layouts of raw memory, casting where dtypes differ.

    Args:
        sizes: elements per dim.
        src_address: of the first element.
        src_strides: bytes per dim.
        src_dtype: element type.
        dst_address: of the first element.
        dst_strides: bytes per dim.
        dst_dtype: element type; floating types round to nearest even.
    """
    source = _view(src_address, sizes, src_strides, src_dtype)
    _view(dst_address, sizes, dst_strides, dst_dtype).copy_(source)


def hash_strided(
    digest: xxhash.xxh3_128,
    *,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    dtype: DType,
) -> None:
    """Add elements to a digest in row-major order of `sizes`."""
    if is_contiguous(sizes, strides_bytes, dtype.itemsize):
        nbytes = dtype.itemsize
        for size in sizes:
            nbytes *= size
        digest.update(bytes_at(address, nbytes))
        return
    import torch

    gathered = _view(address, sizes, strides_bytes, dtype).contiguous()
    digest.update(gathered.view(torch.uint8).numpy().data)


def _view(
    address: int, sizes: Sequence[int], strides_bytes: Sequence[int], dtype: DType
) -> torch.Tensor:
    import torch

    from windlass.frameworks.dtypes import torch_dtype

    itemsize = dtype.itemsize
    reach = sum((n - 1) * s for n, s in zip(sizes, strides_bytes, strict=True)) + itemsize
    flat = torch.frombuffer(bytes_at(address, reach), dtype=torch_dtype(dtype))
    return flat.as_strided(tuple(sizes), tuple(s // itemsize for s in strides_bytes))
