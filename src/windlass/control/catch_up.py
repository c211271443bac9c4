"""Which engine can give a newcomer the published version. No I/O.

A trainer stands still only while it publishes; an engine that serves a version stands still
until the next one. So a newcomer is brought up from a peer, by a round like any other whose
sources are that engine's ranks: nobody else is paused, and no trainer is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from windlass.control.binding import Planner
from windlass.control.fleet import Group
from windlass.errors import PlanError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import DTYPES, TransferPlan

__all__ = ["find_donor"]


def find_donor(
    newcomer: Group,
    candidates: Sequence[Group],
    trainers: Sequence[ShardManifest],
    planner: Planner,
) -> tuple[Group, TransferPlan] | None:
    """The first engine whose weights make the newcomer exactly what the trainers would.

    Args:
        newcomer: wants weights.
        candidates: engines that serve the published version.
        trainers: manifests of the trainer ranks; empty when none is connected.
        planner: compiles plans. May take seconds with a large model.

    Returns:
        The donor and the plan, or None when nobody can.
    """
    for donor in candidates:
        if not all(agent.hello.can_send for agent in donor.agents.values()):
            continue
        try:
            plan = planner(donor.manifests, newcomer.manifests)
        except PlanError:
            continue  # it holds something that this engine does not
        if _is_exact(plan, trainers):
            return donor, plan
    return None


def _is_exact(plan: TransferPlan, trainers: Sequence[ShardManifest]) -> bool:
    """Whether no element is rounded on its way that was not rounded by the trainers' own plan.

    A cast of what has the trainers' dtype rounds once, as theirs does; any other cast would come
    on top of the one that the donor's weights have been through.
    """
    casts = np.flatnonzero(plan.ops.src_dtype != plan.ops.dst_dtype)
    if not len(casts):
        return True
    names = {plan.tensors[int(t)] for t in np.unique(plan.ops.tensor[casts])}
    have = {
        (plan.tensors[int(plan.ops.tensor[op])], DTYPES[int(plan.ops.src_dtype[op])])
        for op in casts
    }
    return have <= _dtypes_of(trainers, names)


def _dtypes_of(
    manifests: Sequence[ShardManifest], names: Collection[str]
) -> set[tuple[str, DType]]:
    found: set[tuple[str, DType]] = set()
    for manifest in manifests:
        dtypes = {parameter.name: parameter.dtype for parameter in manifest.parameters}
        found.update(
            (shard.tensor, dtypes[shard.parameter])
            for shard in manifest.shards()
            if shard.tensor in names
        )
    return found
