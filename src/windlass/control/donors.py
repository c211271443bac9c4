"""Choice of the engine that brings up another engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from windlass.control.fleet import Group
from windlass.errors import PlanError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import DTYPES, TransferPlan
from windlass.planning.planner import Planner


def find_donor(
    newcomer: Group,
    candidates: Sequence[Group],
    trainers: Sequence[ShardManifest],
    planner: Planner,
) -> tuple[Group, TransferPlan] | None:
    """Return the first engine that gives the newcomer the same bytes as the trainers would, and the plan.

    Planning a large model takes seconds.

    Args:
        newcomer: the engine to bring up.
        candidates: engines that serve the published version.
        trainers: manifests of the trainer ranks; empty if none is connected.
        planner: compiles plans.
    """
    for donor in candidates:
        if not all(agent.hello.can_send for agent in donor.agents.values()):
            continue
        try:
            plan = planner(donor.manifests, newcomer.manifests)
        except PlanError:
            # The newcomer needs a tensor that this engine does not have.
            continue
        if _is_exact(plan, trainers):
            return donor, plan
    return None


def _is_exact(plan: TransferPlan, trainers: Sequence[ShardManifest]) -> bool:
    """Return whether a copy by this plan gives the same bytes as a transfer from the trainers.

    A cast from the trainers' dtype rounds once, as in a transfer from the trainers. Any other cast would round weights
    that were already rounded when the donor got them.
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
