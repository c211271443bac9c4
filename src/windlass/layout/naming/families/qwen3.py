"""Qwen3, dense."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DENSE

__all__ = ["FAMILY"]

FAMILY = Family("qwen3", DENSE)
