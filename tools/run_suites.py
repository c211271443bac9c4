"""Run `make test` and the suites of every run, then as many of the other suites as the time allows.

All suites together take over two hours on two cores, and CI has one hour. So the other suites form a ring, and each
run starts at a place that depends on the time and moves every three hours. A suite starts only if it should end in
time: its expected time is its minutes in `EVERY` or `MINUTES`, multiplied by the slowness of this machine, which
`make test` shows. A suite that exceeds the time left is stopped. The last lines list the suites that passed, failed,
were stopped, or did not start.

    python3 tools/run_suites.py [--minutes 55]      run them; the exit status is the first failed suite's
    python3 tools/run_suites.py --list              print the order of this run with minutes
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

EVERY = {"test": 18.0, "test-security": 2.0, "test-scripts": 8.0}
"""Suites of every run, and their minutes without set-up on two idle cores of the CI machine."""
MINUTES = {
    "test-megatron": 2.0,
    "test-long": 13.0,
    "test-truth": 20.0,
    "test-clusters": 7.0,
    "test-browser": 1.0,
    "test-hosts": 17.0,
    "test-rdma": 12.0,
    "test-engines": 27.0,
    "test-integrations": 31.0,
}
"""Other suites in the order of the ring, and their minutes."""
PERIOD_S = 3 * 3600
PLACES_PER_PERIOD = 2


def order_at(time_s: float) -> Sequence[str]:
    """Return the order of the ring for a run that starts at this time, in seconds since 1970."""
    ring = tuple(MINUTES)
    place = int(time_s // PERIOD_S) * PLACES_PER_PERIOD % len(ring)
    return (*ring[place:], *ring[:place])


def run(target: str, deadline: float) -> tuple[int | None, float]:
    """Run a target of the Makefile.

    Args:
        target: name of the target.
        deadline: value of `time.monotonic` at which the target and all processes of its session are stopped.

    Returns:
        Exit status, or None if the target was stopped, and duration in seconds.
    """
    began = time.monotonic()
    print(f"run_suites: make {target}", flush=True)
    process = subprocess.Popen(("make", target), start_new_session=True)
    try:
        return process.wait(max(1.0, deadline - began)), time.monotonic() - began
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None, time.monotonic() - began


def main(words: Sequence[str]) -> int:
    """Run the suites and print their results."""
    parser = argparse.ArgumentParser(
        prog="run_suites.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=55.0, help="time of the whole run")
    parser.add_argument("--list", action="store_true", help="print the order and run nothing")
    known = parser.parse_args(words)
    order, minutes = order_at(time.time()), {**EVERY, **MINUTES}
    if known.list:
        for target in (*EVERY, *order):
            print(f"{minutes[target]:5.1f} min  make {target}")
        return 0
    deadline = time.monotonic() + known.minutes * 60
    first, *others = (*EVERY, *order)
    status, seconds = run("setup", float("inf"))
    if not status:
        status, seconds = run(first, float("inf"))
    if status:
        return status
    said = [f"make {first}: passed in {seconds:.0f} s"]
    slowness = max(1.0, seconds / (minutes[first] * 60))
    for target in others:
        left = deadline - time.monotonic()
        if minutes[target] * 60 * slowness > left:
            said.append(f"make {target}: not run, expected {minutes[target] * slowness:.0f} min")
            continue
        status, seconds = run(target, deadline)
        ended = "stopped" if status is None else "failed" if status else "passed"
        said.append(f"make {target}: {ended} in {seconds:.0f} s")
        if status:
            break
    for line in said:
        print(f"run_suites: {line}", flush=True)
    return status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
