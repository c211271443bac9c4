"""Run the benchmarks that this machine supports, one after the other: python benchmarks/run.py [SUITE ...]."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from windlass.engines.launch import exit_at_signal
from windlass.envs import inherited_environment
from windlass.memory.cuda.driver import count_gpus

FOLDER = Path(__file__).resolve().parent
SCRIPTS_DEADLINE_S = 3600.0
STOP_DEADLINE_S = 60.0
"""Seconds that a benchmark has to end its child processes before it is killed."""
ON_CPU = (
    *("planner", "transports", "update", "replica", "control", "xccl", "relay", "engines"),
    *("rollout", "journal", "simulation"),
)
SUITES = {
    **{name: (f"bench_{name}.py", 0) for name in ON_CPU},
    "nvlink": ("gpu/bench_nvlink.py", 2),
    "live-engine": ("gpu/bench_live_engine.py", 4),
}
"""Name of a suite -> its script and its number of GPUs."""


def main() -> int:
    """Run the suites, write their rows as JSON and print their times; return 1 if a suite failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "suite", nargs="*", help=f"one of {', '.join(SUITES)}; default: all supported"
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "local")
    args = parser.parse_args()
    if unknown := [name for name in args.suite if name not in SUITES]:
        parser.error(f"suite must be one of {list(SUITES)}, got {unknown}")
    args.out.mkdir(parents=True, exist_ok=True)
    num_gpus = count_gpus()
    summary = Table("suite", "result", "seconds", "rows", box=None)
    failed = False
    for name in args.suite or SUITES:
        script, least_gpus = SUITES[name]
        if least_gpus > num_gpus:
            summary.add_row(name, f"needs {least_gpus} GPUs, found {num_gpus}", "", "")
            continue
        target = args.out / f"{Path(script).stem}.json"
        start = time.monotonic()
        status = run_script([sys.executable, str(FOLDER / script), "--json", str(target)])
        failed |= status != 0
        rows = len(json.loads(target.read_text())) if status == 0 else 0
        result = str(target) if status == 0 else f"failed with {status}"
        summary.add_row(name, result, f"{time.monotonic() - start:.0f}", str(rows))
    Console(markup=False).print(summary)
    return int(failed)


def run_script(command: Sequence[str]) -> int:
    """Run a script and return its exit status. If this process ends early, the script and its children end, too."""
    script = subprocess.Popen(command, env=inherited_environment(), start_new_session=True)
    try:
        return script.wait(SCRIPTS_DEADLINE_S)
    except BaseException:
        stop(script)
        raise


def stop(script: subprocess.Popen[bytes]) -> None:
    """Interrupt a script like Ctrl-C, so that launchers end their servers, which are in other process groups."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(script.pid, signal.SIGINT)
            script.wait(STOP_DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_at_signal)
    sys.exit(main())
