"""Kimi K2."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DEEPSEEK

__all__ = ["FAMILY"]

FAMILY = Family("kimi_k2", DEEPSEEK)
