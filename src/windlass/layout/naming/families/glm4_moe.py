"""GLM-4.5 and its kind."""

from __future__ import annotations

from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import DENSE, SHARED, SPARSE

__all__ = ["FAMILY"]

FAMILY = Family("glm4_moe", (*DENSE, *SPARSE, *SHARED))
