"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DENSE

__all__ = ["FAMILY"]

FAMILY = Family("qwen2", DENSE)
