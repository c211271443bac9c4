"""Qwen3 with experts."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DENSE, SPARSE

__all__ = ["FAMILY"]

FAMILY = Family("qwen3_moe", (*DENSE, *SPARSE))
