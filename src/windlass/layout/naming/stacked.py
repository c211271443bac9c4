"""Parameters that are several checkpoint tensors, or parts of one.

A whole parameter is described once, as boxes of checkpoint tensors that lie in it with strides; `cut`
then finds what of them a rank holds, whatever box of the parameter that is (cut over experts, over rows,
over columns). Experts that a framework stacks into one tensor are the most frequent case: dims (experts,
rows, columns), whose rows are those of one or several checkpoint matrices, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windlass.errors import ManifestError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.manifest import contiguous_strides
from windlass.layout.naming.place import PlacedShard
from windlass.layout.naming.rules import compiled


@dataclass(frozen=True, slots=True)
class StackedRule:
    """One stacked parameter.

    Attributes:
        pattern: tensor name with `{layer}`.
        tensors: checkpoint names with `{layer}` and `{expert}`; each has an equal part of the rows.
        transposed: whether rows and columns are the other way round than in the checkpoint.
    """

    pattern: str
    tensors: tuple[str, ...]
    transposed: bool = False

    def match(self, name: str) -> int | None:
        """The layer in `name`, or None when the rule is not about it."""
        found = compiled(self.pattern).fullmatch(name)
        return None if found is None else int(found.group("layer"))


_AT = "model.layers.{layer}.mlp.experts"

TRANSFORMERS_EXPERTS = (
    StackedRule(
        f"{_AT}.gate_up_proj",
        (f"{_AT}.{{expert}}.gate_proj.weight", f"{_AT}.{{expert}}.up_proj.weight"),
    ),
    StackedRule(f"{_AT}.down_proj", (f"{_AT}.{{expert}}.down_proj.weight",)),
)
"""transformers 5: Qwen3-MoE, GLM-4-MoE, DeepSeek-V3 and their kind."""

TORCHTITAN_EXPERTS = tuple(
    StackedRule(f"layers.{{layer}}.moe.experts.{w}", (f"{_AT}.{{expert}}.{name}.weight",))
    for w, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
)
"""torchtitan's `GroupedExperts`."""


def unstack(
    rules: Sequence[StackedRule], name: str, shape: tuple[int, ...]
) -> tuple[PlacedShard, ...] | None:
    """Checkpoint tensors in a whole stacked parameter.

    Args:
        rules: the first that matches counts.
        name: tensor name.
        shape: (experts, rows, columns).

    Returns:
        The shards in elements of the contiguous parameter, or None when no rule is about `name`.

    Raises:
        ManifestError: it has not three dims, or its rows cannot be shared out evenly.
    """
    for rule in rules:
        layer = rule.match(name)
        if layer is not None:
            return tuple(_unstack(rule, layer, name, shape))
    return None


def _unstack(
    rule: StackedRule, layer: int, name: str, shape: tuple[int, ...]
) -> Iterator[PlacedShard]:
    row_dim, column_dim = (2, 1) if rule.transposed else (1, 2)
    if len(shape) != 3 or shape[row_dim] % len(rule.tensors):
        raise ManifestError(
            f"tensor {name!r}: shape {shape} must be experts, rows, columns with rows "
            f"divisible by {len(rule.tensors)}"
        )
    matrix = (shape[row_dim] // len(rule.tensors), shape[column_dim])
    strides = contiguous_strides(shape, 1)
    for expert in range(shape[0]):
        for part, tensor in enumerate(rule.tensors):
            yield PlacedShard(
                tensor.format(layer=layer, expert=expert),
                matrix,
                Box.full(matrix),
                expert * strides[0] + part * matrix[0] * strides[row_dim],
                (strides[row_dim], strides[column_dim]),
            )


def cut(
    name: str,
    parts: Sequence[PlacedShard],
    shape: tuple[int, ...],
    box: Box,
    strides: tuple[int, ...],
) -> Iterator[PlacedShard]:
    """Yield what a local part of a parameter holds of the tensors in the whole one.

    Args:
        name: of the parameter, for messages.
        parts: the whole parameter, in elements of it as if it were contiguous.
        shape: of the whole parameter.
        box: what is held of it.
        strides: of the local memory per dim, in any unit; offsets and strides come out in the same.

    Raises:
        UnsupportedLayout: dims of the parameter make up one of a tensor and are cut or lie apart here.
    """
    if not box.numel:
        return
    for part in parts:
        held = _Dims.around(name, part, shape, box, strides)
        coords = held.coords_of(part.offset)
        steps = tuple(
            held.step_of(stride) if size > 1 else (0, 0)
            for stride, size in zip(part.strides, part.box.sizes, strict=True)
        )
        yield from held.clip(part, coords, steps)


@dataclass(frozen=True, slots=True)
class _Dims:
    """Dims of a parameter, of which some may be joined: sizes, what is held, strides of local memory."""

    shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]

    @classmethod
    def around(
        cls,
        name: str,
        part: PlacedShard,
        shape: tuple[int, ...],
        box: Box,
        strides: tuple[int, ...],
    ) -> _Dims:
        """Join dims until each dim of the tensor runs along one of them."""
        dims = cls(shape, box, strides)
        dim: int | None = 0
        while dim is not None:
            reached = list(dims.coords_of(part.offset))
            for size, stride in zip(part.box.sizes, part.strides, strict=True):
                if size > 1:
                    along, step = dims.step_of(stride)
                    reached[along] += (size - 1) * step
            beyond = (at for at, end in enumerate(reached) if end >= dims.shape[at])
            if (dim := next(beyond, None)) is not None:
                dims = dims._joined(name, part.tensor, dim)
        return dims

    def _joined(self, name: str, tensor: str, dim: int) -> _Dims:
        """Join `dim` and the one before it."""
        low, size = self.box.offsets, self.box.sizes
        inner = self.shape[dim]
        apart = size[dim - 1] > 1 and self.strides[dim - 1] != inner * self.strides[dim]
        if not dim or size[dim] != inner or apart:
            raise UnsupportedLayout(
                f"parameter {name!r}: dims that are one dim of tensor {tensor!r} must lie whole and one after "
                f"the other, got {self.box} of {self.shape} with strides {self.strides}"
            )
        box = Box(
            (*low[: dim - 1], low[dim - 1] * inner, *low[dim + 1 :]),
            (*size[: dim - 1], size[dim - 1] * inner, *size[dim + 1 :]),
        )
        shape = (*self.shape[: dim - 1], self.shape[dim - 1] * inner, *self.shape[dim + 1 :])
        return _Dims(shape, box, (*self.strides[: dim - 1], *self.strides[dim:]))

    def coords_of(self, offset: int) -> tuple[int, ...]:
        """Where an element of the contiguous parameter is."""
        coords: list[int] = []
        for stride in contiguous_strides(self.shape, 1):
            coords.append(offset // stride)
            offset %= stride
        return tuple(coords)

    def step_of(self, stride: int) -> tuple[int, int]:
        """The dim along which a stride of the contiguous parameter goes, and how far."""
        for dim, unit in enumerate(contiguous_strides(self.shape, 1)):
            if self.shape[dim] > 1 and stride % unit == 0:
                return dim, stride // unit
        return len(self.shape) - 1, stride

    def clip(
        self, part: PlacedShard, coords: tuple[int, ...], steps: tuple[tuple[int, int], ...]
    ) -> Iterator[PlacedShard]:
        """Yield what is held of `part`, which begins at `coords`; `steps`: (dim, step) of each dim."""
        sizes, starts = list(part.box.sizes), list(part.box.offsets)
        first = list(coords)
        for dim, (low, high) in enumerate(zip(self.box.offsets, self.box.ends, strict=True)):
            along = [at for at, (of, _) in enumerate(steps) if of == dim and sizes[at] > 1]
            last = first[dim] + sum((sizes[at] - 1) * steps[at][1] for at in along)
            if first[dim] >= high or last < low:
                return
            if low <= first[dim] and last < high:
                continue
            # One dim of the tensor is cut to a box; of several that run along this one, the widest is taken apart.
            widest = max(along, key=lambda at: steps[at][1])
            step = steps[widest][1]
            if len(along) > 1:
                for index in range(sizes[widest]):
                    begin = (*starts[:widest], starts[widest] + index, *starts[widest + 1 :])
                    single = Box(begin, (*sizes[:widest], 1, *sizes[widest + 1 :]))
                    at = (*first[:dim], first[dim] + index * step, *first[dim + 1 :])
                    yield from self.clip(replace(part, box=single), at, steps)
                return
            skipped = max(0, math.ceil((low - first[dim]) / step))
            sizes[widest] = min(sizes[widest], (high - 1 - first[dim]) // step + 1) - skipped
            if sizes[widest] < 1:
                return
            starts[widest] += skipped
            first[dim] += skipped * step
        yield PlacedShard(
            part.tensor,
            part.global_shape,
            Box(tuple(starts), tuple(sizes)),
            sum(
                (at - low) * stride
                for at, low, stride in zip(first, self.box.offsets, self.strides, strict=True)
            ),
            tuple(
                step * self.strides[dim] if size > 1 else 0
                for (dim, step), size in zip(steps, sizes, strict=True)
            ),
        )
