"""Run schedules, and make a failing one small: `python tests/chaos/chaos_run.py --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
from chaos_bugs import BUGS, Bug
from chaos_minimise import minimise
from chaos_schedule import Schedule, generate
from chaos_world import Result, run_schedule

SCHEDULES_PER_TASK = 10


def run_seed(seed: int) -> Result:
    """The schedule of a seed."""
    return run_schedule(generate(seed))


def run_seeds(seeds: tuple[int, ...]) -> list[Result]:
    results = [run_seed(seed) for seed in seeds]
    for result in results:
        result.trace.clear()
    return results


def run_rounds(num_rounds: int, *, first_seed: int, num_processes: int) -> Iterable[Result]:
    """Results of one schedule after another until there were so many rounds."""
    done = 0
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        seed = first_seed
        while done < num_rounds:
            tasks = []
            for _ in range(2 * num_processes):
                tasks.append(tuple(range(seed, seed + SCHEDULES_PER_TASK)))
                seed += SCHEDULES_PER_TASK
            for results in pool.map(run_seeds, tasks):
                for result in results:
                    done += result.num_rounds
                    yield result


def explain(result: Result) -> str:
    """A failing schedule, made small, as text that can be run again."""
    small = minimise(result.schedule, lambda schedule: bool(run_schedule(schedule).violation))
    again = run_schedule(small)
    lines = [
        f"seed {result.schedule.seed}: {result.violation}",
        f"minimised to {len(small.events)} of {len(result.schedule.events)} events:",
        again.violation,
        *again.trace[-30:],
        "run it again: python tests/chaos/chaos_run.py --schedule - <<'END'",
        msgspec.json.encode(small).decode(),
        "END",
    ]
    return "\n".join(lines)


def find(bug: Bug, *, max_schedules: int, first_seed: int = 0) -> tuple[Result | None, int]:
    """The first schedule that finds a planted bug, and how many rounds that took."""
    num_rounds = 0
    with bug.planted():
        for seed in range(first_seed, first_seed + max_schedules):
            result = run_seed(seed)
            num_rounds += result.num_rounds
            if result.violation:
                return result, num_rounds
    return None, num_rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run the schedule of this seed")
    parser.add_argument("--schedule", help="run a schedule from this file, - for stdin")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bugs", action="store_true", help="plant each bug and look for it")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.bugs:
        return _find_bugs()
    if options.schedule is not None:
        text = sys.stdin.read() if options.schedule == "-" else Path(options.schedule).read_text()
        return _one(msgspec.json.decode(text, type=Schedule), verbose=options.verbose)
    if options.seed is not None:
        return _one(generate(options.seed), verbose=options.verbose)
    return _many(options.rounds, options.first_seed, options.processes)


def _one(schedule: Schedule, *, verbose: bool) -> int:
    result = run_schedule(schedule, verbose=verbose)
    if result.violation:
        print(explain(result))
        return 1
    print(summary([result], 0.0))
    return 0


def _many(num_rounds: int, first_seed: int, num_processes: int) -> int:
    began = time.monotonic()
    results: list[Result] = []
    for result in run_rounds(num_rounds, first_seed=first_seed, num_processes=num_processes):
        results.append(result)
        if len(results) % 50 == 0:
            print(summary(results, time.monotonic() - began), flush=True)
        if result.violation:
            print(explain(result))
            return 1
    print(summary(results, time.monotonic() - began))
    return 0


def _find_bugs() -> int:
    missed = 0
    for bug in BUGS:
        began = time.monotonic()
        found, num_rounds = find(bug, max_schedules=150)
        missed += found is None
        said = "NOT FOUND" if found is None else f"seed {found.schedule.seed}: {found.violation}"
        print(f"{bug.name}: {num_rounds} rounds, {time.monotonic() - began:.1f} s, {said[:160]}")
        sys.stdout.flush()
    return min(missed, 1)


def summary(results: list[Result], seconds: float) -> str:
    return (
        f"{len(results)} schedules, {sum(r.num_rounds for r in results)} rounds "
        f"({sum(r.num_published for r in results)} published), "
        f"{sum(r.num_rollouts for r in results)} engine requests, "
        f"{sum(r.num_messages for r in results)} messages, "
        f"{sum(r.num_faults for r in results)} message and wire faults, "
        f"{sum(len(r.schedule.events) for r in results)} events, "
        f"{sum(r.num_restarts for r in results)} restarts, "
        f"{sum(r.simulated_s for r in results):.0f} s simulated in {seconds:.0f} s: "
        "no invariant broken"
    )


if __name__ == "__main__":
    sys.exit(main())
