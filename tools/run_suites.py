"""Run `make test` and the suites of every run, then parts of the other suites while time is left.

All suites together take over two hours on two cores, and CI has one hour. So the other suites are cut into parts of
a few minutes (`pytest-split`) and form a ring. Each run starts three suites later in the ring than the run of the hour
before it, so every suite gets its turn in three runs, with its next part. A part starts only if it should end in time:
its expected time is multiplied by the slowness of this machine, which `make test` shows. A part that exceeds the time
left is stopped. The last lines list the parts that passed, failed, were stopped, or did not start.

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
from dataclasses import dataclass

EVERY = {"test": 21.0, "test-security": 3.0, "test-scripts": 11.0, "test-browser": 1.5}
"""Suites of every run, and their minutes without set-up on two idle cores."""
SPREAD = "--splitting-algorithm least_duration"
"""Option of pytest-split: every part gets tests of each file. Otherwise one part gets all slow tests, and is stopped."""
PERIOD_S = 3600
PLACES_PER_PERIOD = 3


@dataclass(frozen=True)
class Suite:
    """A suite of the ring.

    Attributes:
        minutes: time of its tests on two idle cores.
        num_parts: number of parts that it is cut into.
        set_up_minutes: time that each part needs before its first test.
    """

    minutes: float
    num_parts: int = 1
    set_up_minutes: float = 0.0

    @property
    def part_minutes(self) -> float:
        """Minutes of one part."""
        return self.set_up_minutes + self.minutes / self.num_parts


# `make test-truth` is not in the ring: each of its tests is also in test-engines, test-integrations, test-megatron or test.
RING = {
    "test-megatron": Suite(15, 3, 1),
    "test-hosts": Suite(17, 3, 3),
    "test-rollouts": Suite(16, 3),
    "test-long": Suite(24, 5),
    "test-engines": Suite(60, 8, 3),
    "test-clusters": Suite(10, 2, 4),
    "test-integrations": Suite(31, 7, 4),
    "test-rdma": Suite(12, 3, 2),
}


def order_at(time_s: float) -> Sequence[str]:
    """Return the order of the ring for a run that starts at this time, in seconds since 1970."""
    ring = tuple(RING)
    place = int(time_s // PERIOD_S) * PLACES_PER_PERIOD % len(ring)
    return (*ring[place:], *ring[:place])


def part_at(target: str, time_s: float) -> tuple[str, ...]:
    """Return the arguments of make for the next part of a suite.

    Place the suites one after the other on an endless line of turns. A run takes the next `PLACES_PER_PERIOD` places, and
    a suite's next place tells how many turns the suite has had.
    """
    num_parts = RING[target].num_parts
    if num_parts == 1:
        return ()
    place = int(time_s // PERIOD_S) * PLACES_PER_PERIOD
    ahead = order_at(time_s).index(target)
    group = (place + ahead) // len(RING) % num_parts + 1
    return (f"ARGS=--splits {num_parts} --group {group} {SPREAD}",)


def run(words: Sequence[str], deadline: float) -> tuple[int | None, float]:
    """Run a target of the Makefile.

    Args:
        words: arguments of make.
        deadline: value of `time.monotonic` at which the target and all processes of its session are stopped.

    Returns:
        Exit status, or None if the target was stopped, and duration in seconds.
    """
    began = time.monotonic()
    print(f"run_suites: make {' '.join(words)}", flush=True)
    process = subprocess.Popen(("make", *words), start_new_session=True)
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


def main(arguments: Sequence[str]) -> int:
    """Run the suites and print their results."""
    parser = argparse.ArgumentParser(
        prog="run_suites.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=55.0, help="time of the whole run")
    parser.add_argument("--list", action="store_true", help="print the order and run nothing")
    known = parser.parse_args(arguments)
    began = time.time()
    work: list[tuple[tuple[str, ...], float]] = [
        ((target,), minutes) for target, minutes in EVERY.items()
    ]
    work += [((t, *part_at(t, began)), RING[t].part_minutes) for t in order_at(began)]
    if known.list:
        for words, minutes in work:
            print(f"{minutes:5.1f} min  make {' '.join(words)}")
        return 0
    deadline = time.monotonic() + known.minutes * 60
    (first, expected), *others = work
    status, seconds = run(("setup",), float("inf"))
    if not status:
        status, seconds = run(first, float("inf"))
    if status:
        return status
    said = [f"make {first[0]}: passed in {seconds:.0f} s"]
    slowness = max(1.0, seconds / (expected * 60))
    for words, minutes in others:
        what = f"make {' '.join(words)}"
        if minutes * 60 * slowness > deadline - time.monotonic():
            said.append(f"{what}: not run, expected {minutes * slowness:.0f} min")
            continue
        status, seconds = run(words, deadline)
        ended = "stopped" if status is None else "failed" if status else "passed"
        said.append(f"{what}: {ended} in {seconds:.0f} s")
        if status:
            break
    for line in said:
        print(f"run_suites: {line}", flush=True)
    return status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
