"""The whole system runs on a simulated clock under schedules that contain every kind of fault."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from chaos_bugs import ALL_BUGS, BUGS, INTRUDER_BUGS, Bug
from chaos_minimise import minimise
from chaos_run import (
    MAX_SCHEDULES,
    Found,
    describe,
    explain,
    find_bugs,
    run_rounds,
    run_seed,
    summary,
)
from chaos_schedule import (
    ATTACKED_FROM,
    INTRUDERS,
    MESSAGE_FAULTS,
    Event,
    Kind,
    Schedule,
    WireFault,
    generate,
)
from chaos_world import run_schedule

from windlass.config import UpdateMode

SMOKE_SEEDS = (*range(1000, 1006), *range(ATTACKED_FROM, ATTACKED_FROM + 4))
PROCESSES = len(os.sched_getaffinity(0))

# Unchanged schedules that found a bug in the product.
FOUND = {
    "a write that is lost with its connection holds its engines for ever": (
        '{"seed":6,"mode":"in_place","duration_s":5.0,"events":['
        '{"at_s":1.3531,"kind":"stall","who":"b/0","amount":3.173},'
        '{"at_s":3.4375,"kind":"part","who":"trainer/1","other":"controller","amount":3.267}]}'
    ),
    "a full disk leaves a routed engine with mixed weights": (
        '{"seed":52,"mode":"in_place","duration_s":5.1069,"events":['
        '{"at_s":0.2736,"kind":"message","who":"trainer/1","other":"controller","fault":"cut"},'
        '{"at_s":4.1635,"kind":"stall","who":"b/1","amount":0.39},'
        '{"at_s":4.6069,"kind":"disk_full","who":"controller","amount":3.131}]}'
    ),
    "an engine whose connection breaks while it binds is refused for good": (
        '{"seed":0,"mode":"staged","duration_s":7.0,"events":['
        '{"at_s":4.1708,"kind":"message","who":"b/1","other":"controller","fault":"lose"}]}'
    ),
    "an engine that was lost in mid round goes on when a later round is aborted": (
        '{"seed":132,"mode":"in_place","duration_s":8.0,"events":['
        '{"at_s":0.498,"kind":"stall","who":"b/0","amount":0.699},'
        '{"at_s":5.2892,"kind":"part","who":"c/0","other":"controller","amount":15.972},'
        '{"at_s":6.9991,"kind":"reset","who":"a/0","other":"controller","amount":2.576},'
        '{"at_s":7.649,"kind":"reset","who":"trainer/1","other":"controller","amount":2.088}]}'
    ),
    "a garbled frame ends its agent for good": (
        '{"seed":9,"mode":"staged","duration_s":4.0,"events":[{"at_s":2.1371,"kind":"message",'
        '"who":"controller","other":"trainer/0","fault":"corrupt"}]}'
    ),
    "a rank of an earlier start, which comes while all others are away, sends them away for good": (
        '{"seed":100092,"mode":"staged","duration_s":5.8056,"events":['
        '{"at_s":3.9179,"kind":"rival","who":"trainer/1","fault":"run","amount":3.416},'
        '{"at_s":5.3056,"kind":"rival","who":"trainer/0","fault":"start","amount":2.203}]}'
    ),
    "a rollout worker has any name, and the controller sends requests to any URL of it": (
        '{"seed":100007,"mode":"in_place","duration_s":2.4288,"events":['
        '{"at_s":1.9288,"kind":"intrude","who":"","fault":"worker"}]}'
    ),
    "wake-ups for versions that are over are kept": (
        '{"seed":100265,"mode":"in_place","duration_s":8.0,"events":['
        '{"at_s":2.2893,"kind":"intrude","who":"","fault":"predecessor"},'
        '{"at_s":2.5744,"kind":"foreign","who":"b/1","amount":1.961},'
        '{"at_s":4.8088,"kind":"intrude","who":"","fault":"no_apply"},'
        '{"at_s":7.9177,"kind":"intrude","who":"","fault":"no_apply"}]}'
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_schedules_that_once_failed_pass(what: str) -> None:
    result = run_schedule(msgspec.json.decode(FOUND[what], type=Schedule))
    assert not result.violation, result.trace[-20:]


def test_an_agent_tells_an_upgrade_from_a_simultaneous_connection_loss() -> None:
    # The bug was in the simulation: transports of asyncio report a lost connection only after the
    # waiting task has run.
    schedule = (
        '{"seed":3166,"mode":"in_place","duration_s":6.6388,"events":['
        '{"at_s":0.2129,"kind":"wire","who":"trainer/0","other":"c/0","fault":"short","count":4},'
        '{"at_s":1.5623,"kind":"reset","who":"b/1","other":"controller","amount":0.724},'
        '{"at_s":5.3936,"kind":"kill","who":"worker/1","amount":0.447},'
        '{"at_s":5.4342,"kind":"kill","who":"controller","amount":0.074},'
        '{"at_s":5.5834,"kind":"stall","who":"a/0","amount":6.77},'
        '{"at_s":6.1388,"kind":"kill","who":"controller","amount":0.039}]}'
    )
    result = run_schedule(msgspec.json.decode(schedule, type=Schedule))
    assert not result.violation, result.trace[-20:]


@pytest.mark.parametrize("seed", SMOKE_SEEDS)
def test_invariants_hold_under_a_generated_schedule(seed: int) -> None:
    result = run_seed(seed)
    assert not result.violation, explain(result)
    assert result.num_rounds > 0


def test_a_schedule_always_gives_the_same_run() -> None:
    first, second = run_seed(1001), run_seed(1001)
    assert first.trace == second.trace
    assert first.num_messages == second.num_messages


def test_a_failing_schedule_is_minimised_and_fails_again() -> None:
    bug = next(bug for bug in BUGS if bug.name == "every digest is right")
    flip = Event(1.0, Kind.WIRE, "trainer/0", other="a/0", fault=WireFault.FLIP, count=2)
    noise = [Event(0.5, Kind.RESET, "worker/0", other="controller"), Event(1.5, Kind.STALL, "c/0")]
    schedule = Schedule(5, UpdateMode.IN_PLACE, 3.0, (noise[0], flip, noise[1]))
    with bug.planted():
        small = minimise(schedule, lambda tried: bool(run_schedule(tried).violation))
        assert [event.kind for event in small.events] == [Kind.WIRE]
        assert small.events[0].count == 1
        assert "serves None" in run_schedule(small).violation
    assert not run_schedule(small).violation


REAL = (("cma", "in_place", 20), ("cma", "staged", 16), ("shm", "in_place", 16))


def run_real(cases: Sequence[tuple[str, str, int]]) -> None:
    """Run the cases in parallel, because the processes mostly wait for deadlines."""
    script = str(Path(__file__).parents[1] / "support" / "chaos_real.py")
    with ExitStack() as stack:
        running = []
        for transport, mode, rounds in cases:
            words = ["--rounds", str(rounds), "--transport", transport, "--mode", mode]
            process = subprocess.Popen(
                [sys.executable, script, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            said, _ = process.communicate(timeout=850)
            print(said[-3000:])
            assert process.returncode == 0, said[-3000:]


@pytest.mark.timeout(600)
def test_two_rounds_of_real_processes_break_no_invariant() -> None:
    """Check also that all rollouts end and that the command lines of the processes still work."""
    run_real([("cma", "in_place", 2)])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_processes_break_no_invariant() -> None:
    run_real(REAL)
    assert sum(rounds for _, _, rounds in REAL) >= 50


@pytest.mark.long
@pytest.mark.timeout(1150)
def test_ten_thousand_rounds_break_no_invariant() -> None:
    results = []
    began = time.monotonic()
    for result in run_rounds(10_000, first_seed=0, num_processes=PROCESSES):
        assert not result.violation, explain(result)
        results.append(result)
    print(summary(results, time.monotonic() - began))
    assert sum(result.num_rounds for result in results) >= 10_000
    injected = sum((result.injected for result in results), Counter[str]())
    wanted = {kind.value for kind in Kind} - {Kind.MESSAGE, Kind.WIRE, Kind.INTRUDE}
    wanted |= {f"wire {fault}" for fault in WireFault}
    wanted |= {f"message {fault}" for fault in (*MESSAGE_FAULTS, "replay")}
    wanted |= {f"intrude {intruder}" for intruder in INTRUDERS}
    assert wanted <= set(injected), f"never happened: {wanted - set(injected)}"


@pytest.fixture(scope="module")
def searches() -> dict[str, Found]:
    """Search for every planted bug on all cores."""
    found = {}
    for each in find_bugs(PROCESSES, max_schedules=MAX_SCHEDULES):
        print(describe(each), flush=True)
        found[each.bug] = each
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", [*BUGS, *INTRUDER_BUGS], ids=lambda bug: bug.name.replace(" ", "-"))
def test_every_planted_bug_is_found(bug: Bug, searches: dict[str, Found]) -> None:
    assert searches[bug.name].violation, describe(searches[bug.name])


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_text_of_every_planted_bug_is_in_the_product(bug: Bug) -> None:
    with bug.planted():
        pass


@pytest.mark.long
def test_the_printed_schedule_of_a_failure_is_small_and_fails_again() -> None:
    bug = next(bug for bug in BUGS if bug.name == "publish without verify")
    with bug.planted():
        result = run_seed(bug.seed)
        assert result.violation
        text = explain(result)
        print(text)
        small = msgspec.json.decode(text.split("END'\n")[1].split("\nEND")[0], type=Schedule)
        assert len(small.events) <= 2 < len(result.schedule.events)
        again = run_schedule(small)
        assert again.violation
        assert again.violation in text
    assert not run_schedule(small).violation


@pytest.mark.parametrize("seed", [7, ATTACKED_FROM + 7])
def test_a_schedule_survives_encoding(seed: int) -> None:
    schedule = generate(seed)
    text = msgspec.json.encode(schedule)
    assert msgspec.json.decode(text, type=Schedule) == schedule
