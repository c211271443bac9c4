"""Merge and cut the pieces of a write, and group them into native calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from windlass.layout.columns import UInt64Array

Pieces = tuple[UInt64Array, UInt64Array, UInt64Array]
"""Local addresses, remote addresses and sizes in bytes, each (n,)."""


def merge_adjacent(local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array) -> Pieces:
    """Merge consecutive pieces that are adjacent in local and in remote memory."""
    if len(nbytes) < 2:
        return local, remote, nbytes
    joins = (local[:-1] + nbytes[:-1] == local[1:]) & (remote[:-1] + nbytes[:-1] == remote[1:])
    heads = np.flatnonzero(np.r_[True, ~joins])
    return local[heads], remote[heads], np.add.reduceat(nbytes, heads)


def split_pieces(
    local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array, max_nbytes: int
) -> Pieces:
    """Cut each piece that is larger than `max_nbytes` into pieces of at most this size. Keep the order."""
    if len(nbytes) == 0 or int(nbytes.max()) <= max_nbytes:
        return local, remote, nbytes
    limit = np.uint64(max_nbytes)
    counts = ((nbytes - np.uint64(1)) // limit + np.uint64(1)).astype(np.int64)
    row = np.repeat(np.arange(len(nbytes)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(row)) - first[row]).astype(np.uint64) * limit
    size = np.minimum(nbytes[row] - offset, limit)
    return local[row] + offset, remote[row] + offset, size


def calls(nbytes: UInt64Array, *, max_pieces: int, max_nbytes: int) -> Iterator[slice]:
    """Group pieces for calls of a native function. Yield a slice of piece indices per call.

    Args:
        nbytes: (n,) size of each piece.
        max_pieces: largest number of pieces of a call.
        max_nbytes: largest number of bytes of a call. A call with a single piece may have more.
    """
    ends = np.cumsum(nbytes)
    start, done = 0, 0
    while start < len(nbytes):
        fits = int(np.searchsorted(ends, done + max_nbytes, "right"))
        stop = min(start + max_pieces, max(start + 1, fits))
        yield slice(start, stop)
        start, done = stop, int(ends[stop - 1])


def edges_of(address: int, nbytes: int, step_nbytes: int) -> list[int]:
    """Return the addresses at which a region is cut, so that one registration covers at most `step_nbytes`.

    The list is empty if one registration covers the region, or if `step_nbytes` is 0 (no limit).
    """
    if not 0 < step_nbytes < nbytes:
        return []
    return list(range(address + step_nbytes, address + nbytes, step_nbytes))


def cut_at_edges(pieces: Pieces, *, local: list[int], remote: list[int]) -> Pieces:
    """Cut pieces that cross a border between two registrations of the local or the remote memory.

    `local` and `remote` are start addresses of registrations, in any order. Duplicates are allowed.
    """
    if local:
        pieces = _cut(pieces, pieces[0], np.unique(np.array(local, np.uint64)))
    if remote:
        pieces = _cut(pieces, pieces[1], np.unique(np.array(remote, np.uint64)))
    return pieces


def _cut(pieces: Pieces, addresses: UInt64Array, edges: UInt64Array) -> Pieces:
    """Cut each piece at the `edges` inside it. `addresses` are the local or the remote addresses of the pieces."""
    local, remote, nbytes = pieces
    first = np.searchsorted(edges, addresses, side="right")
    counts = np.searchsorted(edges, addresses + nbytes, side="left") - first + 1
    if len(nbytes) == 0 or int(counts.max()) == 1:
        return pieces
    row = np.repeat(np.arange(len(nbytes)), counts)
    nth = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    start, stop = addresses[row], (addresses + nbytes)[row]
    later, earlier = nth > 0, nth < counts[row] - 1
    start[later] = edges[(first[row] + nth - 1)[later]]
    stop[earlier] = edges[(first[row] + nth)[earlier]]
    offset = start - addresses[row]
    return local[row] + offset, remote[row] + offset, stop - start


def joined_ranges(rows: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sort ranges, and join ranges of the same owner that touch or overlap.

    Each row is (owner, start, stop). An owner is any number, for example the index of a parameter.
    """
    joined: list[tuple[int, int, int]] = []
    for owner, start, stop in sorted(rows):
        if joined and joined[-1][0] == owner and start <= joined[-1][2]:
            joined[-1] = (owner, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((owner, start, stop))
    return joined
