"""Plan WHICH bytes go where: from manifests to a TransferPlan. No torch, no I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.planning.plan import TransferPlan as TransferPlan
    from windlass.planning.planner import PlanPolicy as PlanPolicy
    from windlass.planning.planner import plan_transfer as plan_transfer

if not TYPE_CHECKING:
    # Hidden from type checkers, so that they still report unknown names.
    __all__, __getattr__, __dir__ = public(__name__)
