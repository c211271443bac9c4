"""Speed-of-light model: the minimum time of a plan on a fabric, and its bottleneck.

The model assumes that all resources work at full rate and overlap from the first to the last byte, so the slowest
resource determines the time. Real runs are slower; report the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.plan.reports import RoutingReport
from tools.plan.topology import Fabric
from windlass.planning.plan import CopyMode, TransferPlan

__all__ = ["CostEstimate", "LinkSummary", "predict", "summarize_links"]

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """Predicted times in seconds.

    Attributes:
        wire_s: time of the slowest resource.
        bottleneck: name of that resource.
        lower_bound_s: minimum time of any routing on this fabric. The ratio to `wire_s` is the possible gain of a
            better routing.
        egress_s, ingress_s: time of the busiest sender and receiver.
        issue_s: time of the sender with the most writes, at `per_write_s` each.
        pack_s: time of the rank that packs or unpacks the most bytes.
    """

    wire_s: float
    bottleneck: str
    lower_bound_s: float
    egress_s: float
    ingress_s: float
    issue_s: float
    pack_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSummary:
    """Statistics of the bytes per link.

    Attributes:
        num_links: number of (source, destination) pairs that exchange bytes.
        min_nbytes, median_nbytes, max_nbytes: statistics over those pairs.
        heaviest: up to five (source, destination, bytes), largest first.
    """

    num_links: int
    min_nbytes: int
    median_nbytes: float
    max_nbytes: int
    heaviest: tuple[tuple[str, str, int], ...]


def summarize_links(plan: TransferPlan) -> LinkSummary:
    """Return statistics of the bytes per link of `plan`."""
    links = plan.links()
    if not links:
        return LinkSummary(num_links=0, min_nbytes=0, median_nbytes=0.0, max_nbytes=0, heaviest=())
    nbytes = np.add.reduceat(plan.ops.nbytes, [link.start for link in links])
    heaviest = np.argsort(-nbytes, kind="stable")[:5].tolist()
    return LinkSummary(
        num_links=len(links),
        min_nbytes=int(nbytes.min()),
        median_nbytes=float(np.median(nbytes)),
        max_nbytes=int(nbytes.max()),
        heaviest=tuple(
            (plan.sources[links[i].src], plan.destinations[links[i].dst], int(nbytes[i]))
            for i in heaviest
        ),
    )


def _per_rank(
    rank: npt.NDArray[np.int32], amount: npt.NDArray[np.int64], num_ranks: int
) -> npt.NDArray[np.int64]:
    total = np.zeros(num_ranks, np.int64)
    np.add.at(total, rank, amount)
    return total


def predict(plan: TransferPlan, fabric: Fabric, routing: RoutingReport) -> CostEstimate:
    """Predict the wire time of one update.

    Args:
        plan: the whole plan.
        fabric: speeds.
        routing: report on the same plan; its bound on senders is part of `lower_bound_s`.
    """
    ops = plan.ops
    num_src, num_dst = len(plan.sources), len(plan.destinations)
    local = np.zeros(len(ops), np.bool_)
    if fabric.colocated:
        local = ops.src // fabric.ranks_per_node == ops.dst // fabric.ranks_per_node
    near, far = np.where(local, ops.nbytes, 0), np.where(local, 0, ops.nbytes)
    writes = ops.nbytes // np.maximum(ops.run_nbytes, 1)
    packs = (ops.mode != CopyMode.DIRECT) * ops.nbytes
    unpacks = (ops.mode == CopyMode.SCATTER) * ops.nbytes
    nic, link = fabric.nic_gbytes_per_s * _GB, fabric.local_gbytes_per_s * _GB
    egress = np.maximum(
        _per_rank(ops.src, far, num_src) / nic, _per_rank(ops.src, near, num_src) / link
    )
    ingress = np.maximum(
        _per_rank(ops.dst, far, num_dst) / nic, _per_rank(ops.dst, near, num_dst) / link
    )
    issue = _per_rank(ops.src, writes, num_src) * fabric.per_write_s
    pack = _per_rank(ops.src, packs, num_src) / (fabric.pack_gbytes_per_s * _GB)
    unpack = _per_rank(ops.dst, unpacks, num_dst) / (fabric.pack_gbytes_per_s * _GB)
    candidates = (
        (f"egress of {plan.sources[int(egress.argmax())]}", float(egress.max())),
        (f"ingress of {plan.destinations[int(ingress.argmax())]}", float(ingress.max())),
        (f"write issue rate of {plan.sources[int(issue.argmax())]}", float(issue.max())),
        (f"pack at {plan.sources[int(pack.argmax())]}", float(pack.max())),
        (f"unpack at {plan.destinations[int(unpack.argmax())]}", float(unpack.max())),
    )
    bottleneck, wire_s = max(candidates, key=lambda candidate: candidate[1])
    # On a colocated fabric another routing could use the faster of the two links.
    rate = max(nic, link) if fabric.colocated else nic
    needed = float(_per_rank(ops.dst, ops.nbytes, num_dst).max())
    return CostEstimate(
        wire_s=wire_s,
        bottleneck=bottleneck,
        lower_bound_s=max(routing.lower_bound, needed) / rate,
        egress_s=float(egress.max()),
        ingress_s=float(ingress.max()),
        issue_s=float(issue.max()),
        pack_s=max(float(pack.max()), float(unpack.max())),
    )
