"""Replicas share the work, and the certificate proves the bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.plan.reports import certify, plan_with_reports
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import PlanPolicy, plan_transfer
from windlass.planning.routing import group_by_holders, pour

Groups = list[tuple[float, tuple[int, ...]]]


@st.composite
def groups_of(draw: st.DrawFn, num_sources: int = 5) -> Groups:
    holders = st.sets(st.integers(0, num_sources - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    return draw(st.lists(st.tuples(st.integers(1, 1000).map(float), holders), min_size=1))


def best_possible(groups: Groups, num_sources: int) -> float:
    """Return the optimum by max-flow duality: the largest forced load over all sets of senders."""
    best = 0.0
    for size in range(1, num_sources + 1):
        for chosen in itertools.combinations(range(num_sources), size):
            forced = sum(nbytes for nbytes, holders in groups if set(holders) <= set(chosen))
            best = max(best, forced / size)
    return best


@settings(max_examples=150, deadline=None)
@given(groups_of())
def test_pour_reaches_the_optimum_and_conserves_bytes(groups: Groups) -> None:
    nbytes = np.array([n for n, _ in groups])
    holders = [h for _, h in groups]
    load = np.zeros(5)
    for total, of_group, share in zip(nbytes, holders, pour(nbytes, holders, 5), strict=True):
        assert (share >= 0).all()
        assert share.sum() == pytest.approx(total)
        load[list(of_group)] += share
    assert load.max() <= best_possible(groups, 5) * 1.01


@settings(max_examples=150, deadline=None)
@given(groups_of())
def test_the_certificate_is_a_tight_lower_bound(groups: Groups) -> None:
    holders = [h for _, h in groups]
    nbytes = np.array([n for n, _ in groups], np.int64)
    load = np.zeros(5)
    for of_group, share in zip(holders, pour(nbytes.astype(np.float64), holders, 5), strict=True):
        load[list(of_group)] += share
    report = certify(np.rint(load).astype(np.int64), nbytes, holders)
    forced = sum(n for n, h in groups if set(h) <= set(report.certificate))
    assert report.lower_bound == pytest.approx(forced / len(report.certificate))
    assert report.lower_bound <= best_possible(groups, 5) * (1 + 1e-9)
    assert report.lower_bound >= best_possible(groups, 5) * 0.98 - 1


def test_identical_holder_sets_are_one_group() -> None:
    ranks = np.array([0, 0, 1, 1, 0, 1, 2], np.int32)
    group, holders = group_by_holders(ranks, np.array([0, 1, 3, 4, 6, 7]))
    assert [holders[g] for g in group] == [(0,), (0, 1), (1,), (0, 1), (2,)]
    assert len(holders) == 4


def side(worker: str, role: Role, tensors: dict[str, int]) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for name, rows in tensors.items():
        builder.add_parameter(name, nbytes=rows * 1024, dtype=DType.FLOAT32)
        builder.add_shard(name, (rows, 256), Box.full((rows, 256)), name)
    return builder.build()


def test_one_large_replicated_tensor_is_split_over_its_holders() -> None:
    sources = [side(f"t{i}", Role.TRAINER, {"w": 1200}) for i in range(3)]
    planned = plan_with_reports(sources, [side("e", Role.ENGINE, {"w": 1200})])
    assert planned.routing.egress.tolist() == [400 * 1024] * 3
    assert planned.routing.imbalance == 1.0
    whole = plan_with_reports(
        sources, [side("e", Role.ENGINE, {"w": 1200})], PlanPolicy(min_split_bytes=1 << 30)
    )
    assert sorted(whole.routing.egress.tolist()) == [0, 0, 1200 * 1024]


def test_a_rank_with_exclusive_work_leaves_shared_work_to_other_ranks() -> None:
    sources = [
        side("busy", Role.TRAINER, {"own": 3000, "shared": 2000}),
        side("idle", Role.TRAINER, {"shared": 2000}),
    ]
    wanted = side("e", Role.ENGINE, {"own": 3000, "shared": 2000})
    routing = plan_with_reports(sources, [wanted]).routing
    assert routing.egress.tolist() == [3000 * 1024, 2000 * 1024]
    assert routing.certificate == (0,)
    assert routing.imbalance == 1.0


def test_replicas_each_serve_a_share_of_the_destinations() -> None:
    sources = [side(f"t{i}", Role.TRAINER, {"w": 600}) for i in range(2)]
    wanted = [side(f"e{i}", Role.ENGINE, {"w": 600}) for i in range(6)]
    planned = plan_with_reports(sources, wanted)
    assert planned.routing.egress.tolist() == [1800 * 1024] * 2
    assert [(link.src, link.dst) for link in planned.plan.links()] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 3),
        (1, 4),
        (1, 5),
    ]


@pytest.mark.parametrize(("shards", "copies"), [(4, 1), (2, 4), (3, 3)])
def test_plans_for_single_engines_load_trainers_as_evenly_as_one_plan(
    shards: int, copies: int
) -> None:
    """Engines that join one after another are bound by such plans."""
    shapes = {
        f"{i}.{n}": s for i in range(6) for n, s in (("q", (4096, 2048)), ("d", (2048, 6144)))
    }
    cut = [(rank // shards, rank % shards) for rank in range(shards * copies)]

    def held(worker: str, role: Role, dim: int, parts: int, index: int) -> ShardManifest:
        builder = ManifestBuilder(worker, role)
        for name, shape in shapes.items():
            size = -(-shape[dim] // parts)
            offsets, sizes = [0, 0], list(shape)
            offsets[dim] = min(index * size, shape[dim])
            sizes[dim] = min(size, shape[dim] - offsets[dim])
            box = Box(tuple(offsets), tuple(sizes))
            builder.add_parameter(name, nbytes=box.numel * 2, dtype=DType.BFLOAT16)
            builder.add_shard(name, shape, box, name)
        return builder.build()

    trainers = [
        held(f"trainer/{rank}", Role.TRAINER, 0, shards, index)
        for rank, (_, index) in enumerate(cut)
    ]
    engines = [
        [held(f"{name}/{rank}", Role.ENGINE, 1, ranks, rank) for rank in range(ranks)]
        for name, ranks in zip("abcdefgh", (1, 2, 4, 2, 1, 2, 4, 2), strict=True)
    ]

    def load(destinations: list[ShardManifest]) -> np.ndarray:
        ops = plan_transfer(trainers, destinations).ops
        return np.bincount(ops.src, ops.nbytes, len(trainers))

    together = load([manifest for engine in engines for manifest in engine])
    assert np.sum([load(engine) for engine in engines], axis=0).max() <= together.max() * 1.01
