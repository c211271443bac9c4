"""Elements of a naming table: one rule per parameter name of the training framework.

A rule states three things: the framework's name of a parameter, the checkpoint tensors that form
its rows, and how the parameter is cut over the ranks. A table does not depend on a model's sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from windlass.errors import UnsupportedLayout


class Cut(StrEnum):
    """Division of a parameter's rows and columns among tensor-parallel ranks.

    WHOLE: every rank holds the whole parameter. COLUMN: dim 0 is cut. ROW: dim 1 is cut.

    GLU: each rank holds its part of the first tensor, then its part of the second.

    QKV: rows are ordered by query group (its queries, its key, its value); then dim 0 is cut.

    VOCAB: dim 0 is padded, then cut. LATENT: dim 0 is cut or whole, depending on Megatron's layer spec.

    GROUPED_GLU, GROUPED_ROW: all local experts in one matrix, each transposed.
    """

    WHOLE = "whole"
    COLUMN = "column"
    ROW = "row"
    GLU = "glu"
    QKV = "qkv"
    VOCAB = "vocab"
    LATENT = "latent"
    GROUPED_GLU = "grouped_glu"
    GROUPED_ROW = "grouped_row"


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter name.

    Attributes:
        pattern: the framework's name; `{layer}` and `{expert}` stand for numbers.
        tensors: checkpoint names with the same fields, in the order of their rows in the parameter.
        cut: cut of the parameter over the tensor-parallel ranks; parameters of experts are cut over
            the expert-tensor-parallel ranks instead.
    """

    pattern: str
    tensors: tuple[str, ...]
    cut: Cut

    @property
    def of_expert(self) -> bool:
        """True if the parameter belongs to routed experts."""
        return any("{expert}" in tensor for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Match:
    """A rule and the numbers in a name, -1 for a missing number. `expert`: index of the expert on this rank."""

    rule: Rule
    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Family:
    """A naming table.

    Attributes:
        name: name of the family.
        rules: the table. The first matching rule applies.
    """

    name: str
    rules: tuple[Rule, ...]

    def match(self, name: str) -> Match:
        """Return the first rule that matches a parameter's name, and the numbers in the name.

        `name` contains the global layer number.

        Raises:
            UnsupportedLayout: no rule matches; the message says how to add a rule.
        """
        for rule in self.rules:
            found = compiled(rule.pattern).fullmatch(name)
            if found is not None:
                numbers = found.groupdict()
                return Match(rule, int(numbers.get("layer", -1)), int(numbers.get("expert", -1)))
        raise UnsupportedLayout(
            f"parameter {name!r} must have a rule in naming family {self.name!r}, found none: pass "
            f"family={self.name}.extended(Rule({_generalised(name)!r}, (<checkpoint name>, ...), "
            "Cut.<how it is cut>)), or name its prefix in `ignore` if no engine needs it"
        )

    def extended(self, *rules: Rule) -> Family:
        """Return the family with more rules, which are tried before the present rules."""
        return Family(self.name, (*rules, *self.rules))


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a rule's pattern. `{layer}` and `{expert}` match numbers."""
    escaped = re.escape(pattern)
    for field in ("layer", "expert"):
        escaped = escaped.replace(rf"\{{{field}\}}", rf"(?P<{field}>\d+)")
    return re.compile(escaped)


def _generalised(name: str) -> str:
    """Return a rule's pattern for a parameter's name: the numbers become `{layer}` and `{expert}`."""
    name = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.{layer}.", name)
    name = re.sub(r"local_experts\.\d+\.", "local_experts.{expert}.", name)
    return re.sub(r"(experts\..*\.(?:weight|bias))\d+$", r"\1{expert}", name)
