"""Map a parameter's name and local shape to the boxes of checkpoint tensors that it contains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from windlass.errors import ManifestError
from windlass.layout.box import Box
from windlass.layout.manifest import contiguous_strides
from windlass.layout.naming.rules import Cut, Family, Match

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that cannot be derived from shapes alone.

    Attributes:
        num_query_groups: key-value heads of the whole model.
        queries_per_group: query heads per key-value head.
        head_dim: rows per head.
        vocab_size: rows of the vocabulary in the checkpoint, without padding.
        hidden_size: hidden size of the model.
        num_experts: routed experts per layer, 0 without experts.
        latent_rows: (checkpoint suffix, rows) of each latent down-projection.
    """

    num_query_groups: int
    queries_per_group: int
    head_dim: int
    vocab_size: int
    hidden_size: int
    num_experts: int = 0
    latent_rows: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """Coordinates (index, size) of a rank on the mesh axes that cut parameters."""

    tp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """One box of one tensor in a parameter; offset and strides in elements."""

    tensor: str
    global_shape: _Shape
    box: Box
    offset: int
    strides: _Shape


@dataclass(frozen=True, slots=True)
class Placed:
    """All boxes of a parameter. `padding`: number of elements that belong to no tensor."""

    shards: tuple[PlacedShard, ...]
    padding: int


def place(family: Family, name: str, shape: _Shape, geometry: Geometry, coords: Coords) -> Placed:
    """Return the boxes of checkpoint tensors that a local parameter of a Megatron rank contains.

    Args:
        family: naming table of the model.
        name: name of the parameter. It contains the layer's number in the whole model, and the expert's number on this
            rank.
        shape: local shape of the parameter, which must be contiguous.
        geometry: sizes of the model.
        coords: the rank's coordinates on the mesh.

    Raises:
        UnsupportedLayout: the family has no rule for the name.
        ManifestError: the shape or the expert's number contradicts the rule and the model's sizes.
    """
    match = family.match(name)
    rank, size = coords.etp if match.rule.of_expert else coords.tp
    first_expert = 0
    num_local = 0
    if match.rule.of_expert:
        num_local = geometry.num_experts // coords.ep[1]
        first_expert = coords.ep[0] * num_local
        if match.expert >= num_local:
            raise ManifestError(
                f"parameter {name!r}: expert number must be < {num_local}, the number of experts per rank, "
                f"got {match.expert}"
            )
    part = _Part(name, match, shape, rank, size, first_expert)
    shards = tuple(shard for shard in _shards(part, geometry, num_local) if shard.box.numel)
    padding = math.prod(shape) - sum(shard.box.numel for shard in shards)
    if padding < 0 or (padding and match.rule.cut is not Cut.VOCAB):
        raise ManifestError(
            f"parameter {name!r}: shape {shape} has {math.prod(shape)} elements, but the rule with cut "
            f"{match.rule.cut.value!r} describes {math.prod(shape) - padding}"
        )
    return Placed(shards, padding)


@dataclass(frozen=True, slots=True)
class _Part:
    """One parameter on one rank. `rank` and `size` are the rank's coordinate on the axis that cuts the parameter."""

    name: str
    match: Match
    shape: _Shape
    rank: int
    size: int
    first_expert: int

    def tensor(self, index: int, expert: int | None = None) -> str:
        """Return the checkpoint name of one of the rule's tensors.

        Args:
            index: index of the tensor in the rule.
            expert: number of the expert on this rank; None for the number in the parameter's name.
        """
        number = self.match.expert if expert is None else expert
        return self.match.rule.tensors[index].format(
            layer=self.match.layer, expert=self.first_expert + number
        )

    def rows(self, index: int, num_rows: int, first: int, count: int, at: int) -> PlacedShard:
        """Return the shard with the rows [first, first + count) of one of the rule's tensors.

        Args:
            index: index of the tensor in the rule.
            num_rows: rows of the whole tensor.
            first: first row in the tensor.
            count: number of rows.
            at: row of the parameter at which the shard begins.
        """
        tail = self.shape[1:]
        strides = contiguous_strides(self.shape, 1)
        box = Box((first, *(0 for _ in tail)), (count, *tail))
        return PlacedShard(self.tensor(index), (num_rows, *tail), box, at * strides[0], strides)

    def even(self, num_rows: int, parts: int) -> int:
        """Return the number of rows in each of `parts` equal parts; raise ManifestError if the parts are not equal."""
        if num_rows % parts:
            raise ManifestError(
                f"parameter {self.name!r}: number of rows must be divisible by {parts}, got {num_rows}"
            )
        return num_rows // parts


def _shards(part: _Part, geometry: Geometry, num_local: int) -> Iterator[PlacedShard]:
    """Yield the shards of a parameter, divided as the rule's `Cut` describes.

    `num_local` is the number of experts on this rank.

    Raises:
        ManifestError: the parameter's shape contradicts the cut.
    """
    rows, rank, size = part.shape[0], part.rank, part.size
    match part.match.rule.cut:
        case Cut.WHOLE:
            yield part.rows(0, rows, 0, rows, 0)
        case Cut.COLUMN:
            yield part.rows(0, rows * size, rank * rows, rows, 0)
        case Cut.ROW:
            columns = part.shape[1]
            box = Box((0, rank * columns), part.shape)
            yield PlacedShard(part.tensor(0), (rows, columns * size), box, 0, (columns, 1))
        case Cut.GLU:
            half = part.even(rows, 2)
            for index in range(2):
                yield part.rows(index, half * size, rank * half, half, index * half)
        case Cut.QKV:
            yield from _interleaved(part, geometry)
        case Cut.VOCAB:
            first = min(rank * rows, geometry.vocab_size)
            count = min(rows, geometry.vocab_size - first)
            if rows * size < geometry.vocab_size:
                raise ManifestError(
                    f"parameter {part.name!r}: must have at least 1/{size} of vocab_size={geometry.vocab_size} rows, "
                    f"got {rows}"
                )
            yield part.rows(0, geometry.vocab_size, first, count, 0)
        case Cut.LATENT:
            yield _latent(part, geometry)
        case Cut.GROUPED_GLU | Cut.GROUPED_ROW:
            yield from _grouped(part, geometry, num_local)


def _interleaved(part: _Part, geometry: Geometry) -> Iterator[PlacedShard]:
    """Yield the query, key and value rows of each query group on this rank.

    The rows of a group may be divided between ranks.

    Raises:
        ManifestError: the number of rows contradicts `geometry`.
    """
    head, groups = geometry.head_dim, geometry.num_query_groups
    counts = (geometry.queries_per_group * head, head, head)
    local, total = part.shape[0], groups * sum(counts)
    if local * part.size != total:
        raise ManifestError(
            f"parameter {part.name!r}: must have 1/{part.size} of {total} rows ({groups} groups of "
            f"{geometry.queries_per_group} query heads, a key head and a value head, with {head} rows per head), "
            f"got {local}"
        )
    begin, end, at = part.rank * local, (part.rank + 1) * local, 0
    for group in range(groups):
        for index, count in enumerate(counts):
            low, high = max(at, begin), min(at + count, end)
            if low < high:
                first = group * count + low - at
                yield part.rows(index, groups * count, first, high - low, low - begin)
            at += count


def _latent(part: _Part, geometry: Geometry) -> PlacedShard:
    """Return the shard of a latent down-projection. A rank has either all rows of the matrix or an equal share of them.

    Raises:
        ManifestError: the number of rows fits neither case.
    """
    tensor, rows = part.tensor(0), part.shape[0]
    for suffix, total in geometry.latent_rows:
        if tensor.endswith(suffix) and rows in (total, total / part.size):
            first = 0 if rows == total else part.rank * rows
            return part.rows(0, total, first, rows, 0)
    raise ManifestError(
        f"parameter {part.name!r}: must have all rows of tensor {tensor!r}, or 1/{part.size} of the rows, got {rows} "
        f"rows; rows of whole tensors by the end of the name: {dict(geometry.latent_rows)}"
    )


def _grouped(part: _Part, geometry: Geometry, num_local: int) -> Iterator[PlacedShard]:
    """Yield the shards of all local experts, whose weights are in one parameter (Megatron's GroupedMLP).

    `weight1` has shape `(hidden, experts * 2 * inner)`, but its memory is ordered as `(experts, hidden, 2 * inner)`.
    `weight2` has shape `(experts * inner, hidden)`. Each expert's matrix is transposed relative to the checkpoint.

    Raises:
        ManifestError: the number of elements contradicts `geometry`.
    """
    hidden, numel = geometry.hidden_size, math.prod(part.shape)
    per_expert = part.even(numel, num_local)
    columns = part.even(per_expert, hidden)
    for expert in range(num_local):
        start = expert * per_expert
        if part.match.rule.cut is Cut.GROUPED_GLU:
            inner = part.even(columns, 2)
            for index in range(2):
                box = Box((part.rank * inner, 0), (inner, hidden))
                shape = (inner * part.size, hidden)
                name, offset = part.tensor(index, expert), start + index * inner
                yield PlacedShard(name, shape, box, offset, (1, columns))
        else:
            box = Box((0, part.rank * columns), (hidden, columns))
            shape = (hidden, columns * part.size)
            yield PlacedShard(part.tensor(0, expert), shape, box, start, (1, hidden))
