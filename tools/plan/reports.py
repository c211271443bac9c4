"""Reports on a plan: coverage of the destinations and balance of the senders.

The routing report proves its lower bound. Let S be the k most loaded senders. Bytes that only ranks in S have must be
sent by S, so in any routing at least one rank of S sends bytes / k or more. The best k gives the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.layout.columns import Int64Array
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import ITEMSIZES, CopyMode, Reason, TransferPlan
from windlass.planning.planner import PlanPolicy, plan_transfer, route
from windlass.planning.quantize import payload_sizes
from windlass.planning.routing import group_by_holders

__all__ = [
    "CoverageReport",
    "PlannedTransfer",
    "RoutingReport",
    "certify",
    "num_writes",
    "plan_with_reports",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageReport:
    """Coverage of a plan, in bytes of the destinations.

    Attributes:
        needed: bytes that the destinations declare, without padding.
        covered: bytes that the plan writes. Always equal to `needed`: the planner refuses other plans.
        by_mode: bytes per mode.
        by_reason: bytes per reason.
        unused_tensors: names of tensors that sources have and no destination uses.
    """

    needed: int
    covered: int
    by_mode: Mapping[CopyMode, int]
    by_reason: Mapping[Reason, int]
    unused_tensors: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """Return `covered / needed`, or 1.0 if nothing is needed."""
        return self.covered / self.needed if self.needed else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReport:
    """Balance of the senders.

    Attributes:
        egress: (num_sources,) bytes that each source sends.
        lower_bound: bytes that the busiest sender must send under any routing.
        certificate: indices of the sources that prove `lower_bound`.
    """

    egress: Int64Array
    lower_bound: float
    certificate: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Return the bytes of the busiest sender divided by the lower bound, >= 1."""
        return float(self.egress.max()) / self.lower_bound if self.lower_bound else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """A plan and its reports."""

    plan: TransferPlan
    coverage: CoverageReport
    routing: RoutingReport


def plan_with_reports(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    policy: PlanPolicy | None = None,
) -> PlannedTransfer:
    """Return the plan of `plan_transfer` with reports on coverage and routing."""
    plan = plan_transfer(sources, destinations, policy)
    given, ops = route(sources, destinations, policy or PlanPolicy()), plan.ops
    src, dst, names = given.src, given.dst, given.names
    payload = payload_sizes(dst.sizes, dst.transform)
    unused = np.setdiff1d(src.tensor, dst.tensor)
    coverage = CoverageReport(
        needed=int((payload.prod(axis=1) * ITEMSIZES[dst.dtype]).sum()),
        covered=plan.nbytes,
        by_mode={m: int(ops.nbytes[ops.mode == m].sum()) for m in CopyMode},
        by_reason={r: int(ops.nbytes[ops.reason == r].sum()) for r in Reason},
        unused_tensors=tuple(sorted(names.names[int(index)] for index in unused)),
    )
    egress = np.bincount(ops.src, ops.nbytes, len(sources)).astype(np.int64)
    group_of_atom, groups = group_by_holders(src.rank[given.holders.rows], given.holders.start)
    group = group_of_atom[given.pieces.atom[given.candidates.piece]]
    wanted = np.bincount(group, given.candidates.nbytes, len(groups)).astype(np.int64)
    routing = certify(egress, wanted, groups)
    return PlannedTransfer(plan=plan, coverage=coverage, routing=routing)


def num_writes(plan: TransferPlan) -> int:
    """Return the number of contiguous one-sided writes of one update, before the transport splits them into chunks."""
    return int((plan.ops.nbytes // np.maximum(plan.ops.run_nbytes, 1)).sum())


def certify(
    egress: Int64Array, group_nbytes: Int64Array, holders: Sequence[tuple[int, ...]]
) -> RoutingReport:
    """Compare the loads with the best lower bound over prefixes of the most loaded senders."""
    order = np.argsort(-egress, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    forced = np.zeros(len(order), np.int64)
    for of_group, nbytes in zip(holders, group_nbytes.tolist(), strict=True):
        forced[position[list(of_group)].max()] += nbytes
    bounds = np.cumsum(forced) / np.arange(1, len(order) + 1)
    best = int(bounds.argmax())
    return RoutingReport(
        egress=egress,
        lower_bound=float(bounds[best]),
        certificate=tuple(sorted(order[: best + 1].tolist())),
    )
