"""Rules for parameters that are several checkpoint tensors.

Experts that a framework stacks into one tensor are the most frequent case: dims (experts, rows, columns), whose rows are
those of one or several checkpoint matrices, one after the other.
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
