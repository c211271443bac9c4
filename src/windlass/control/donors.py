"""Chooses the donor of a catch-up: the engine that sends its weights to an engine with an older version or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from windlass.control.fleet import Group
from windlass.errors import PlanError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import DTYPES, TransferPlan
from windlass.planning.planner import Planner

_HALF_NBYTES = 2
"""Size of a value in the 16-bit dtypes to which engines round."""


def find_donor(
    newcomer: Group,
    candidates: Sequence[Group],
    trainers: Sequence[ShardManifest],
    planner: Planner,
) -> tuple[Group, TransferPlan]:
    """Find an engine that can send the newcomer the same bytes as the trainers would.

    The call blocks for seconds if the model is large, because it compiles a plan for each candidate.

    Args:
        newcomer: the engine that receives.
        candidates: engines that serve the published version, in order of preference.
        trainers: manifests of the trainer ranks that published the version; empty if they are not known.
        planner: compiles plans.

    Returns:
        The first suitable engine, and the plan of the copy.

    Raises:
        PlanError: no candidate is suitable; the message has a reason for each.
    """
    reasons: list[str] = []
    for donor in candidates:
        if not all(agent.hello.can_send for agent in donor.agents.values()):
            reasons.append(f"{donor.name} cannot send its weights")
            continue
        own = tensors_to_keep(donor, newcomer.manifests)
        try:
            plan = planner(donor.manifests, [m.without(own) for m in newcomer.manifests])
        # This engine cannot fill a tensor of the newcomer.
        except PlanError as error:
            reasons.append(f"{donor.name}: {error}")
            continue
        if _is_exact(plan, trainers, donor.rounded, newcomer.rounded):
            return donor, plan
        reasons.append(f"{donor.name} has rounded values, or values of another dtype")
    raise PlanError("; ".join(reasons))


def tensors_to_keep(donor: Group, newcomer: Sequence[ShardManifest]) -> frozenset[str]:
    """Return the tensors of a newcomer that a catch-up must not write.

    They are the tensors that no update has written in the donor (`Group.unwritten`). Both engines have loaded them from
    their checkpoints, so the newcomer keeps its own values. If any version has written a tensor, the catch-up copies it,
    even if the present trainers do not have it.

    A tied tensor has several names. The donor and the newcomer may use different names for it; the result contains the
    newcomer's name.

    Args:
        donor: engine that sends.
        newcomer: manifests of the ranks that receive.
    """
    unwritten = donor.unwritten
    kept = {
        *unwritten,
        *(alias for m in donor.manifests for alias, of in m.aliases.items() if of in unwritten),
    }
    own = {spec.name for manifest in newcomer for spec in manifest.tensors}
    kept |= {of for manifest in newcomer for alias, of in manifest.aliases.items() if alias in kept}
    return frozenset(kept & own)


def _is_exact(
    plan: TransferPlan,
    trainers: Sequence[ShardManifest],
    sent: Mapping[str, DType],
    received: Mapping[str, DType],
) -> bool:
    """Return whether a copy from the donor by this plan gives the same bytes as a transfer from the trainers.

    The bytes of a tensor are the same in each of these cases:

    - Both engines store the tensor in the same dtype, and the donor does not round its values.
    - Both engines store the tensor in the same dtype, and round its values to the same dtype.
    - The donor has the trainers' own values, because a trainer has the tensor in the donor's precision. The precision is the
      dtype to which the donor rounds, or the dtype of its parameter if it does not round. The copy then rounds each value
      once, as a transfer from the trainers does.

    Args:
        plan: plan from the donor's ranks to the newcomer's.
        trainers: manifests of the trainer ranks that published the version. If they are not known, the third case does
            not apply.
        sent: tensor -> dtype to which the donor rounds its values, see `Hello.rounded`.
        received: tensor -> dtype to which the newcomer rounds its values.
    """
    ops = plan.ops
    rounded = [index for index, name in enumerate(plan.tensors) if name in sent]
    asked = np.flatnonzero((ops.src_dtype != ops.dst_dtype) | np.isin(ops.tensor, rounded))
    columns = (ops.tensor[asked], ops.src_dtype[asked], ops.dst_dtype[asked])
    have: set[tuple[str, DType]] = set()
    for tensor, src, dst in np.unique(np.stack(columns, 1), axis=0).tolist():
        name, stored = plan.tensors[tensor], DTYPES[src]
        # A parameter of 16 bits has the dtype of the checkpoint, so nothing rounds its values.
        precision = sent.get(name) if stored.itemsize > _HALF_NBYTES else None
        if stored is not DTYPES[dst] or precision not in (None, received.get(name)):
            have.add((name, precision or stored))
    return have <= _dtypes_of(trainers, {name for name, _ in have})


def _dtypes_of(
    manifests: Sequence[ShardManifest], names: Collection[str]
) -> set[tuple[str, DType]]:
    """Return (tensor, dtype) for each tensor in `names` and each dtype that it has in `manifests`."""
    found: set[tuple[str, DType]] = set()
    for manifest in manifests:
        dtypes = {parameter.name: parameter.dtype for parameter in manifest.parameters}
        found.update(
            (shard.tensor, dtypes[shard.parameter])
            for shard in manifest.shards()
            if shard.tensor in names
        )
    return found
