"""Digests of strided memory, in the one order that both ends of a link agree on.

The digest of a link runs over its ops in plan order and over each op's elements row-major, in
the destination's dtype, however the bytes are laid out and whichever way they travelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from windlass.layout.dtypes import DType
from windlass.memory.packing import bytes_at, row_major_blocks, split_inner, strided_view

RUN_NBYTES = 1024
"""Runs of this size and more are hashed where they lie; shorter ones are gathered first."""
GATHER_NBYTES = 1 << 20
"""Scratch memory for gathering: small enough to stay in cache between gather and hash."""

new_digest = xxhash.xxh3_128


def hash_strided(
    digest: xxhash.xxh3_128,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    dtype: DType,
) -> None:
    """Add elements to a digest in row-major order of `sizes`; uses at most 1 MiB of scratch.

    Args:
        digest: from `new_digest`.
        address: of the first element, in host memory.
        sizes: elements per dim.
        strides_bytes: bytes per dim.
        dtype: element type.
    """
    outer, run_nbytes = split_inner(sizes, strides_bytes, dtype.itemsize)
    if outer == 0:
        digest.update(bytes_at(address, run_nbytes))
    elif run_nbytes >= RUN_NBYTES:
        for start, _ in row_major_blocks(sizes[:outer], 1):
            digest.update(bytes_at(address + _offset(start, strides_bytes), run_nbytes))
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
        view = strided_view(address + _offset(start, strides_bytes), block, strides_bytes, dtype)
        scratch[: view.numel()].view(block).copy_(view)
        digest.update(raw[: view.numel() * dtype.itemsize].data)


def _offset(index: Sequence[int], strides_bytes: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides_bytes, strict=False))
