"""Hypothesis strategies for any mesh, any fusing and any strides."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import strategies as st

from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import MAX_DIMS, ManifestBuilder, Role, ShardManifest

__all__ = ["Fleet", "Placement", "boxes", "fleets", "grids", "placements", "shapes"]

_DTYPE = DType.FLOAT32
_ITEMSIZE = _DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Fleet:
    """Both sides of a transfer; every destination byte has a source."""

    sources: tuple[ShardManifest, ...]
    destinations: tuple[ShardManifest, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Strided memory for one box: `nbytes` bytes, with the first element at `offset`."""

    nbytes: int
    offset: int
    strides: tuple[int, ...]


def shapes(max_dims: int = MAX_DIMS, max_size: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Return tensor shapes of 1 to `max_dims` dims."""
    dims = st.lists(st.integers(1, max_size), min_size=1, max_size=max_dims)
    return dims.map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Return non-empty boxes inside `shape`."""
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return Box(offsets, sizes)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], max_parts: int = 3) -> list[Box]:
    """Return `shape` cut unevenly into a grid along any number of dims."""
    spans: list[list[tuple[int, int]]] = []
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=max_parts - 1)) if size > 1 else ()
        edges = [0, *sorted(cuts), size]
        spans.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    return [
        Box(tuple(offset for offset, _ in cell), tuple(size for _, size in cell))
        for cell in itertools.product(*spans)
    ]


@st.composite
def placements(draw: st.DrawFn, sizes: tuple[int, ...]) -> Placement:
    """Return memory for `sizes`: dims in any order, rows with gaps, reversed dims; mostly plain."""
    num_dims = len(sizes)
    plain = draw(st.booleans())
    order = tuple(range(num_dims)) if plain else draw(st.permutations(range(num_dims)))
    strides, step, offset = [0] * num_dims, _ITEMSIZE, 0
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
        if not plain:
            step += _ITEMSIZE * draw(st.sampled_from((0, 0, 1, 3)))
            if draw(st.integers(0, 7)) == 0:
                offset += strides[dim] * (sizes[dim] - 1)
                strides[dim] = -strides[dim]
    return Placement(step, offset, tuple(strides))


@st.composite
def _manifest(
    draw: st.DrawFn,
    worker: str,
    role: Role,
    shards: list[tuple[str, tuple[int, ...], Box]],
    aliases: dict[str, str],
) -> ShardManifest:
    """Put the shards, in any order, into fused parameters with padding."""
    builder = ManifestBuilder(worker, role)
    shards = draw(st.permutations(shards)) if shards else []
    group: list[tuple[str, tuple[int, ...], Box, Placement, int]] = []
    extent = payload = count = 0

    def flush() -> None:
        nonlocal group, extent, payload, count
        if group:
            name = f"p{count}"
            builder.add_parameter(
                name, nbytes=extent, dtype=_DTYPE, padding_nbytes=extent - payload
            )
            for tensor, shape, box, placement, start in group:
                builder.add_shard(
                    tensor,
                    shape,
                    box,
                    name,
                    offset_bytes=start + placement.offset,
                    strides_bytes=placement.strides,
                )
            count += 1
        group, extent, payload = [], 0, 0

    for tensor, shape, box in shards:
        placement = draw(placements(box.sizes))
        group.append((tensor, shape, box, placement, extent))
        extent += placement.nbytes + _ITEMSIZE * draw(st.sampled_from((0, 0, 0, 2)))
        payload += math.prod(box.sizes) * _ITEMSIZE
        if draw(st.booleans()):
            flush()
    flush()
    held = {tensor for tensor, _, _ in shards}
    for alias, target in aliases.items():
        if target in held:
            builder.add_alias(alias, target)
    return builder.build()


@st.composite
def fleets(draw: st.DrawFn, max_tensors: int = 3, max_ranks: int = 4) -> Fleet:
    """Return trainers and engines of any layout.

    Sources: a grid per tensor, each cell on any non-empty set of ranks, plus boxes that overlap
    the grid. Destinations: any boxes on any ranks, with any fusing and strides. Engines may know
    the last tensor only by a tied name.
    """
    tensors = {f"t{i}": draw(shapes()) for i in range(draw(st.integers(1, max_tensors)))}
    num_sources, num_destinations = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_ranks))
    held: list[list[tuple[str, tuple[int, ...], Box]]] = [[] for _ in range(num_sources)]
    wanted: list[list[tuple[str, tuple[int, ...], Box]]] = [[] for _ in range(num_destinations)]
    tied = f"t{len(tensors) - 1}" if draw(st.booleans()) else ""
    for name, shape in tensors.items():
        for cell in draw(grids(shape)):
            for rank in draw(st.sets(st.integers(0, num_sources - 1), min_size=1)):
                held[rank].append((name, shape, cell))
        for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
            held[draw(st.integers(0, num_sources - 1))].append((name, shape, draw(boxes(shape))))
        wish = "tied" if name == tied else name
        if draw(st.booleans()):
            for cell in draw(grids(shape)):
                wanted[draw(st.integers(0, num_destinations - 1))].append((wish, shape, cell))
        else:
            for rank in range(num_destinations):
                wanted[rank].append((wish, shape, draw(boxes(shape))))
    aliases = {"tied": tied} if tied else {}
    return Fleet(
        tuple(
            draw(_manifest(f"trainer/{rank}", Role.TRAINER, shards, aliases))
            for rank, shards in enumerate(held)
        ),
        tuple(
            draw(_manifest(f"engine/{rank}", Role.ENGINE, shards, {}))
            for rank, shards in enumerate(wanted)
        ),
    )
