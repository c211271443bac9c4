"""Simulated times compared with measured times, published times and the lower bound.

1. Topologies of this repository: simulated wire time, lower bound, parallel links, seconds to simulate.
2. Our measured runs over NVLink (2 GPUs to 2 GPUs): prediction from the speed of one pair.
3. Published updates: simulation at full line rate, with as much of the layout as is published. The ratio shows the
   loss of the published run against full line rate, not the error of the model.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import Row, parser, report
from tools.plan.cost import predict
from tools.plan.reports import plan_with_reports
from tools.plan.simulate import simulate_wire
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import EngineSpec, Fabric, Topology, TrainerSpec, parse_topology
from windlass.layout.dtypes import DType

ROOT = Path(__file__).parents[1]
SHIPPED = (
    "qwen3-30b-a3b-4-to-4",
    "qwen3-235b-128-to-32",
    "deepseek-v3-128-to-128",
    "kimi-k2-256-to-128",
)
LINKS_AT_ONCE = (1, 4, 16)


@dataclass(frozen=True)
class Published:
    """Published update. `base` names the topology of this repository with the same model."""

    case: str
    base: str
    trainer: TrainerSpec
    engine: EngineSpec
    seconds: float


PUBLISHED = (
    Published(
        "NCCL M2N, DeepSeek-V3 FP8, 128 -> TP8 x 16, direct P2P",
        "deepseek-v3-128-to-128",
        TrainerSpec(kind="megatron", world_size=128, pp=4, ep=16, dtype=DType.FLOAT8_E4M3),
        EngineSpec(replicas=16, tp=8, ep=8, dtype=DType.FLOAT8_E4M3),
        3.838,
    ),
    Published(
        "NCCL M2N, Qwen3-235B BF16, 64 -> TP8 x 8, direct P2P",
        "qwen3-235b-128-to-32",
        TrainerSpec(kind="megatron", world_size=64, tp=2, cp=2, ep=16, pp=4),
        EngineSpec(replicas=8, tp=8, ep=8),
        2.175,
    ),
    Published(
        "vLLM RDT, Kimi-K2 BF16, 256 -> 128 (shipped topology)",
        "kimi-k2-256-to-128",
        TrainerSpec(kind="megatron", world_size=256, tp=8, pp=8, ep=32),
        EngineSpec(replicas=4, tp=32, ep=32, attention_dp=4),
        7.53,
    ),
    Published(
        "Perplexity, Kimi-K2, 256 -> 128 FP8, 1.3 s (bytes of FP8 both sides)",
        "kimi-k2-256-to-128",
        TrainerSpec(kind="megatron", world_size=256, tp=8, pp=8, ep=32, dtype=DType.FLOAT8_E4M3),
        EngineSpec(replicas=4, tp=32, ep=32, attention_dp=4, dtype=DType.FLOAT8_E4M3),
        1.3,
    ),
)


def load(name: str) -> Topology:
    return parse_topology((ROOT / "examples" / "topologies" / f"{name}.toml").read_text())


def shipped(name: str) -> list[Row]:
    topology = load(name)
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    bound = predict(planned.plan, topology.fabric, planned.routing).lower_bound_s
    rows = []
    for links in LINKS_AT_ONCE:
        began = time.perf_counter()
        run = simulate_wire(planned.plan, topology.fabric, links_at_once=links)
        took = time.perf_counter() - began
        case = f"{name}, {links} link(s) at once"
        rows += [
            Row(case, "simulated wire", run.wire_s, "s", "lower bound", bound),
            Row(
                case,
                "p99 link end",
                run.percentile_s(99),
                "s",
                "p50 link end",
                run.percentile_s(50),
            ),
            Row(case, "time to simulate", took, "s", "events", run.num_events),
        ]
    return rows


def measured_runs() -> list[Row]:
    results = json.loads(
        (ROOT / "benchmarks/results/bench_nvlink_4xH200_2026-11-21.json").read_text()
    )
    value = {(r["case"], r["metric"]): r["value"] for r in results}
    found = []
    for label, ep, dtype, layers, pieces in (
        ("Qwen3-30B-A3B bf16, FSDP -> TP: 61.1 GB", 1, "bfloat16", 48, "contiguous"),
        ("Qwen3-30B-A3B bf16, FSDP -> EP: 61.1 GB", 2, "bfloat16", 48, "contiguous"),
        (
            "half of Qwen3-30B-A3B, fp32 masters -> bf16, FSDP -> TP: 31.2 GB",
            1,
            "float32",
            24,
            "cast",
        ),
    ):
        rate = value[f"{pieces} pieces of 1 MiB, kernel with digest", "median"]
        base = load("qwen3-30b-a3b-4-to-4")
        topology = msgspec.structs.replace(
            base,
            model=msgspec.structs.replace(base.model, num_hidden_layers=layers),
            trainer=TrainerSpec(kind="fsdp", world_size=2, dtype=DType(dtype)),
            engine=EngineSpec(tp=2, ep=ep),
        )
        planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
        fabric = Fabric(nic_gbytes_per_s=rate, pack_gbytes_per_s=1e6, per_write_s=1e-9)
        wire_s = simulate_wire(planned.plan, fabric).wire_s
        real = value[f"{label}, 2 -> 2 GPUs", "wire, median"]
        found.append(
            Row(
                f"{label}, 2 -> 2 H200",
                "simulated wire",
                wire_s,
                "s",
                "measured wire, median",
                real,
            )
        )
    return found


def published(case: Published) -> Row:
    topology = msgspec.structs.replace(load(case.base), trainer=case.trainer, engine=case.engine)
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    wire_s = simulate_wire(planned.plan, topology.fabric).wire_s
    return Row(
        f"{case.case}: {planned.plan.nbytes / len(planned.plan.destinations) / 1e9:.1f} GB per GPU",
        "simulated wire at 50 GB/s",
        wire_s,
        "s",
        "published",
        case.seconds,
    )


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    rows = [row for name in SHIPPED for row in shipped(name)]
    rows += measured_runs()
    rows += [published(case) for case in PUBLISHED]
    report(rows, args.json, "simulated against bound, measured, published")


if __name__ == "__main__":
    main()
