"""Rules for parameters that contain several checkpoint tensors.

The most frequent case is a framework that stacks all experts into one tensor with dims (experts,
rows, columns). The rows of each expert are the rows of one or several checkpoint matrices, one
after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.layout.naming.rules import compiled


@dataclass(frozen=True, slots=True)
class StackedRule:
    """One stacked parameter.

    Attributes:
        pattern: tensor name with `{layer}`.
        tensors: checkpoint names with `{layer}` and `{expert}`; each has an equal part of the rows.
        transposed: True if rows and columns are swapped relative to the checkpoint.
    """

    pattern: str
    tensors: tuple[str, ...]
    transposed: bool = False

    def match(self, name: str) -> int | None:
        """Return the layer number in `name`; None if the rule does not match."""
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
"""Rules for transformers 5: Qwen3-MoE, GLM-4-MoE, DeepSeek-V3 and similar models."""

TORCHTITAN_EXPERTS = tuple(
    StackedRule(f"layers.{{layer}}.moe.experts.{w}", (f"{_AT}.{{expert}}.{name}.weight",))
    for w, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
)
"""Rules for torchtitan's `GroupedExperts`."""
