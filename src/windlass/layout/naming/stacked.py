"""Experts that a framework stacks into one tensor, as the checkpoint's one matrix per expert.

A stacked parameter has dims (experts, rows, columns). Its rows are those of one or several
checkpoint matrices, one after the other. Whatever box of it a rank holds (cut over experts, over
rows, over columns) is a box of each of those matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.errors import ManifestError
from windlass.layout.box import Box
from windlass.layout.naming.place import PlacedShard
from windlass.layout.naming.rules import compiled

__all__ = ["TORCHTITAN_EXPERTS", "TRANSFORMERS_EXPERTS", "StackedRule", "unstack"]


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
    rules: Sequence[StackedRule],
    name: str,
    global_shape: tuple[int, ...],
    box: Box,
    strides: tuple[int, ...],
) -> tuple[PlacedShard, ...] | None:
    """Checkpoint boxes in a local part of a stacked parameter.

    Args:
        rules: the first that matches counts.
        name: tensor name.
        global_shape: (experts, rows, columns).
        box: what this rank holds of it.
        strides: of the local memory per dim, in any unit; offsets come out in the same.

    Returns:
        The shards, or None when no rule is about `name`.

    Raises:
        ManifestError: it has not three dims, or its rows cannot be shared out evenly.
    """
    for rule in rules:
        layer = rule.match(name)
        if layer is not None:
            return tuple(_unstack(rule, layer, name, global_shape, box, strides))
    return None


def _unstack(
    rule: StackedRule,
    layer: int,
    name: str,
    global_shape: tuple[int, ...],
    box: Box,
    strides: tuple[int, ...],
) -> Iterator[PlacedShard]:
    row_dim, column_dim = (2, 1) if rule.transposed else (1, 2)
    if len(global_shape) != 3 or global_shape[row_dim] % len(rule.tensors):
        raise ManifestError(
            f"tensor {name!r}: shape {global_shape} must be experts, rows, columns with rows "
            f"divisible by {len(rule.tensors)}"
        )
    rows = global_shape[row_dim] // len(rule.tensors)
    shape = (rows, global_shape[column_dim])
    begin, end = box.offsets[row_dim], box.ends[row_dim]
    columns = box.offsets[column_dim], box.sizes[column_dim]
    for index in range(box.sizes[0]):
        for part, tensor in enumerate(rule.tensors):
            low, high = max(part * rows, begin), min((part + 1) * rows, end)
            if low < high and columns[1]:
                yield PlacedShard(
                    tensor.format(layer=layer, expert=box.offsets[0] + index),
                    shape,
                    Box((low - part * rows, columns[0]), (high - low, columns[1])),
                    index * strides[0] + (low - begin) * strides[row_dim],
                    (strides[row_dim], strides[column_dim]),
                )
