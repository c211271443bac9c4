"""Two ways to update engines on the trainer's host with a short pause: a second copy of the weights, or a read at APPLY.

Fleets of the same processes and layouts as in `bench_update.py` take turns in one run:

- `staged` with `cma` or `shm`: trainers write into a shadow of the engine's weights, and the engine verifies it while it
  generates. The pause is the copy of the shadow into the live weights.
- `pull` at APPLY: trainers prepare while the engine generates. In the pause, the engine reads the bytes straight into its
  live weights and verifies them. There is no second copy, and the trainers must keep the version until then.

After every run the benchmark compares every engine byte with the trainers' values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from bench_update import DTYPE, Fleet, box_of, tensors
from harness import Row, median_p95, parser, report
from windlass.config import UpdateMode
from windlass.observability.ceilings import measure_memcpy_gbps

CASES = {
    "shadow, cma": ("cma", UpdateMode.STAGED, ("apply",)),
    "shadow, shm": ("shm", UpdateMode.STAGED, ("apply",)),
    "read at APPLY, pull": ("pull", UpdateMode.IN_PLACE, ("write", "verify", "apply")),
}
"""Name -> transport, mode, and the stages in which the engine is paused."""


def engine_nbytes() -> int:
    """Return the bytes of one engine rank's weights."""
    boxes = (box_of(shape, dim, 0, 2) for shape, dim in tensors().values())
    return sum(box.numel * DTYPE.itemsize for box in boxes)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--runs", type=int, default=7, help="updates of each case (default 7)")
    arguments = made.parse_args()
    ceiling_gbps = measure_memcpy_gbps()
    stages: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    memory: dict[str, int] = {}
    nbytes = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        fleets = {}
        for case, (transport, mode, _) in CASES.items():
            fleets[case] = fleet = Fleet(transport, f"{folder}/{transport}")
            stack.callback(fleet.close)
            # The comparison of all bytes touches the weights, and memory of its own.
            fleet.ask(fleet.engines, "holds", 0)
            before = sum(fleet.ask(fleet.engines, "resident").values())
            nbytes = fleet.connect(mode)
            # The first update touches all memory.
            fleet.timed(fleet.windlass, 0, 1)
            memory[case] = sum(fleet.ask(fleet.engines, "resident").values()) - before
        for run in range(arguments.runs):
            turn: Sequence[str] = [*CASES] if run % 2 else [*CASES][::-1]
            for case in turn:
                fleet = fleets[case]
                stages[case].append(fleet.once(fleet.windlass, 2 + run))
    ideal = nbytes / ceiling_gbps / 1e9
    rows: list[Row] = []
    for case, (_, _, paused) in CASES.items():
        for metric, names in (
            ("pause", paused),
            ("update", ("prepare", "write", "verify", "apply")),
        ):
            seconds = [sum(found[name] for name in names) for found in stages[case]]
            for kind, value in zip(("median", "p95"), median_p95(seconds), strict=True):
                rows.append(Row(case, f"{metric}_{kind}", value, "s", "memcpy of the bytes", ideal))
        for name in stages[case][0]:
            value = median_p95([found[name] for found in stages[case]])[0]
            rows.append(Row(case, name, value, "s", "memcpy of the bytes", ideal))
        whole = 2 * engine_nbytes()
        rows.append(
            Row(case, "further_memory", memory[case], "bytes", "weights of the engine", whole)
        )
    report(rows, arguments.json, f"one update of {nbytes / 1e6:.0f} MB, 2 trainers -> TP2 engine")


if __name__ == "__main__":
    main()
