"""Cost of a controller with up to 1 024 trainer ranks and 4 096 engine ranks.

One process runs the real coordinator, round machine, binding and sessions, and the real agent of every rank with real
memory, on a simulated clock and network (`tests/support/simulated_fleet.py`). The benchmark reports only the
controller's costs: CPU seconds, messages and bytes that it sends, and the bytes of all its objects. Engines join one
after another, so that each is bound separately. The garbage collector is off during the run, because most garbage
belongs to the agents.

The reference of every figure is four times the figure of a fleet a quarter as large: a ratio above 1 means that the
cost grows faster than the fleet.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

from simulated_fleet import CONTROLLER, ENGINE_RANKS, SimulatedFleet, topology_of

from harness import Row, parser, report

SIZES = ((64, 256), (256, 1024), (1024, 4096))
"""Trainer ranks and engine ranks of each fleet."""
Figures = dict[str, tuple[float, str]]


def simulate(num_trainers: int, num_engine_ranks: int, kind: str) -> Figures:
    """Return the figures of one fleet: metric -> (value, unit)."""
    topology = topology_of(num_trainers, num_engine_ranks // ENGINE_RANKS, kind=kind)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        fleet = SimulatedFleet(topology, Path(folder))

        def note(what: str) -> None:
            cpu_s, messages, nbytes = fleet.meter.take(CONTROLLER)
            found[f"{what}, CPU"] = cpu_s, "s"
            found[f"{what}, messages"] = messages, ""
            found[f"{what}, sent"] = nbytes / 1e6, "MB"
            gc.collect()
            print(f"{num_trainers} -> {num_engine_ranks}: {what} {cpu_s:.2f} s", file=sys.stderr)

        def note_links(how: str) -> None:
            binding = fleet.coordinator.connector.binding
            assert binding is not None
            found[f"links, {how}"] = len(binding.links), ""
            most = binding.sent_nbytes * num_trainers / binding.sent_by.total()
            found[f"most that a trainer rank sends, {how}"] = most, "of the mean"

        async def run() -> None:
            await fleet.start_controller()
            fleet.start_trainers()
            await fleet.start_engines(every_s=0.5)
            await fleet.settled()
            note("connect, one engine after another")
            held = fleet.held()
            found["kept when connected"] = held[0] / 1e6, "MB"
            found["objects kept when connected"] = held[1].total(), ""
            note_links("bound one after another")
            fleet.meter.take(CONTROLLER)
            await fleet.publish(0)
            note("first update")
            await fleet.settled()
            await fleet.publish(1)
            note("update")
            await fleet.restart_engine(0)
            await fleet.settled()
            note("an engine starts again")
            await fleet.kill_controller()
            await fleet.start_controller()
            await fleet.settled()
            note("the controller starts again")
            note_links("bound at once")
            await fleet.publish(2)
            held = fleet.held()
            found["kept in the end"] = held[0] / 1e6, "MB"

        gc.disable()
        with fleet.simulated():
            fleet.loop.run_until_complete(run())
    return found


def simulated(sizes: Sequence[tuple[int, int]], kind: str) -> list[Row]:
    """Run every size in a separate process."""
    rows: list[Row] = []
    before: tuple[int, Figures] | None = None
    for trainers, engines in sizes:
        size = [str(trainers), str(engines), kind]
        ran = subprocess.run(
            [sys.executable, __file__, "--simulate", *size], stdout=subprocess.PIPE, check=True
        )
        figures: Figures = {k: (v, unit) for k, (v, unit) in json.loads(ran.stdout).items()}
        rows += rows_of(
            f"{trainers} trainer ranks ({kind}), {engines} engine ranks", trainers, figures, before
        )
        before = trainers, figures
    return rows


def rows_of(case: str, num: int, figures: Figures, before: tuple[int, Figures] | None) -> list[Row]:
    rows = []
    for metric, (value, unit) in figures.items():
        linear = value if before is None else before[1][metric][0] * num / before[0]
        rows.append(
            Row(
                case,
                metric,
                value,
                unit,
                "itself" if before is None else f"in proportion to {before[0]}",
                linear,
                ratio=value / linear if linear else 1.0,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--simulate", nargs=3, help=argparse.SUPPRESS)
    made.add_argument("--kind", choices=("megatron", "fsdp"), default="megatron")
    made.add_argument(
        "--sizes", type=int, default=len(SIZES), help="number of sizes, smallest first"
    )
    options = made.parse_args(argv)
    if options.simulate:
        trainers, engines, kind = options.simulate
        json.dump(simulate(int(trainers), int(engines), kind), sys.stdout)
        return
    report(simulated(SIZES[: options.sizes], options.kind), options.json, "scale")


if __name__ == "__main__":
    main()
