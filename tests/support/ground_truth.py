"""Expected bytes of a whole fleet, computed from the manifests without a planner."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from windlass.layout.box import Box
from windlass.layout.manifest import ShardManifest

__all__ = ["distinct_values", "fill", "shard_view"]

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.uint32]


def distinct_values(manifests: Iterable[ShardManifest]) -> dict[str, Elements]:
    """Return global tensors of 4-byte elements; all elements of the fleet are distinct.

    Names that an alias ties share one array.
    """
    manifests = list(manifests)
    values: dict[str, Elements] = {}
    first = 1
    for manifest in manifests:
        for spec in manifest.tensors:
            if spec.name not in values:
                numel = int(np.prod(spec.shape))
                values[spec.name] = np.arange(first, first + numel, dtype=np.uint32).reshape(
                    spec.shape
                )
                first += numel
    for manifest in manifests:
        for alias, target in manifest.aliases.items():
            values[alias] = values[target]
    return values


def shard_view(
    buffer: Bytes, box: Box, offset_bytes: int, strides_bytes: tuple[int, ...]
) -> Elements:
    """Return the elements of one shard as a strided view of its parameter."""
    return np.ndarray(box.sizes, np.uint32, buffer, offset_bytes, strides_bytes)


def fill(manifest: ShardManifest, values: dict[str, Elements], background: int) -> list[Bytes]:
    """Return one buffer per parameter: the elements of its shards, and `background` in all other bytes."""
    buffers = [np.full(p.nbytes, background, np.uint8) for p in manifest.parameters]
    index = {p.name: i for i, p in enumerate(manifest.parameters)}
    for shard in manifest.shards():
        view = shard_view(
            buffers[index[shard.parameter]], shard.box, shard.offset_bytes, shard.strides_bytes
        )
        region = tuple(slice(a, b) for a, b in zip(shard.box.offsets, shard.box.ends, strict=True))
        view[...] = values[shard.tensor][region]
    return buffers
