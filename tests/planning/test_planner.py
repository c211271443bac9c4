"""Modes, ties, casts, joins and refusals of the planner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tools.plan.reports import num_writes, plan_with_reports
from windlass.errors import ConfigError, IncompleteCoverage, ManifestError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.plan import DTYPES, CopyMode, Reason, TransferPlan
from windlass.planning.planner import PlanPolicy, plan_transfer

ROWS = 16


def rank(
    worker: str,
    box: Box,
    *,
    shape: tuple[int, ...] = (ROWS, 64),
    tensor: str = "w",
    dtype: DType = DType.BFLOAT16,
    strides: tuple[int, ...] | None = None,
    extent: int | None = None,
    alias: str = "",
) -> ShardManifest:
    """Return a rank with one parameter that contains one box."""
    engine = worker.startswith("engine")
    payload = box.numel * dtype.itemsize
    nbytes = extent or payload
    builder = ManifestBuilder(worker, Role.ENGINE if engine else Role.TRAINER)
    builder.add_parameter("p", nbytes=nbytes, dtype=dtype, padding_nbytes=nbytes - payload)
    builder.add_shard(tensor, shape, box, "p", strides_bytes=strides)
    if alias:
        builder.add_alias(alias, tensor)
    return builder.build()


FULL = Box((0, 0), (ROWS, 64))


def only(plan: TransferPlan) -> tuple[CopyMode, Reason]:
    assert len(plan.ops) == 1
    return CopyMode(int(plan.ops.mode[0])), Reason(int(plan.ops.reason[0]))


def test_a_contiguous_copy_is_one_direct_write() -> None:
    plan = plan_transfer([rank("t", FULL)], [rank("engine", FULL)])
    assert only(plan) == (CopyMode.DIRECT, Reason.CONTIGUOUS)
    assert num_writes(plan) == 1
    assert plan.ops.sizes[0].tolist() == [1, 1, 1, 1, ROWS * 64]
    assert plan.staging_nbytes == (0,)


def test_a_column_slice_of_the_source_is_packed_unless_its_runs_are_long() -> None:
    half = Box((0, 0), (ROWS, 32))
    plan = plan_transfer([rank("t", FULL)], [rank("engine", half)])
    assert only(plan) == (CopyMode.PACKED, Reason.SOURCE_STRIDED)
    assert num_writes(plan) == 1
    plan = plan_transfer(
        [rank("t", FULL)], [rank("engine", half)], PlanPolicy(direct_min_run_bytes=64)
    )
    assert only(plan) == (CopyMode.DIRECT, Reason.LONG_RUNS)
    assert num_writes(plan) == ROWS
    assert plan.ops.run_nbytes[0] == 64
    plan = plan_transfer(
        [rank("t", FULL)], [rank("engine", half)], PlanPolicy(direct_min_run_bytes=65)
    )
    assert only(plan) == (CopyMode.PACKED, Reason.SOURCE_STRIDED)


def test_a_strided_destination_is_staged_and_unpacked() -> None:
    pitched = rank("engine", FULL, strides=(256, 2), extent=256 * ROWS)
    plan = plan_transfer([rank("t", FULL)], [pitched], PlanPolicy(staging_alignment=4096))
    assert only(plan) == (CopyMode.SCATTER, Reason.DESTINATION_STRIDED)
    assert plan.staging_nbytes == (4096,)
    assert plan.ops.staging_offset[0] == 0


def test_a_transposed_destination_is_row_major_in_the_plan() -> None:
    source = rank("t", FULL, strides=(2, 2 * ROWS))
    plan = plan_transfer([source], [rank("engine", FULL)])
    assert only(plan) == (CopyMode.PACKED, Reason.SOURCE_STRIDED)
    assert plan.ops.dst_strides[0].tolist() == [0, 0, 0, 128, 2]
    assert plan.ops.src_strides[0].tolist() == [0, 0, 0, 2, 2 * ROWS]
    transposed = rank("engine", FULL, strides=(2, 2 * ROWS))
    plan = plan_transfer([rank("t", FULL)], [transposed])
    assert only(plan) == (CopyMode.PACKED, Reason.SOURCE_STRIDED)
    assert plan.ops.sizes[0].tolist() == [1, 1, 1, 64, ROWS]
    assert only(plan_transfer([source], [transposed])) == (CopyMode.DIRECT, Reason.CONTIGUOUS)


def test_a_cast_is_packed_and_counted_in_destination_bytes() -> None:
    plan = plan_transfer([rank("t", FULL, dtype=DType.FLOAT32)], [rank("engine", FULL)])
    assert only(plan) == (CopyMode.PACKED, Reason.CAST)
    assert plan.nbytes == FULL.numel * 2
    assert DTYPES[int(plan.ops.src_dtype[0])] is DType.FLOAT32
    assert DTYPES[int(plan.ops.dst_dtype[0])] is DType.BFLOAT16
    assert plan.ops.src_strides[0, -1] == 4
    assert plan.ops.dst_strides[0, -1] == 2


@pytest.mark.parametrize(
    ("have", "want"), [(DType.FLOAT32, DType.INT32), (DType.INT8, DType.BFLOAT16)]
)
def test_a_cast_that_is_not_between_floats_is_refused(have: DType, want: DType) -> None:
    with pytest.raises(UnsupportedLayout, match=rf"'w'.*got {have} .* and {want}"):
        plan_transfer([rank("t", FULL, dtype=have)], [rank("engine", FULL, dtype=want)])


def test_payloads_for_a_strided_destination_go_to_staging_memory_aligned() -> None:
    halves = [rank(f"t{i}", Box((i * 8, 0), (8, 64))) for i in range(2)]
    transposed = rank("engine", FULL, strides=(2, 2 * ROWS))
    plan = plan_transfer(halves, [transposed], PlanPolicy(staging_alignment=1000))
    assert (plan.ops.mode == CopyMode.SCATTER).all()
    # Each payload has 1024 bytes.
    assert plan.ops.staging_offset.tolist() == [0, 2000]
    assert plan.staging_nbytes == (4000,)


def test_adjacent_copies_join_into_one_write() -> None:
    sides = []
    for worker, role in (("t", Role.TRAINER), ("engine", Role.ENGINE)):
        builder = ManifestBuilder(worker, role)
        builder.add_parameter("experts", nbytes=6 * 32, dtype=DType.FLOAT32)
        for expert in range(6):
            builder.add_shard(
                f"e{expert}", (2, 4), Box.full((2, 4)), "experts", offset_bytes=32 * expert
            )
        sides.append(builder.build())
    plan = plan_transfer(sides[:1], sides[1:])
    assert only(plan) == (CopyMode.DIRECT, Reason.CONTIGUOUS)
    assert num_writes(plan) == 1
    assert plan.ops.sizes[0].tolist() == [1, 1, 1, 1, 48]
    assert plan.tensors[int(plan.ops.tensor[0])] == "e0"


def test_a_tied_name_is_served_from_either_side_of_the_tie() -> None:
    tied_source = rank("t", FULL, tensor="embed", alias="head")
    plan = plan_transfer([tied_source], [rank("engine", FULL, tensor="head")])
    assert plan.tensors[int(plan.ops.tensor[0])] == "head"
    tied_engine = rank("engine", FULL, tensor="embed", alias="head")
    assert len(plan_transfer([rank("t", FULL, tensor="head")], [tied_engine]).ops) == 1


def test_an_engine_that_ties_untied_tensors_of_the_trainer_is_refused() -> None:
    sources = [rank("t0", FULL, tensor="embed"), rank("t1", FULL, tensor="head")]
    with pytest.raises(ManifestError, match="engine ties 'head' to 'embed'"):
        plan_transfer(sources, [rank("engine", FULL, tensor="embed", alias="head")])


def test_a_tie_that_only_some_trainer_ranks_have_is_refused() -> None:
    """The separate tensor of the other ranks was not published."""
    builder = ManifestBuilder("t0", Role.TRAINER)
    for name in ("embed", "head"):
        builder.add_parameter(name, nbytes=ROWS * 64 * 4, dtype=DType.FLOAT32)
        builder.add_shard(name, (ROWS, 64), FULL, name)
    sources = [builder.build(), rank("t1", FULL, tensor="embed", alias="head")]
    with pytest.raises(ManifestError, match="t1 ties 'head' to 'embed', but t0 has two separate"):
        plan_transfer(sources, [rank("engine", FULL, tensor="head")])


def test_a_tie_of_two_shapes_is_refused() -> None:
    sources = [
        rank("t0", FULL, tensor="embed", alias="head"),
        rank("t1", Box.full((3,)), shape=(3,), tensor="head"),
    ]
    with pytest.raises(ManifestError, match="'head' must have one shape"):
        plan_transfer(sources, [rank("engine", FULL, tensor="embed")])


def test_a_missing_tensor_names_tensor_and_destination() -> None:
    with pytest.raises(IncompleteCoverage, match="no source has these tensors of engine: 'v'"):
        plan_transfer([rank("t", FULL)], [rank("engine", FULL, tensor="v")])


def test_a_hole_names_tensor_box_and_bytes() -> None:
    sources = [rank("t0", Box((0, 0), (8, 64))), rank("t1", Box((9, 0), (7, 64)))]
    with pytest.raises(IncompleteCoverage) as caught:
        plan_transfer(sources, [rank("engine-0", FULL), rank("engine-1", FULL)])
    assert str(caught.value) == (
        "tensor 'w' of engine-0: no source has box [8:9, 0:64]; 128 of 2048 bytes are missing, "
        "in 1 separate part"
    )


def test_overlap_does_not_hide_a_hole() -> None:
    """Twelve rows twice are more bytes than sixteen rows once, but do not cover them."""
    sources = [rank("t0", Box((0, 0), (12, 64))), rank("t1", Box((1, 0), (12, 64)))]
    with pytest.raises(IncompleteCoverage, match=r"box \[13:16, 0:64\]"):
        plan_transfer(sources, [rank("engine", FULL)])


def test_shapes_off_by_one_name_both_workers() -> None:
    with pytest.raises(ManifestError, match=r"\(16, 64\) at t and \(17, 64\) at engine"):
        plan_transfer([rank("t", FULL)], [rank("engine", FULL, shape=(17, 64))])


def test_unused_tensors_are_reported() -> None:
    sources = [rank("t", FULL), rank("extra", FULL, tensor="v")]
    planned = plan_with_reports(sources, [rank("engine", FULL)])
    assert planned.coverage.unused_tensors == ("v",)
    assert planned.coverage.fraction == 1.0


def test_empty_sides_and_doubled_workers_are_refused() -> None:
    with pytest.raises(ManifestError, match="sources must not be empty"):
        plan_transfer([], [rank("engine", FULL)])
    with pytest.raises(ManifestError, match="destinations must not be empty"):
        plan_transfer([rank("t", FULL)], [])
    with pytest.raises(ManifestError, match="worker 't' must have one manifest"):
        plan_transfer([rank("t", FULL), rank("t", FULL)], [rank("engine", FULL)])


PLAN_POLICIES: dict[str, Callable[[], PlanPolicy]] = {
    "direct_min_run_bytes": lambda: PlanPolicy(direct_min_run_bytes=0),
    "min_split_bytes": lambda: PlanPolicy(min_split_bytes=0),
    "staging_alignment": lambda: PlanPolicy(staging_alignment=0),
}


@pytest.mark.parametrize("name", PLAN_POLICIES)
def test_a_policy_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be >= 1, got 0"):
        PLAN_POLICIES[name]()


def test_a_changed_manifest_changes_the_plan_digest() -> None:
    engine = rank("engine", FULL)
    plan = plan_transfer([rank("t", FULL)], [engine])
    again = plan_transfer([ShardManifest.decode(rank("t", FULL).encode())], [engine])
    assert again.digest() == plan.digest()
    assert plan_transfer([rank("u", FULL)], [engine]).digest() != plan.digest()


def test_a_destination_without_shards_gets_no_ops() -> None:
    idle = ManifestBuilder("engine-1", Role.ENGINE).build()
    plan = plan_transfer([rank("t", FULL)], [rank("engine-0", FULL), idle])
    assert len(plan.parts(sending=False, all_names=True)["engine-1"].ops) == 0
    assert np.array_equal(plan.ops.dst, [0])
    planned = plan_with_reports([rank("t", FULL)], [idle])
    assert planned.coverage.fraction == 1.0
    assert planned.routing.imbalance == 1.0
    assert planned.plan.links() == ()


@pytest.mark.parametrize(
    ("second", "strides", "refused"),
    [(0, (64, 4), True), (4, (64, 4), True), (32, (64, 4), False), (128, (32, 4), False)],
)
def test_two_destination_shards_on_the_same_bytes_are_refused(
    second: int, strides: tuple[int, int], refused: bool
) -> None:
    """The sizes add up in all four cases: an overlap hides behind a gap of the same size."""
    builder = ManifestBuilder("engine", Role.ENGINE)
    builder.add_parameter("idle", nbytes=32, dtype=DType.FLOAT32)
    builder.add_shard("a", (4, 8), Box((0, 0), (1, 8)), "idle")
    builder.add_parameter("gate_up", nbytes=256, dtype=DType.FLOAT32)
    for name, offset in (("a", 0), ("b", second)):
        builder.add_shard(
            name,
            (4, 8),
            Box.full((4, 8)),
            "gate_up",
            offset_bytes=offset,
            strides_bytes=strides,
        )
    engine = builder.build()
    sources = [rank(f"t{n}", Box.full((4, 8)), shape=(4, 8), tensor=n) for n in ("a", "b")]
    if refused:
        with pytest.raises(ManifestError, match="'gate_up': shards of 'a' and 'b' must not share"):
            plan_transfer(sources, [engine])
    else:
        assert plan_transfer(sources, [engine]).nbytes == engine.nbytes
