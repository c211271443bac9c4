"""Scaling of the planner: public model sizes, up to 256 trainer ranks -> 128 engine ranks.

Each case runs in a separate process, so that its peak memory can be measured. The reference is a simple planner, a
Python loop over tensors and shards, for the same manifests in the same process, if it is fast enough.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import Row, median_p95, parser, report
from tools.plan.reports import plan_with_reports
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import EngineSpec, Topology, parse_topology
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Shard, ShardManifest
from windlass.planning.planner import plan_transfer

TOPOLOGIES = Path(__file__).parents[1] / "examples" / "topologies"
RUNS = 5
GOAL_SECONDS, GOAL_RSS, GOAL_IMBALANCE = 10.0, 2.0 * 2**30, 1.02


@dataclass(frozen=True, slots=True)
class Case:
    """Topology of this repository; `engine`, if given, replaces its engine."""

    name: str
    topology: str
    engine: EngineSpec | None = None
    loop_planner: bool = False

    def load(self) -> Topology:
        topology = parse_topology((TOPOLOGIES / f"{self.topology}.toml").read_text())
        return msgspec.structs.replace(topology, engine=self.engine or topology.engine)


CASES = (
    Case("qwen3-30b-a3b 4->4", "qwen3-30b-a3b-4-to-4", loop_planner=True),
    Case("qwen3-235b 128->32", "qwen3-235b-128-to-32", loop_planner=True),
    Case("deepseek-v3 128->128", "deepseek-v3-128-to-128"),
    Case("kimi-k2 256->128", "kimi-k2-256-to-128"),
    Case(
        "kimi-k2 256->128, each expert over 8 ranks",
        "kimi-k2-256-to-128",
        EngineSpec(replicas=4, tp=32, ep=4, attention_dp=4),
    ),
)


def plan_by_loops(
    sources: list[ShardManifest], destinations: list[ShardManifest]
) -> tuple[int, int]:
    """Plan with loops, using the least loaded of identical sources; return (ops, bytes)."""
    holders: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, manifest in enumerate(sources):
        for shard in manifest.shards():
            holders[shard.tensor][shard.box].append((rank, shard))
    load = [0] * len(sources)
    ops: list[tuple[int, int, Shard, Shard, Box]] = []
    for index, manifest in enumerate(destinations):
        itemsize = {p.name: DType(p.dtype).itemsize for p in manifest.parameters}
        for wanted in manifest.shards():
            for box, held in holders[wanted.tensor].items():
                common = box.intersect(wanted.box)
                if common is None:
                    continue
                rank, shard = min(held, key=lambda holder: load[holder[0]])
                load[rank] += common.numel * itemsize[wanted.parameter]
                ops.append((rank, index, shard, wanted, common))
    return len(ops), sum(load)


def measure(case: Case) -> dict[str, float]:
    """Plan the case `RUNS` times in this process."""
    topology = case.load()
    sources, destinations = trainer_manifests(topology), engine_manifests(topology)
    needed = sum(manifest.nbytes for manifest in destinations)
    seconds: list[float] = []
    digests: set[str] = set()
    peak = 0
    for _ in range(RUNS):
        gc.collect()
        started = time.perf_counter()
        plan = plan_transfer(sources, destinations)
        seconds.append(time.perf_counter() - started)
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if plan.nbytes != needed:
            raise SystemExit(f"{case.name}: covers {plan.nbytes} of {needed} bytes")
        digests.add(plan.digest())
        del plan
    if len(digests) != 1:
        raise SystemExit(f"{case.name}: the same manifests gave {len(digests)} different plans")
    median, p95 = median_p95(seconds)
    measured = {
        "median": median,
        "p95": p95,
        "peak_rss": float(peak),
        "imbalance": plan_with_reports(sources, destinations).routing.imbalance,
    }
    if case.loop_planner:
        started = time.perf_counter()
        _, nbytes = plan_by_loops(sources, destinations)
        measured["loop_seconds"] = time.perf_counter() - started
        if nbytes != needed:
            raise SystemExit(f"{case.name}: the loop planner moves {nbytes} of {needed} bytes")
    return measured


def rows_of(case: Case, measured: dict[str, float]) -> list[Row]:
    rows: list[Row] = []

    def add(metric: str, value: float, unit: str, reference: str, reference_value: float) -> None:
        rows.append(Row(case.name, metric, value, unit, reference, reference_value))

    add("plan_seconds median", measured["median"], "s", "goal", GOAL_SECONDS)
    add("plan_seconds p95", measured["p95"], "s", "goal", GOAL_SECONDS)
    if "loop_seconds" in measured:
        loop = measured["loop_seconds"]
        add("plan_seconds median", measured["median"], "s", "Python-loop planner, same run", loop)
    add("peak_rss", measured["peak_rss"] / 2**30, "GiB", "goal", GOAL_RSS / 2**30)
    add("imbalance", measured["imbalance"], "x lower bound", "goal", GOAL_IMBALANCE)
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--case", type=int, help="run one case here and print it as JSON")
    args = arguments.parse_args()
    if args.case is not None:
        print(json.dumps(measure(CASES[args.case])))
        return
    rows: list[Row] = []
    for index, case in enumerate(CASES):
        command = [sys.executable, __file__, "--case", str(index)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        rows.extend(rows_of(case, json.loads(done.stdout)))
    report(rows, args.json, "planner scaling")


if __name__ == "__main__":
    main()
