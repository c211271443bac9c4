"""Discrete-event simulation of the wire phase: it runs each link of a real plan on a modelled fabric.

Sources write their links as in `transfer/sender.py`: a fixed number in parallel, in the order of the destinations'
names, and each source starts with a different destination. Active links share resources by max-min fairness
(progressive filling, as in Bertsekas and Gallager, "Data Networks", section 6.5), which is close to the per-queue-pair
arbitration of NICs and switches. An event is the end of a link. Then the source starts its next link, and the
simulation computes all shares again.

The resources of a link are the egress and ingress of a NIC (shared if a host has fewer NICs than ranks), the spine if
its two NICs are on different rails, the local link of its ranks, the write queue of its source (`per_write_s` per
write) and the pack kernels of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.plan.topology import Fabric
from windlass.errors import ConfigError
from windlass.planning.order import staggered
from windlass.planning.plan import CopyMode, TransferPlan
from windlass.transfer.base import LINKS_AT_ONCE

__all__ = ["LoadSummary", "SimulatedWire", "simulate_wire"]

_GB = 1e9
_SAME_MOMENT = 1e-5
"""Events closer than this fraction of the busiest resource's time are one event."""

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Load of one kind of resource during the wire phase, as fractions of its capacity.

    Attributes:
        kind: `NIC egress`, `NIC ingress`, `local egress`, `local ingress`, `spine egress`,
            `spine ingress`, `write issue`, `pack` or `unpack`.
        num_used: number of resources of that kind that at least one link uses.
        max, mean: load over those resources.
    """

    kind: str
    num_used: int
    max: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWire:
    """Result of a simulation. Times are in seconds from the first byte.

    Attributes:
        wire_s: end of the last link.
        link_finish_s: (num_links,) end of each link, in plan order.
        link_nbytes: (num_links,) bytes of each link.
        destination_finish_s: (num_destinations,) time at which each destination has all of its bytes.
        loads: load of each kind of resource in use.
        num_events: number of times that the shares were computed.
    """

    wire_s: float
    link_finish_s: Float64Array
    link_nbytes: Int64Array
    destination_finish_s: Float64Array
    loads: tuple[LoadSummary, ...]
    num_events: int

    def percentile_s(self, percent: float) -> float:
        """Return the time by which `percent` of the links have ended."""
        return float(np.percentile(self.link_finish_s, percent)) if len(self.link_finish_s) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flows:
    """One row per link.

    Attributes:
        src, dst: (n,) ranks. nbytes: (n,).
        resource: (n, k) index of each resource of the link.
        cost: (n, k) seconds of that resource per byte; 0 if the link does not use it.
        kinds: name of each column. bounds: (k + 1,) index of the first resource of each column.
    """

    src: Int64Array
    dst: Int64Array
    nbytes: Float64Array
    resource: Int64Array
    cost: Float64Array
    kinds: tuple[str, ...]
    bounds: Int64Array


def simulate_wire(
    plan: TransferPlan,
    fabric: Fabric,
    *,
    links_at_once: int = LINKS_AT_ONCE,
    stagger: bool = True,
) -> SimulatedWire:
    """Simulate the wire phase of `plan` on `fabric`.

    Args:
        plan: the whole plan.
        fabric: speeds and placement of ranks.
        links_at_once: number of links that a source writes in parallel.
        stagger: whether each source starts with a different destination. Otherwise all start with the first.

    Raises:
        ConfigError: `links_at_once` < 1.
    """
    if links_at_once < 1:
        raise ConfigError(f"simulate_wire: links_at_once must be >= 1, got {links_at_once}")
    flows = _flows_of(plan, fabric)
    queues = _queues(plan, flows, stagger)
    finish, num_events = _run(flows, queues, links_at_once)
    by_destination = np.zeros(len(plan.destinations))
    np.maximum.at(by_destination, flows.dst, finish)
    wire_s = float(finish.max(initial=0.0))
    return SimulatedWire(
        wire_s=wire_s,
        link_finish_s=finish,
        link_nbytes=flows.nbytes.astype(np.int64),
        destination_finish_s=by_destination,
        loads=_loads(flows, wire_s),
        num_events=num_events,
    )


# --- resources of links --------------------------------------------------------------------------


def _flows_of(plan: TransferPlan, fabric: Fabric) -> _Flows:
    ops, links = plan.ops, plan.links()
    src = np.array([link.src for link in links], np.int64)
    dst = np.array([link.dst for link in links], np.int64)
    starts = np.array([link.start for link in links], np.int64)
    writes = ops.nbytes // np.maximum(ops.run_nbytes, 1)
    packed = (ops.mode != CopyMode.DIRECT) * ops.nbytes
    landed = (ops.mode == CopyMode.SCATTER) * ops.nbytes
    nbytes, num_writes, num_packed, num_landed = (
        np.add.reduceat(column, starts).astype(np.float64) if links else np.zeros(0)
        for column in (ops.nbytes, writes, packed, landed)
    )
    total = np.maximum(nbytes, 1.0)
    num_src, num_dst = len(plan.sources), len(plan.destinations)
    per_node = fabric.ranks_per_node
    nics = fabric.nics_per_node or per_node
    local = (src // per_node == dst // per_node) & fabric.colocated
    far = np.where(local, 0.0, 1.0)
    # With more NICs than ranks, one rank gets the rate of several. Ranks that share a NIC are slower only if they
    # send at the same time.
    rate = fabric.nic_gbytes_per_s * _GB * max(1.0, nics / per_node)
    src_nic, dst_nic = _nic_of(src, per_node, nics), _nic_of(dst, per_node, nics)
    src_node, dst_node = src // per_node, dst // per_node
    crosses = (src_nic % nics != dst_nic % nics) * far
    spine_rate = fabric.nic_gbytes_per_s * _GB * nics / fabric.spine_oversubscription
    columns: list[tuple[str, Int64Array, Float64Array, int]] = [
        ("NIC egress", src_nic, far / rate, (num_src // per_node + 1) * nics),
        ("NIC ingress", dst_nic, far / rate, (num_dst // per_node + 1) * nics),
        ("local egress", src, (1 - far) / (fabric.local_gbytes_per_s * _GB), num_src),
        ("local ingress", dst, (1 - far) / (fabric.local_gbytes_per_s * _GB), num_dst),
        ("spine egress", src_node, crosses / spine_rate, num_src // per_node + 1),
        ("spine ingress", dst_node, crosses / spine_rate, num_dst // per_node + 1),
        ("write issue", src, num_writes / total * fabric.per_write_s, num_src),
        ("pack", src, num_packed / total / (fabric.pack_gbytes_per_s * _GB), num_src),
        ("unpack", dst, num_landed / total / (fabric.pack_gbytes_per_s * _GB), num_dst),
    ]
    if fabric.spine_oversubscription <= 1:
        columns = [c for c in columns if not c[0].startswith("spine")]  # full only after the NICs
    columns = [column for column in columns if column[2].any()] or columns[:1]
    bounds = np.cumsum([0, *(column[3] for column in columns)])
    return _Flows(
        src=src,
        dst=dst,
        nbytes=nbytes,
        resource=np.stack([c[1] + b for c, b in zip(columns, bounds[:-1], strict=True)], axis=1),
        cost=np.stack([column[2] for column in columns], axis=1),
        kinds=tuple(column[0] for column in columns),
        bounds=bounds,
    )


def _nic_of(rank: Int64Array, per_node: int, nics: int) -> Int64Array:
    """Return the NIC of each rank: a host's NICs are assigned to ranks in blocks, or one per rank if there are enough."""
    place = rank % per_node
    return rank // per_node * nics + (place * nics // per_node)


def _queues(plan: TransferPlan, flows: _Flows, stagger: bool) -> list[list[int]]:
    """Return the links of each source in their start order, which is the order of a real round if `stagger` is set."""
    links: dict[str, dict[str, int]] = {source: {} for source in plan.sources}
    for link, (src, dst) in enumerate(zip(flows.src.tolist(), flows.dst.tolist(), strict=True)):
        links[plan.sources[src]][plan.destinations[dst]] = link
    orders = staggered(links) if stagger else {source: sorted(links[source]) for source in links}
    return [[links[source][name] for name in orders[source]] for source in plan.sources]


# --- events ------------------------------------------------------------------------------------------


def _run(flows: _Flows, queues: list[list[int]], links_at_once: int) -> tuple[Float64Array, int]:
    """Return the end of each link and the number of events."""
    finish = np.zeros(len(flows.nbytes))
    remaining = flows.nbytes.copy()
    waiting = [list(reversed(queue)) for queue in queues]
    active = np.array(
        [queue.pop() for queue in waiting for _ in range(min(links_at_once, len(queue)))], np.int64
    )
    num_resources = int(flows.bounds[-1])
    busiest = float(
        np.bincount(
            flows.resource.ravel(), (flows.cost * flows.nbytes[:, None]).ravel(), num_resources
        ).max(initial=0.0)
    )
    now, num_events = 0.0, 0
    while len(active):
        rates = _max_min(flows.resource[active], flows.cost[active], num_resources)
        left_s = remaining[active] / rates
        step = float(left_s.min())
        ends = left_s <= step + busiest * _SAME_MOMENT
        finish[active[ends]] = now + left_s[ends]
        now += step
        num_events += 1
        remaining[active] -= rates * step
        begun = [waiting[s].pop() for s in flows.src[active[ends]].tolist() if waiting[s]]
        active = np.concatenate([active[~ends], np.array(begun, np.int64)])
    return finish, num_events


def _max_min(resource: Int64Array, cost: Float64Array, num_resources: int) -> Float64Array:
    """Return rates in bytes per second. All rates grow together; a rate stops when one of its resources is full."""
    rate = np.zeros(len(resource))
    rising = np.arange(len(resource))
    spare = np.ones(num_resources)
    level = 0.0
    while len(rising):
        of_rising, price = resource[rising], cost[rising]
        demand = np.bincount(of_rising.ravel(), price.ravel(), num_resources)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(demand > 0, spare / demand, np.inf)
        step = float(room.min())
        level += step
        rate[rising] = level
        spare = np.maximum(spare - demand * step, 0.0)
        full = room <= step * (1 + 1e-9) + level * 1e-9
        stopped = (full[of_rising] & (price > 0)).any(axis=1)
        rising = rising[~stopped]
    return rate


def _loads(flows: _Flows, wire_s: float) -> tuple[LoadSummary, ...]:
    found = []
    for column, kind in enumerate(flows.kinds):
        first, stop = int(flows.bounds[column]), int(flows.bounds[column + 1])
        busy_s = np.bincount(
            flows.resource[:, column] - first, flows.cost[:, column] * flows.nbytes, stop - first
        )
        used = busy_s[busy_s > 0] / wire_s if wire_s else busy_s[:0]
        if len(used):
            found.append(
                LoadSummary(
                    kind=kind, num_used=len(used), max=float(used.max()), mean=float(used.mean())
                )
            )
    return tuple(found)
