"""`tools/run_tests.py` runs failed tests again, alone; `tools/run_suites.py` runs every suite in turn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.run_suites import EVERY, PERIOD_S, PLACES_PER_PERIOD, RING, order_at, part_at

ROOT = Path(__file__).resolve().parents[2]
NOT_SUITES = {"test-truth", "test-all"}
"""Targets that only repeat tests of suites: each test of test-truth is also in another suite."""
UNSTEADY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({number}))
def test_unsteady(number):
    mark = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    was_there = mark.exists()
    mark.touch()
    assert was_there

def test_steady():
    assert {steady}
"""


def test_ci_knows_every_suite_of_the_makefile() -> None:
    targets = set(re.findall(r"^(test[a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*EVERY, *RING} == targets - NOT_SUITES


def test_every_suite_of_ci_gets_a_turn_in_three_runs() -> None:
    orders = [order_at(number * PERIOD_S) for number in range(100, 103)]
    assert all(sorted(order) == sorted(RING) for order in orders)
    turns = [target for order in orders for target in order[:PLACES_PER_PERIOD]]
    assert {*turns} == {*RING}


@pytest.mark.parametrize("target", RING)
def test_the_turns_of_a_suite_go_through_all_its_parts(target: str) -> None:
    num_parts = RING[target].num_parts
    turns = [
        part_at(target, number * PERIOD_S)
        for number in range(len(RING) * num_parts)
        if target in order_at(number * PERIOD_S)[:PLACES_PER_PERIOD]
    ]
    assert len(turns) == PLACES_PER_PERIOD * num_parts
    assert turns == turns[:num_parts] * PLACES_PER_PERIOD
    assert len({*turns}) == num_parts


@pytest.mark.parametrize(
    ("number", "steady", "status", "says"),
    [
        (0, True, 0, "1 passed"),
        (2, True, 0, "2 tests failed beside others and passed alone"),
        (3, True, 1, "at most 2 may"),
        (1, False, 1, "1 tests failed beside others and passed alone"),
    ],
)
def test_a_failed_test_runs_again_alone_and_is_counted(
    number: int, steady: bool, status: int, says: str, tmp_path: Path
) -> None:
    ran = run_tests(UNSTEADY.format(number=number, steady=steady), tmp_path)
    assert (ran.returncode, says in ran.stdout) == (status, True), ran.stdout + ran.stderr


@pytest.mark.parametrize("group", ["1", "2", "3"])
def test_a_failed_test_of_a_split_runs_again(group: str, tmp_path: Path) -> None:
    ran = run_tests(
        UNSTEADY.format(number=2, steady=False), tmp_path, "--splits", "3", "--group", group
    )
    assert "1 tests failed and run again, alone" in ran.stdout
    is_unsteady = group != "3"
    assert ran.returncode == (0 if is_unsteady else 1), ran.stdout + ran.stderr
    assert f"{int(is_unsteady)} tests failed beside others and passed alone" in ran.stdout


def test_a_failed_test_that_the_caller_names_runs_again(tmp_path: Path) -> None:
    """`make test-security` names single tests, also of files without a failed test."""
    other = tmp_path / "test_others.py"
    other.write_text("def test_other(): ...\n")
    named = f"{tmp_path / 'test_them.py'}::test_unsteady", f"{other}::test_other"
    ran = run_tests(UNSTEADY.format(number=1, steady=True), tmp_path, *named)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 tests failed beside others and passed alone" in ran.stdout


def run_tests(tests: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tools/run_tests.py` on this source of a test file."""
    (folder / "test_them.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    script = ROOT / "tools" / "run_tests.py"
    named = any("::" in word for word in arguments)
    where = () if named else (str(folder),)
    command = [sys.executable, str(script), "-q", "-n", "2", *where, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
