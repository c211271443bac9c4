"""The simulated wire phase, compared with calculations by hand and with measurements."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tools.plan.cost import predict
from tools.plan.reports import plan_with_reports
from tools.plan.simulate import simulate_wire
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import EngineSpec, Fabric, TrainerSpec, parse_topology
from windlass.errors import ConfigError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "examples" / "topologies" / "qwen3-30b-a3b-4-to-4.toml"
MEASURED = ROOT / "benchmarks" / "results" / "bench_nvlink_4xH200_2026-11-21.json"
ROW = 1_000_000


def rank(worker: str, role: Role, rows: list[tuple[int, int]], total: int) -> ShardManifest:
    """Return a rank with the given rows of one tensor: a million bytes per row, one parameter per piece."""
    builder = ManifestBuilder(worker, role)
    for first, stop in rows:
        name = f"rows{first}"
        builder.add_parameter(name, nbytes=(stop - first) * ROW, dtype=DType.UINT8)
        builder.add_shard("t", (total, ROW), Box((first, 0), (stop - first, ROW)), name)
    return builder.build()


def plan_of(
    sources: list[list[tuple[int, int]]], destinations: list[list[tuple[int, int]]], total: int
) -> TransferPlan:
    return plan_transfer(
        [rank(f"trainer/{i}", Role.TRAINER, rows, total) for i, rows in enumerate(sources)],
        [rank(f"engine/{i}", Role.ENGINE, rows, total) for i, rows in enumerate(destinations)],
    )


FABRIC = Fabric(nic_gbytes_per_s=1.0, per_write_s=1e-12, pack_gbytes_per_s=1e9)


def test_a_link_takes_its_bytes_over_the_bandwidth() -> None:
    run = simulate_wire(plan_of([[(0, 10)]], [[(0, 10)]], 10), FABRIC)
    assert run.wire_s == pytest.approx(0.01)
    assert run.link_nbytes.tolist() == [10 * ROW]
    assert run.loads[0].kind == "NIC egress"
    assert run.loads[0].max == pytest.approx(1.0)


def test_links_of_a_sender_share_its_egress_and_other_links_get_the_rest() -> None:
    # trainer/0 -> both engines (4 MB and 1 MB), trainer/1 -> engine/1 (9 MB).
    plan = plan_of([[(0, 5)], [(5, 14)]], [[(0, 4)], [(4, 14)]], 14)
    run = simulate_wire(plan, FABRIC)
    # engine/1 gets half of its bandwidth from each trainer until the 1 MB has arrived, at 2 ms.
    # Then trainer/0 sends its other 4 - 1 MB alone until 5 ms, and trainer/1 its remaining 8 MB
    # until 10 ms.
    assert run.link_finish_s.tolist() == pytest.approx([0.005, 0.002, 0.010])
    assert run.destination_finish_s.tolist() == pytest.approx([0.005, 0.010])


def test_a_sender_writes_at_most_the_allowed_number_of_links_at_once() -> None:
    plan = plan_of([[(0, 8)]], [[(i, i + 1)] for i in range(8)], 8)
    one = simulate_wire(plan, FABRIC, links_at_once=1)
    assert sorted(one.link_finish_s.tolist()) == pytest.approx([i / 1000 for i in range(1, 9)])
    four = simulate_wire(plan, FABRIC, links_at_once=4)
    assert sorted(four.link_finish_s.tolist()) == pytest.approx([0.004] * 4 + [0.008] * 4)
    with pytest.raises(ConfigError, match="links_at_once must be >= 1, got 0"):
        simulate_wire(plan, FABRIC, links_at_once=0)


def test_senders_with_different_first_engines_do_not_wait_for_each_other() -> None:
    rows = [(2 * i, 2 * i + 2) for i in range(4)]
    plan = plan_of([[r] for r in rows], [[(0, 8)] for _ in range(4)], 8)
    apart = simulate_wire(plan, FABRIC, links_at_once=1)
    together = simulate_wire(plan, FABRIC, links_at_once=1, stagger=False)
    assert apart.wire_s == pytest.approx(0.008)
    assert together.wire_s == pytest.approx(4 * 0.008)


def test_nics_writes_rails_and_local_links_limit_the_right_transfers() -> None:
    plan = plan_of([[(0, 4)], [(4, 8)]], [[(0, 4)], [(4, 8)]], 8)

    def wire(**changes: float | bool) -> float:
        return simulate_wire(plan, msgspec.structs.replace(FABRIC, **changes)).wire_s

    assert wire() == pytest.approx(0.004)
    assert wire(ranks_per_node=2, nics_per_node=1) == pytest.approx(0.008)
    assert wire(ranks_per_node=2, nics_per_node=4) == pytest.approx(0.002)
    assert wire(per_write_s=0.05) == pytest.approx(0.05)
    assert wire(ranks_per_node=2, spine_oversubscription=100.0) == pytest.approx(0.004)
    crossed = plan_of([[(0, 4)], [(4, 8)]], [[(4, 8)], [(0, 4)]], 8)
    fabric = msgspec.structs.replace(FABRIC, ranks_per_node=2, spine_oversubscription=4.0)
    assert simulate_wire(crossed, fabric).wire_s == pytest.approx(0.016)
    assert wire(colocated=True, local_gbytes_per_s=4.0) == pytest.approx(0.001)


def test_nothing_is_faster_than_the_bound_and_no_resource_is_overused() -> None:
    topology = parse_topology(QWEN.read_text())
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    cost = predict(planned.plan, topology.fabric, planned.routing)
    run = simulate_wire(planned.plan, topology.fabric)
    assert run.wire_s >= cost.wire_s * 0.999
    assert cost.lower_bound_s / run.wire_s > 0.99
    assert all(load.max <= 1.001 for load in run.loads)
    assert int(run.link_nbytes.sum()) == planned.plan.nbytes
    assert (run.link_finish_s > 0).all()
    assert run.percentile_s(50) <= run.percentile_s(99) <= run.wire_s
    assert np.isclose(run.destination_finish_s.max(), run.wire_s)


def measured(case: str, metric: str) -> float:
    rows = json.loads(MEASURED.read_text())
    return float(next(r["value"] for r in rows if r["case"] == case and r["metric"] == metric))


@pytest.mark.parametrize(
    ("label", "ep", "dtype", "num_layers", "pieces"),
    [
        ("Qwen3-30B-A3B bf16, FSDP -> TP: 61.1 GB", 1, "bfloat16", 48, "contiguous"),
        ("Qwen3-30B-A3B bf16, FSDP -> EP: 61.1 GB", 2, "bfloat16", 48, "contiguous"),
        ("half of Qwen3-30B-A3B, fp32 masters -> bf16, FSDP -> TP: 31.2 GB", 1, "float32", 24, "cast"),
    ],
)  # fmt: skip
def test_the_measured_updates_over_nvlink_are_predicted_within_two_percent(
    label: str, ep: int, dtype: str, num_layers: int, pieces: str
) -> None:
    """The only input is the measured speed of one pair of GPUs with pieces of 1 MiB."""
    rate = measured(f"{pieces} pieces of 1 MiB, kernel with digest", "median")
    topology = parse_topology(QWEN.read_text())
    topology = msgspec.structs.replace(
        topology,
        model=msgspec.structs.replace(topology.model, num_hidden_layers=num_layers),
        trainer=TrainerSpec(kind="fsdp", world_size=2, dtype=DType(dtype)),
        engine=EngineSpec(tp=2, ep=ep),
    )
    plan = plan_transfer(trainer_manifests(topology), engine_manifests(topology))
    fabric = Fabric(nic_gbytes_per_s=rate, pack_gbytes_per_s=1e6, per_write_s=1e-9)
    wire_s = measured(f"{label}, 2 -> 2 GPUs", "wire, median")
    assert simulate_wire(plan, fabric).wire_s == pytest.approx(wire_s, rel=0.02)
