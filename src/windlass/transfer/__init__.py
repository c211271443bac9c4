"""Execution of plans, and the registered memory that it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.transfer.arena import Arena as Arena

# At run time only: a type checker must still report names that do not exist.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
