"""Routing: choose the source rank of every piece, so that replicated sources share the work.

All bytes with the same set of holders form a *group*. The bytes of each group are divided among its
holders so that the holders' loads, including their loads from other groups, become as equal as
possible (water filling). This is repeated, group after group, until the loads no longer change. The
result is the most even distribution possible (the least majorised load vector), so the largest load is
minimal. The distribution gives each holder of a group a quota of bytes. The ops of a group are assigned
to its holders in order, until each quota is full. A large op that crosses the end of a quota is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.layout.columns import Columns, Int32Array, Int64Array, column

Float64Array = npt.NDArray[np.float64]

_MAX_SWEEPS = 500
"""Maximum number of times that the bytes of all groups are divided again."""
_TOLERANCE = 1e-5
"""Change of the loads in one sweep, as a fraction of the largest load, at which the division is good enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(Columns):
    """Ops after routing; a split op has one row per part.

    Attributes:
        op: (m,) index of the op before routing.
        rank: (m,) source rank that sends the part.
        begin, end: (m,) slice of the op's `units`.
    """

    op: Int64Array = column("<i8")
    rank: Int64Array = column("<i8")
    begin: Int64Array = column("<i8")
    end: Int64Array = column("<i8")


def group_by_holders(
    ranks: Int32Array, start: Int64Array
) -> tuple[Int64Array, list[tuple[int, ...]]]:
    """Group the atoms that have the same holders.

    Args:
        ranks: ranks that hold atom 0, then the ranks that hold atom 1, and so on. The ranks of an atom are ascending.
        start: (num_atoms + 1,) position of each atom's first rank in `ranks`.

    Returns:
        (group per atom, holders per group)
    """
    count = start[1:] - start[:-1]
    single = count == 1
    group = np.zeros(len(count), np.int64)
    holders: list[tuple[int, ...]] = []
    alone, inverse = np.unique(ranks[start[:-1][single]], return_inverse=True)
    group[single] = inverse
    holders.extend((int(rank),) for rank in alone)
    seen: dict[bytes, int] = {}
    for atom in np.flatnonzero(~single).tolist():
        of_atom = ranks[start[atom] : start[atom + 1]]
        key = of_atom.tobytes()
        known = seen.get(key)
        if known is None:
            known = seen[key] = len(holders)
            holders.append(tuple(of_atom.tolist()))
        group[atom] = known
    return group, holders


def pour(
    nbytes: Float64Array, holders: Sequence[tuple[int, ...]], num_sources: int
) -> list[Float64Array]:
    """Divide each group's bytes among its holders, so that the loads of all ranks are as even as possible.

    Args:
        nbytes: (num_groups,) bytes of each group.
        holders: ranks of each group, from `group_by_holders`.
        num_sources: number of source ranks.

    Returns:
        Per group: bytes per holder, in the order of `holders`.
    """
    load = np.zeros(num_sources)
    shares: list[Float64Array] = []
    indices = [np.array(of_group, np.int64) for of_group in holders]
    for index, total in zip(indices, nbytes, strict=True):
        share = np.full(len(index), total / len(index))
        load[index] += share
        shares.append(share)
    several = [g for g in range(len(holders)) if len(holders[g]) > 1 and nbytes[g] > 0]
    scale = float(load.max(initial=0.0)) * _TOLERANCE
    for _ in range(_MAX_SWEEPS):
        moved = 0.0
        for g in several:
            ground = load[indices[g]] - shares[g]
            share = _divide_evenly(ground, float(nbytes[g]))
            moved = max(moved, float(np.abs(share - shares[g]).max()))
            load[indices[g]] = ground + share
            shares[g] = share
        if moved <= scale:
            break
    return shares


def _divide_evenly(ground: Float64Array, total: float) -> Float64Array:
    """Divide `total` bytes among n ranks so that their loads become as equal as possible. Return each rank's bytes.

    `ground`, (n,), has the loads of the ranks without these bytes.
    """
    ordered = np.sort(ground)
    below = np.cumsum(ordered)
    counts = np.arange(1, len(ordered) + 1)
    levels = (total + below) / counts
    wet = int(np.flatnonzero(levels > ordered)[-1]) if total > 0 else 0
    depth: Float64Array = np.maximum(levels[wet] - ground, 0.0)
    return depth


def assign(
    group: Int64Array,
    nbytes: Int64Array,
    units: Int64Array,
    holders: Sequence[tuple[int, ...]],
    shares: Sequence[Float64Array],
    min_split_bytes: int,
) -> Assignment:
    """Assign the ops of each group, in the given order, to the group's holders.

    Args:
        group: (n,) group of each op.
        nbytes: (n,) size of each op.
        units: (n,) number of equal slices into which each op may be cut.
        holders: ranks of each group.
        shares: for each group, the number of bytes that each of its holders should send; results of `pour`.
        min_split_bytes: size of the smallest op that may be cut. A smaller op goes to one holder: the holder that should
            send the op's middle byte according to `shares`.

    Returns:
        One row per op, or per part of an op that was cut, with the rank that sends it.
    """
    rank = np.array([of_group[0] for of_group in holders] or [0], np.int64)[group]
    begin, end = np.zeros(len(group), np.int64), units.copy()
    extra: list[tuple[int, int, int, int]] = []
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(holders) + 1))
    for g, of_group in enumerate(holders):
        rows = order[bounds[g] : bounds[g + 1]]
        if len(of_group) == 1 or len(rows) == 0:
            continue
        ranks = np.array(of_group, np.int64)
        stop = np.cumsum(nbytes[rows])
        quota = np.cumsum(shares[g])[:-1]
        middle = stop - nbytes[rows] / 2
        rank[rows] = ranks[np.searchsorted(quota, middle)]
        first = np.searchsorted(quota, stop - nbytes[rows], side="right")
        last = np.searchsorted(quota, stop, side="left")
        split = (last > first) & (nbytes[rows] >= min_split_bytes) & (units[rows] > 1)
        for i in np.flatnonzero(split).tolist():
            row = int(rows[i])
            per_unit = nbytes[row] / units[row]
            inside = quota[first[i] : last[i]] - (stop[i] - nbytes[row])
            cuts = np.rint(inside / per_unit).astype(np.int64).tolist()
            edges = [0, *cuts, int(units[row])]
            parts = [
                (row, int(ranks[first[i] + part]), edges[part], edges[part + 1])
                for part in range(len(edges) - 1)
                if edges[part + 1] > edges[part]
            ]
            _, rank[row], begin[row], end[row] = parts[0]
            extra.extend(parts[1:])
    names = ("op", "rank", "begin", "end")
    split_off = dict(zip(names, np.array(extra, np.int64).reshape(-1, 4).T, strict=True))
    whole = Assignment(op=np.arange(len(group)), rank=rank, begin=begin, end=end)
    return Assignment.join([whole, Assignment(**split_off)])
