"""Mixtral."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import ENDS, GROUPED_QUERY, NORMS, experts, layer

__all__ = ["FAMILY"]

_EXPERTS = (
    layer("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)

FAMILY = Family("mixtral", (*ENDS, *NORMS, *GROUPED_QUERY, *_EXPERTS))
