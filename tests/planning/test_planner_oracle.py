"""Plans between any two meshes are executed; every destination byte is compared with the manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from ground_truth import distinct_values, fill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_executor import execute
from strategies import Fleet, Placement, fleets, placements

from windlass.errors import ManifestError, TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.planning.plan import CopyMode, OpTable, TransferPlan
from windlass.planning.planner import PlanPolicy, plan_transfer

POLICIES = (
    PlanPolicy(),
    PlanPolicy(direct_min_run_bytes=8, min_split_bytes=4, staging_alignment=1),
    PlanPolicy(direct_min_run_bytes=1),
)


def differences(fleet: Fleet, plan: TransferPlan) -> list[str]:
    """Run `plan` and compare every destination byte with the ground truth."""
    values = distinct_values((*fleet.sources, *fleet.destinations))
    values |= {a: values[t] for m in fleet.sources for a, t in m.aliases.items()}
    sources = {m.worker: fill(m, values, background=0xEE) for m in fleet.sources}
    buffers = {
        m.worker: [np.full(p.nbytes, 0xAA, np.uint8) for p in m.parameters]
        for m in fleet.destinations
    }
    try:
        counts = execute(plan, sources, buffers)
    except TransferFailed as error:
        return [str(error)]
    problems = []
    for manifest in fleet.destinations:
        expected = fill(manifest, values, background=0xAA)
        ones = {name: np.full_like(array, 0x01010101) for name, array in values.items()}
        expected_counts = fill(manifest, ones, background=0)
        for index, parameter in enumerate(manifest.parameters):
            where = f"{manifest.worker} {parameter.name}"
            if (buffers[manifest.worker][index] != expected[index]).any():
                problems.append(f"{where}: wrong bytes")
            if (counts[manifest.worker][index] != expected_counts[index]).any():
                problems.append(f"{where}: not written exactly once")
    return problems


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fleet=fleets(), policy=st.sampled_from(POLICIES))
def test_every_destination_byte_gets_the_right_element_once(
    fleet: Fleet, policy: PlanPolicy
) -> None:
    plan = plan_transfer(fleet.sources, fleet.destinations, policy)
    assert differences(fleet, plan) == []


# The same test with many more examples.
@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fleet=fleets(), policy=st.sampled_from(POLICIES))
def test_every_destination_byte_of_many_fleets_gets_the_right_element_once(
    fleet: Fleet, policy: PlanPolicy
) -> None:
    plan = plan_transfer(fleet.sources, fleet.destinations, policy)
    assert differences(fleet, plan) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fleet=fleets())
def test_the_parts_of_all_ranks_are_the_plan(fleet: Fleet) -> None:
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assert TransferPlan.decode(plan.encode()).digest() == plan.digest()
    assert plan_transfer(fleet.sources, fleet.destinations).digest() == plan.digest()
    assert sum(
        len(plan.parts(sending=True, all_names=True)[worker].ops) for worker in plan.sources
    ) == len(plan.ops)
    assert sum(link.stop - link.start for link in plan.links()) == len(plan.ops)
    assert plan.nbytes == sum(manifest.nbytes for manifest in fleet.destinations)


def fused_fleet() -> Fleet:
    """Return a fleet with `q` and `k` in row halves and `o` in column halves, for fused, strided
    parameters.

    Each half is on two trainer ranks.
    """
    sources = []
    for rank in range(4):
        builder = ManifestBuilder(f"trainer/{rank}", Role.TRAINER)
        half = rank % 2
        for name in ("q", "k"):
            builder.add_parameter(name, nbytes=3 * 8 * 4, dtype=DType.FLOAT32)
            builder.add_shard(name, (6, 8), Box((half * 3, 0), (3, 8)), name)
        builder.add_parameter("o", nbytes=5 * 4 * 4, dtype=DType.FLOAT32)
        builder.add_shard("o", (5, 8), Box((0, half * 4), (5, 4)), "o")
        sources.append(builder.build())
    destinations = []
    for rank in range(2):
        builder = ManifestBuilder(f"engine/{rank}", Role.ENGINE)
        builder.add_parameter("qk", nbytes=2 * 6 * 4 * 4, dtype=DType.FLOAT32)
        # Rows of q and k are interleaved; each engine rank has half of the columns.
        for place, name in enumerate(("q", "k")):
            builder.add_shard(
                name,
                (6, 8),
                Box((0, rank * 4), (6, 4)),
                "qk",
                offset_bytes=place * 16,
                strides_bytes=(32, 4),
            )
        builder.add_parameter("o", nbytes=5 * 8 * 4 + 32, dtype=DType.FLOAT32, padding_nbytes=32)
        builder.add_shard("o", (5, 8), Box((0, 0), (5, 8)), "o", strides_bytes=(4, 20))
        destinations.append(builder.build())
    return Fleet(tuple(sources), tuple(destinations))


def _shift(column: str, amount: int) -> Callable[[OpTable, int], OpTable]:
    def mutate(ops: OpTable, op: int) -> OpTable:
        values = getattr(ops, column).copy()
        values[op] += amount
        return replace(ops, **{column: values})

    return mutate


def _shift_inner(column: str, amount: int) -> Callable[[OpTable, int], OpTable]:
    def mutate(ops: OpTable, op: int) -> OpTable:
        values = getattr(ops, column).copy()
        values[op, -1] += amount
        return replace(ops, **{column: values})

    return mutate


def _drop(ops: OpTable, op: int) -> OpTable:
    return ops.select(np.delete(np.arange(len(ops)), op))


def _double(ops: OpTable, op: int) -> OpTable:
    return ops.select(np.append(np.arange(len(ops)), op))


def _shrink(ops: OpTable, op: int) -> OpTable:
    sizes, nbytes = ops.sizes.copy(), ops.nbytes.copy()
    sizes[op, -1] -= 1
    nbytes[op] = sizes[op].prod() * 4
    return replace(ops, sizes=sizes, nbytes=nbytes, run_nbytes=np.minimum(ops.run_nbytes, 4))


MUTATIONS: dict[str, Callable[[OpTable, int], OpTable]] = {
    "source one element later": _shift("src_offset", 4),
    "source one element earlier": _shift("src_offset", -4),
    "source one byte later": _shift("src_offset", 1),
    "destination one element later": _shift("dst_offset", 4),
    "destination one element earlier": _shift("dst_offset", -4),
    "source stride one element more": _shift_inner("src_strides", 4),
    "destination stride one element more": _shift_inner("dst_strides", 4),
    "another source parameter": _shift("src_parameter", 1),
    "op dropped": _drop,
    "op doubled": _double,
    "one element too few": _shrink,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_oracle_notices_a_plan_that_is_off_by_one_element(mutation: str) -> None:
    fleet = fused_fleet()
    plan = plan_transfer(
        fleet.sources, fleet.destinations, PlanPolicy(direct_min_run_bytes=16, min_split_bytes=16)
    )
    assert differences(fleet, plan) == []
    tried = 0
    for op in range(len(plan.ops)):
        if mutation == "another source parameter" and plan.ops.src_parameter[op] == 2:
            continue
        broken = replace(plan, ops=MUTATIONS[mutation](plan.ops, op))
        assert differences(fleet, broken), f"op {op}: unnoticed"
        tried += 1
    assert tried > 4


def test_scatter_payloads_that_overlap_in_staging_memory_are_noticed() -> None:
    fleet = fused_fleet()
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assert (plan.ops.mode == CopyMode.SCATTER).sum() == 8
    assert differences(fleet, plan) == []
    moved = _shift("staging_offset", -256)(plan.ops, int(plan.ops.staging_offset.argmax()))
    assert differences(fleet, replace(plan, ops=moved))


def test_every_column_survives_the_wire() -> None:
    fleet = fused_fleet()
    plan = plan_transfer(fleet.sources, fleet.destinations)
    again = TransferPlan.decode(plan.encode())
    for field in fields(OpTable):
        np.testing.assert_array_equal(getattr(again.ops, field.name), getattr(plan.ops, field.name))


@settings(max_examples=150, deadline=None)
@given(st.lists(placements((3, 2)), min_size=2, max_size=3), st.data())
def test_only_plans_with_shared_destination_bytes_are_refused(
    placed: list[Placement], data: st.DataObject
) -> None:
    starts = [4 * data.draw(st.integers(0, 12)) for _ in placed]
    nbytes = max(start + p.nbytes for start, p in zip(starts, placed, strict=True))
    payload = 24 * len(placed)
    if payload > nbytes:
        # The builder refuses such a manifest by itself.
        return
    builder = ManifestBuilder("engine", Role.ENGINE)
    builder.add_parameter("p", nbytes=nbytes, dtype=DType.FLOAT32, padding_nbytes=nbytes - payload)
    touched = np.zeros(nbytes, np.int64)
    sources = ManifestBuilder("trainer", Role.TRAINER)
    for index, (start, place) in enumerate(zip(starts, placed, strict=True)):
        name, box = f"t{index}", Box.full((3, 2))
        offset = start + place.offset
        builder.add_shard(name, (3, 2), box, "p", offset_bytes=offset, strides_bytes=place.strides)
        sources.add_parameter(name, nbytes=24, dtype=DType.FLOAT32)
        sources.add_shard(name, (3, 2), box, name)
        for i, j in np.ndindex(3, 2):
            first = offset + i * place.strides[0] + j * place.strides[1]
            touched[first : first + 4] += 1
    if touched.max() > 1:
        with pytest.raises(ManifestError, match="must not share bytes"):
            plan_transfer([sources.build()], [builder.build()])
    else:
        fleet = Fleet((sources.build(),), (builder.build(),))
        assert differences(fleet, plan_transfer(fleet.sources, fleet.destinations)) == []


def expert_fleet(num_experts: int, padding: int, engine_dtype: DType = DType.FLOAT32) -> Fleet:
    """Return stacked experts of two trainer ranks, for two tensor-parallel engine ranks.

    `padding`: bytes after each expert in the engine's fused parameter.
    """
    rows, columns, own = 4, 6, num_experts // 2
    names = [(f"{e}.gate", f"{e}.up") for e in range(num_experts)]
    sources = []
    for rank in range(2):
        builder = ManifestBuilder(f"trainer/{rank}", Role.TRAINER)
        builder.add_parameter("gate_up", nbytes=own * 2 * rows * columns * 4, dtype=DType.FLOAT32)
        builder.add_parameter("down", nbytes=own * columns * rows * 4, dtype=DType.FLOAT32)
        for place, expert in enumerate(range(rank * own, (rank + 1) * own)):
            for half, name in enumerate(names[expert]):
                at = (2 * place + half) * rows * columns * 4
                box = Box.full((rows, columns))
                builder.add_shard(name, (rows, columns), box, "gate_up", offset_bytes=at)
            at = place * columns * rows * 4
            box = Box.full((columns, rows))
            builder.add_shard(f"{expert}.down", (columns, rows), box, "down", offset_bytes=at)
        sources.append(builder.build())
    destinations = []
    for rank in range(2):
        builder = ManifestBuilder(f"engine/{rank}", Role.ENGINE)
        half_rows, itemsize = rows // 2, engine_dtype.itemsize
        block = half_rows * columns * itemsize
        expert_nbytes = 2 * block + padding
        builder.add_parameter(
            "w13",
            nbytes=num_experts * expert_nbytes,
            dtype=engine_dtype,
            padding_nbytes=num_experts * padding,
        )
        builder.add_parameter("w2", nbytes=num_experts * block, dtype=engine_dtype)
        for expert in range(num_experts):
            for half, name in enumerate(names[expert]):
                at = expert * expert_nbytes + half * block
                box = Box((rank * half_rows, 0), (half_rows, columns))
                builder.add_shard(name, (rows, columns), box, "w13", offset_bytes=at)
            box = Box((0, rank * half_rows), (columns, half_rows))
            at = expert * block
            builder.add_shard(f"{expert}.down", (columns, rows), box, "w2", offset_bytes=at)
        destinations.append(builder.build())
    return Fleet(tuple(sources), tuple(destinations))


@pytest.mark.parametrize("padding", [0, 8])
def test_experts_of_a_parameter_are_one_op_per_link(padding: int) -> None:
    """With padding, the halves of an expert have another distance than the experts."""
    fleet = expert_fleet(16, padding)
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assert len(plan.links()) == 4
    assert len(plan.ops) == 4 * 2
    assert differences(fleet, plan) == []


def test_casts_of_experts_keep_one_op_per_tensor() -> None:
    """An error about a cast names the tensor, and recovery looks up its dtype."""
    fleet = expert_fleet(4, 0, DType.BFLOAT16)
    plan = plan_transfer(fleet.sources, fleet.destinations)
    assert len(plan.ops) == 2 * 4 * 3
    assert {plan.tensors[i] for i in plan.ops.tensor} == set(plan.tensors)


@pytest.mark.parametrize("sending", [True, False])
def test_a_part_has_the_names_that_its_rows_need(sending: bool) -> None:
    fleet = expert_fleet(4, 0, DType.BFLOAT16)
    plan = plan_transfer(fleet.sources, fleet.destinations)
    parts = plan.parts(sending=sending, all_names=False)
    assert [len(part.tensors) for part in parts.values()] == ([6, 6] if sending else [12, 12])
    found = {
        (part.sources[src], part.destinations[dst], part.tensors[tensor])
        for part in parts.values()
        for src, dst, tensor in zip(part.ops.src, part.ops.dst, part.ops.tensor, strict=True)
    }
    assert found == {
        (plan.sources[src], plan.destinations[dst], plan.tensors[tensor])
        for src, dst, tensor in zip(plan.ops.src, plan.ops.dst, plan.ops.tensor, strict=True)
    }


@settings(max_examples=150, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.sampled_from((0, 4, 24)), st.sampled_from((0, 4, 24))), min_size=2),
    cut=st.sampled_from(((0, 0, 2, 3), (0, 1, 2, 2), (1, 0, 1, 3))),
    policy=st.sampled_from(POLICIES),
)
def test_blocks_at_any_distances_are_written_once(
    gaps: list[tuple[int, int]], cut: tuple[int, int, int, int], policy: PlanPolicy
) -> None:
    box = Box(cut[:2], cut[2:])
    nbytes, own = 24, box.numel * 4
    source = ManifestBuilder("trainer", Role.TRAINER)
    engine = ManifestBuilder("engine", Role.ENGINE)
    read, written, shards = 0, 0, []
    for index, (source_gap, engine_gap) in enumerate(gaps):
        shards.append((f"t{index}", read, written))
        read, written = read + nbytes + source_gap, written + own + engine_gap
    source.add_parameter("p", nbytes=read, dtype=DType.FLOAT32)
    padding = sum(gap for _, gap in gaps)
    engine.add_parameter("p", nbytes=written, dtype=DType.FLOAT32, padding_nbytes=padding)
    for name, at_source, at_engine in shards:
        source.add_shard(name, (2, 3), Box.full((2, 3)), "p", offset_bytes=at_source)
        engine.add_shard(name, (2, 3), box, "p", offset_bytes=at_engine)
    fleet = Fleet((source.build(),), (engine.build(),))
    plan = plan_transfer(fleet.sources, fleet.destinations, policy)
    assert differences(fleet, plan) == []
