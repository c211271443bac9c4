"""Run schedules, and reduce a failing schedule: `python tests/support/chaos_run.py --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
from chaos_bugs import ALL_BUGS, INTRUDER_BUGS, RARE_BUGS, Bug
from chaos_minimise import minimise
from chaos_schedule import ATTACKED_FROM, Schedule, generate
from chaos_world import Result, run_schedule

SCHEDULES_PER_TASK = 10
MAX_SCHEDULES = 120
"""Number of schedules that must suffice to find a planted bug."""


def run_seed(seed: int) -> Result:
    """Run the schedule of a seed."""
    return run_schedule(generate(seed))


def run_seeds(seeds: tuple[int, ...]) -> list[Result]:
    results = [run_seed(seed) for seed in seeds]
    for result in results:
        result.trace.clear()
    return results


def run_rounds(num_rounds: int, *, first_seed: int, num_processes: int) -> Iterable[Result]:
    """Yield results of schedules until `num_rounds` rounds have run; half of the schedules have intruders."""
    done = 0
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        seed = first_seed
        while done < num_rounds:
            tasks = []
            for _ in range(2 * num_processes):
                seeds = range(seed, seed + SCHEDULES_PER_TASK // 2)
                tasks.append((*seeds, *(ATTACKED_FROM + each for each in seeds)))
                seed = seeds.stop
            for results in pool.map(run_seeds, tasks):
                for result in results:
                    done += result.num_rounds
                    yield result


def explain(result: Result) -> str:
    """Reduce a failing schedule and return it as text that can be run again."""
    small = minimise(result.schedule, lambda schedule: bool(run_schedule(schedule).violation))
    again = run_schedule(small)
    lines = [
        f"seed {result.schedule.seed}: {result.violation}",
        f"minimised to {len(small.events)} of {len(result.schedule.events)} events:",
        again.violation,
        *again.trace[-30:],
        "run it again: python tests/support/chaos_run.py --schedule - <<'END'",
        msgspec.json.encode(small).decode(),
        "END",
    ]
    return "\n".join(lines)


class Found(msgspec.Struct, frozen=True):
    """Result of the search for a planted bug. `violation` is empty if no schedule found the bug."""

    bug: str
    seed: int
    violation: str
    num_schedules: int
    num_rounds: int
    seconds: float


def find(bug: Bug, *, max_schedules: int, hint: bool = True) -> Found:
    """Search for a planted bug: first with the seed of an earlier search, then with seeds in
    order.

    Args:
        max_schedules: schedules after which the bug counts as not found.
        hint: start with `bug.seed`.
    """
    began = time.monotonic()
    seeds = [bug.seed] if hint and bug.seed >= 0 else []
    first = ATTACKED_FROM if bug in INTRUDER_BUGS else 0
    seeds += [seed for seed in range(first, first + max_schedules) if seed not in seeds]
    num_rounds = num_schedules = 0
    result = None
    with bug.planted():
        for seed in seeds[:max_schedules]:
            result = run_seed(seed)
            num_schedules += 1
            num_rounds += result.num_rounds
            if result.violation:
                break
    seconds = time.monotonic() - began
    if result is None or not result.violation:
        return Found(bug.name, -1, "", num_schedules, num_rounds, seconds)
    return Found(
        bug.name, result.schedule.seed, result.violation, num_schedules, num_rounds, seconds
    )


def find_by_number(number: int, max_schedules: int, hint: bool) -> Found:
    """Call `find` in a process of a pool."""
    return find(ALL_BUGS[number], max_schedules=max_schedules, hint=hint)


def find_bugs(
    num_processes: int, *, max_schedules: int, hint: bool = True, rare: bool = False
) -> Iterable[Found]:
    """Yield the result of every search, as the searches end."""
    numbers = range(len(ALL_BUGS) - (0 if rare else len(RARE_BUGS)))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        searches = [pool.submit(find_by_number, number, max_schedules, hint) for number in numbers]
        for search in as_completed(searches):
            yield search.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run the schedule of this seed")
    parser.add_argument("--schedule", help="run a schedule from this file, - for stdin")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bugs", action="store_true", help="plant each bug and look for it")
    parser.add_argument("--max-schedules", type=int, default=MAX_SCHEDULES)
    parser.add_argument("--search", action="store_true", help="forget the seeds found before")
    parser.add_argument(
        "--plant", default="", choices=[bug.name for bug in ALL_BUGS], metavar="NAME"
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.plant:
        with next(bug for bug in ALL_BUGS if bug.name == options.plant).planted():
            return _chosen(options)
    return _chosen(options)


def _chosen(options: argparse.Namespace) -> int:
    if options.bugs:
        return _find_bugs(options.processes, options.max_schedules, hint=not options.search)
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


def _find_bugs(num_processes: int, max_schedules: int, *, hint: bool) -> int:
    missed = 0
    for found in find_bugs(num_processes, max_schedules=max_schedules, hint=hint, rare=True):
        missed += not found.violation
        print(describe(found), flush=True)
    return min(missed, 1)


def describe(found: Found) -> str:
    """Return the result of a search as one line."""
    said = f"seed {found.seed}: {found.violation}" if found.violation else "NOT FOUND"
    return (
        f"{found.bug}: {found.num_schedules} schedules, {found.num_rounds} rounds, "
        f"{found.seconds:.1f} s, {said[:160]}"
    )


def summary(results: list[Result], seconds: float) -> str:
    injected = sum((result.injected for result in results), Counter[str]())
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(injected.items()))
    return (
        f"{len(results)} schedules, {sum(r.num_rounds for r in results)} rounds "
        f"({sum(r.num_published for r in results)} published), "
        f"{sum(r.num_rollouts for r in results)} engine requests, "
        f"{sum(r.num_messages for r in results)} messages, "
        f"{sum(r.num_restarts for r in results)} restarts, "
        f"{sum(r.simulated_s for r in results):.0f} s simulated in {seconds:.0f} s: "
        f"no invariant broken\nfaults injected: {faults}"
    )


if __name__ == "__main__":
    sys.exit(main())
