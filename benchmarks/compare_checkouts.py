"""Every figure of a benchmark in this checkout and in another one, run in turns on one machine.

A machine is not equally fast all the time, so one run of each would compare two moments of it.

    git worktree add FOLDER COMMIT
    python benchmarks/compare_checkouts.py bench_rollout FOLDER --json FILE -- --only throughput
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from harness import Row, median_p95, parser, report

HERE = Path(__file__).resolve().parent
DEADLINE_S = 3600.0


def figures(checkout: Path, benchmark: str, options: list[str]) -> dict[tuple[str, str], Row]:
    """Run a benchmark of a checkout; its rows by case and metric."""
    folders = ("src", "tests/support", "benchmarks")
    paths = os.pathsep.join(str(checkout / folder) for folder in folders)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        subprocess.run(
            [sys.executable, f"benchmarks/{benchmark}.py", "--json", str(found), *options],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths},
            check=True,
            timeout=DEADLINE_S,
            stdout=subprocess.DEVNULL,
        )
        rows = [Row(**each) for each in json.loads(found.read_text())]
    return {(each.case, each.metric): each for each in rows}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("benchmark", help="name of a script beside this one")
    options.add_argument("other", type=Path, help="the other checkout")
    options.add_argument("--turns", type=int, default=5, help="runs of each checkout")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, given = options.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    checkouts = {"this": HERE.parent, "other": arguments.other.resolve()}
    found: dict[str, list[dict[tuple[str, str], Row]]] = defaultdict(list)
    for turn in range(arguments.turns):
        for which in sorted(checkouts, reverse=bool(turn % 2)):
            found[which].append(figures(checkouts[which], arguments.benchmark, given))
    commit = subprocess.run(
        ["git", "-C", str(checkouts["other"]), "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    rows = []
    for key, first in found["this"][0].items():
        if any(key not in each for runs in found.values() for each in runs):
            continue
        ours, theirs = (
            median_p95([each[key].value for each in found[which]])[0] for which in checkouts
        )
        rows.append(
            Row(
                case=first.case,
                metric=first.metric,
                value=ours,
                unit=first.unit,
                reference=f"at {commit}",
                reference_value=theirs,
                ratio=ours / theirs if theirs else float("inf"),
            )
        )
    report(rows, arguments.json, f"{arguments.benchmark}, medians of {arguments.turns} turns")


if __name__ == "__main__":
    main()
