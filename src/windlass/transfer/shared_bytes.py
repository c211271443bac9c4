"""Refuses an engine rank in which two parameters store different elements in the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from windlass.errors import ManifestError
from windlass.layout.columns import Int64Array
from windlass.layout.manifest import ShardManifest

_MOST_ELEMENTS = 1 << 20
"""Maximum number of elements in two strided shards together, for a comparison of all their addresses."""


def refuse_shared_bytes(manifest: ShardManifest, addresses: Sequence[int]) -> None:
    """Raise if two parameters store different elements in the same bytes.

    A view of another parameter is accepted, and so is a tied weight with two names. Large strided shards with overlapping
    address ranges are not checked. If they share bytes of different elements, `verify` of an update finds wrong digests.

    Args:
        manifest: manifest of the rank.
        addresses: addresses of the rank's parameters, in manifest order.

    Raises:
        ManifestError: two parameters share bytes for different elements.
    """
    for first, second in _overlapping(manifest, addresses):
        for row in np.flatnonzero(manifest.table.parameter == first).tolist():
            for other in np.flatnonzero(manifest.table.parameter == second).tolist():
                if _collide(manifest, addresses, row, other):
                    tensors = [
                        manifest.tensors[int(manifest.table.tensor[r])] for r in (row, other)
                    ]
                    raise ManifestError(
                        f"{manifest.worker}: parameters {manifest.parameters[first].name!r} and "
                        f"{manifest.parameters[second].name!r} must not share bytes for different elements, got "
                        f"{tensors[0].name!r} and {tensors[1].name!r} in the same memory; give each parameter its own memory"
                    )


def _overlapping(manifest: ShardManifest, addresses: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each pair of parameters with overlapping address ranges."""
    extents = sorted(
        (address, address + parameter.nbytes, index)
        for index, (address, parameter) in enumerate(
            zip(addresses, manifest.parameters, strict=True)
        )
    )
    reaching: list[tuple[int, int]] = []
    for start, stop, index in extents:
        reaching = [(end, other) for end, other in reaching if end > start]
        for _, other in reaching:
            yield other, index
        reaching.append((stop, index))


def _collide(manifest: ShardManifest, addresses: Sequence[int], row: int, other: int) -> bool:
    """Return whether two shards (rows of the manifest's table) store different elements in the same bytes.

    Return False for large strided shards. See `_MOST_ELEMENTS`.
    """
    table = manifest.table
    bases = [addresses[int(table.parameter[r])] + int(table.offset_bytes[r]) for r in (row, other)]
    itemsizes = [manifest.parameters[int(table.parameter[r])].dtype.itemsize for r in (row, other)]
    lows, highs = [], []
    for base, r, itemsize in zip(bases, (row, other), itemsizes, strict=True):
        reach = (table.sizes[r] - 1) * table.strides_bytes[r]
        lows.append(base + int(np.minimum(reach, 0).sum()))
        highs.append(base + int(np.maximum(reach, 0).sum()) + itemsize)
    if min(highs) <= max(lows) or _same_places(manifest, bases, row, other):
        return False
    numels = [int(table.sizes[r].prod()) for r in (row, other)]
    if all(
        high - low == numel * itemsize
        for low, high, numel, itemsize in zip(lows, highs, numels, itemsizes, strict=True)
    ):
        return True
    if sum(numels) > _MOST_ELEMENTS:
        return False
    taken = _bytes_of(manifest, bases[0], row, itemsizes[0])
    return bool(np.isin(_bytes_of(manifest, bases[1], other, itemsizes[1]), taken).any())


def _same_places(manifest: ShardManifest, bases: Sequence[int], row: int, other: int) -> bool:
    """Return whether elements with the same index in both tensors have the same address."""
    table = manifest.table
    specs = [manifest.tensors[int(table.tensor[r])] for r in (row, other)]
    types = [manifest.parameters[int(table.parameter[r])].dtype for r in (row, other)]
    if specs[0].shape != specs[1].shape or types[0] != types[1]:
        return False
    # In a dim with a single element, the stride has no meaning, so use the stride of the other shard.
    single = [table.sizes[r] == 1 for r in (row, other)]
    same = single[0] & single[1] & (table.offsets[row] == table.offsets[other])
    strides = [
        np.where(
            same, 0, np.where(single[0], table.strides_bytes[other], table.strides_bytes[row])
        ),
        np.where(
            same, 0, np.where(single[1], table.strides_bytes[row], table.strides_bytes[other])
        ),
    ]
    origins = [
        base - int((table.offsets[r] * stride).sum())
        for base, r, stride in zip(bases, (row, other), strides, strict=True)
    ]
    return bool((strides[0] == strides[1]).all()) and origins[0] == origins[1]


def _bytes_of(manifest: ShardManifest, base: int, row: int, itemsize: int) -> Int64Array:
    """Return the addresses of all bytes of a shard, in any order."""
    found = np.arange(itemsize, dtype=np.int64) + base
    for size, stride in zip(
        manifest.table.sizes[row].tolist(), manifest.table.strides_bytes[row].tolist(), strict=True
    ):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found
