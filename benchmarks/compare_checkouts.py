"""Compare every figure of a benchmark between this checkout and another one, with alternating runs on one machine.

The speed of a machine varies, so one run of each checkout is not enough. With `--at-once N`, N runs of each checkout
run in parallel on separate cores, and the two checkouts swap cores in every turn. The ratio of a figure is the median
of the ratios of all pairs that ran in parallel (or one after the other). Its interval contains the true median with a
probability of 95 %.

    git worktree add FOLDER COMMIT
    python benchmarks/compare_checkouts.py bench_rollout FOLDER --json FILE -- --only throughput
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import Row, median_p95, parser, report

HERE = Path(__file__).resolve().parent
DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ComparedRow(Row):
    """Figure of this checkout with the other's as reference. `ratio` is the median of the pairs' ratios."""

    ratio_low: float = 0.0
    ratio_high: float = 0.0
    num_pairs: int = 0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median by order statistics (sign test), or all values if fewer than six."""
    ordered, n = sorted(values), len(values)
    outside, tail = 0, 0.5**n
    while outside + 1 <= (n - 1) // 2 and 2 * tail <= 0.05:
        outside += 1
        tail += math.comb(n, outside) * 0.5**n
    first = max(outside - 1, 0)
    return ordered[first], ordered[n - 1 - first]


ON_CORES = """
import os, runpy, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
sys.argv = sys.argv[2:]
sys.path[0] = "benchmarks"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def figures(
    checkout: Path, benchmark: str, options: list[str], cores: Sequence[int]
) -> dict[tuple[str, str], Row]:
    """Run a benchmark of a checkout on these cores; return its rows by case and metric."""
    folders = ("src", "tests/support", "benchmarks")
    paths = [*(str(checkout / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        subprocess.run(
            [
                sys.executable,
                *("-c", ON_CORES, ",".join(map(str, cores))),
                *(f"benchmarks/{benchmark}.py", "--json", str(found), *options),
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=True,
            timeout=DEADLINE_S,
            stdout=subprocess.DEVNULL,
        )
        rows = [Row(**each) for each in json.loads(found.read_text())]
    return {(each.case, each.metric): each for each in rows}


def _commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("benchmark", help="name of a script in this folder, without .py")
    options.add_argument("other", type=Path, help="folder of the other checkout")
    options.add_argument("--turns", type=int, default=6, help="runs of each checkout")
    options.add_argument(
        "--at-once",
        type=int,
        default=0,
        metavar="N",
        help="number of parallel runs of each checkout",
    )
    options.add_argument("--commit", help="commit of the other checkout, if git does not know it")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, given = options.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if arguments.at_once and arguments.turns % 2:
        options.error(
            f"--turns must be even, or one has a half of the cores more often, got {arguments.turns}"
        )
    checkouts = {"this": HERE.parent, "other": arguments.other.resolve()}
    found: dict[str, list[dict[tuple[str, str], Row]]] = defaultdict(list)
    cores = sorted(os.sched_getaffinity(0))
    num_shares = 2 * arguments.at_once or 1
    size = len(cores) // num_shares
    if size < 1:
        options.error(
            f"--at-once must be at most half of the {len(cores)} cores, got {arguments.at_once}"
        )
    shares = [cores[size * index : size * (index + 1)] for index in range(num_shares)]
    with ThreadPoolExecutor(num_shares) as runs:
        for turn in range(arguments.turns):
            order = sorted(checkouts, reverse=bool(turn % 2)) * (arguments.at_once or 1)
            pending = [
                runs.submit(figures, checkouts[which], arguments.benchmark, given, share)
                for which, share in zip(
                    order, shares if arguments.at_once else 2 * shares, strict=True
                )
            ]
            for which, run in zip(order, pending, strict=True):
                found[which].append(run.result())
    commit = arguments.commit or _commit_of(checkouts["other"])
    rows: list[Row] = []
    for key, first in found["this"][0].items():
        if any(key not in each for results in found.values() for each in results):
            continue
        ours, theirs = ([each[key].value for each in found[which]] for which in checkouts)
        ratios = [a / b if b else math.inf for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            ComparedRow(
                first.case,
                first.metric,
                median_p95(ours)[0],
                first.unit,
                f"at {commit}",
                median_p95(theirs)[0],
                median_p95(ratios)[0],
                *interval(ratios),
                len(ratios),
            )
        )
    report(rows, arguments.json, f"{arguments.benchmark}, medians of {len(found['this'])} runs")


if __name__ == "__main__":
    main()
