"""Joining and cutting pieces, vectorised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Pieces", "merge_adjacent", "split_pieces"]

UInt64Array = npt.NDArray[np.uint64]
Pieces = tuple[UInt64Array, UInt64Array, UInt64Array]
"""Local addresses, remote addresses and sizes in bytes, each (n,)."""


def merge_adjacent(local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array) -> Pieces:
    """Join pieces that follow each other on both sides."""
    if len(nbytes) < 2:
        return local, remote, nbytes
    joins = (local[:-1] + nbytes[:-1] == local[1:]) & (remote[:-1] + nbytes[:-1] == remote[1:])
    heads = np.flatnonzero(np.r_[True, ~joins])
    return local[heads], remote[heads], np.add.reduceat(nbytes, heads)


def split_pieces(
    local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array, max_nbytes: int
) -> Pieces:
    """Cut pieces over `max_nbytes`, so that one copy stays short."""
    if len(nbytes) == 0 or int(nbytes.max()) <= max_nbytes:
        return local, remote, nbytes
    limit = np.uint64(max_nbytes)
    counts = ((nbytes - np.uint64(1)) // limit + np.uint64(1)).astype(np.int64)
    row = np.repeat(np.arange(len(nbytes)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(row)) - first[row]).astype(np.uint64) * limit
    size = np.minimum(nbytes[row] - offset, limit)
    return local[row] + offset, remote[row] + offset, size
