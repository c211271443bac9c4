"""Run `make test` and the suites of every run, then as many of the other suites as the time allows.

All suites together take over two hours on two cores, and CI may take one. So the other suites form a ring, and each
run begins at another place of it: the place follows from the time and moves every three hours. A suite starts only if
it is expected to end in time. The expectation is its minutes in `EVERY` or `MINUTES` times the slowness of this machine,
which `make test` has shown. A suite that takes longer than all time that is left is stopped. The last lines say which
suites passed, failed, were stopped, or did not start.

    python3 tools/run_suites.py [--minutes 55]      run them; the exit status is that of the first suite that failed
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
"""Suites of every run, and their minutes without set-up on two idle cores of the machine that CI has."""
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
    """Return the ring as a run takes it that starts at this time, in seconds since 1970."""
    ring = tuple(MINUTES)
    place = int(time_s // PERIOD_S) * PLACES_PER_PERIOD % len(ring)
    return (*ring[place:], *ring[:place])


def run(target: str, deadline: float) -> tuple[int | None, float]:
    """Run a target of the Makefile.

    Args:
        target: its name.
        deadline: time of `time.monotonic` at which it is stopped, with all processes of its session.

    Returns:
        Its exit status, None if it was stopped, and its seconds.
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
    """Run the suites and print what ran."""
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
