"""DeepSeek V3 and R1."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DEEPSEEK

__all__ = ["FAMILY"]

FAMILY = Family("deepseek_v3", DEEPSEEK)
