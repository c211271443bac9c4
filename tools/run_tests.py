"""Run pytest, and run failed tests a second time, alone.

A test can exceed a deadline because the machine is busy. So a failed test runs again while no other test runs, and the
command fails only if the test fails again. Tests that pass the second time are printed and counted. The command also
fails if there are more than `--max-unsteady` of them.

    python tools/run_tests.py [--max-unsteady N] PYTEST-ARGUMENTS
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS_FAILED = 1
"""pytest's exit status when a test failed."""
ALONE = (
    "-n",
    "0",
    "--last-failed",
    "--last-failed-no-failures",
    "none",
    "--splits",
    "1",
    "--group",
    "1",
)
"""Arguments of the second run. One split replaces the caller's splits: pytest-split would cut the failed tests again."""


def main(words: Sequence[str]) -> int:
    """Return the exit status of pytest, or 1 if too many tests passed only alone."""
    parser = argparse.ArgumentParser(
        prog="run_tests.py", description=__doc__, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--max-unsteady", type=int, default=2)
    known, arguments = parser.parse_known_args(words)
    with tempfile.TemporaryDirectory(prefix="windlass-tests-") as folder:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}", *arguments]
        status = subprocess.run(command, check=False).returncode
        if status != TESTS_FAILED:
            return status
        failed = failed_tests(Path(folder))
        print(f"run_tests: {len(failed)} tests failed and run again, alone", flush=True)
        # With the options of `ALONE`, pytest does not find a named test that has passed, so name its file.
        again = [word.partition("::")[0] for word in command]
        status = subprocess.run([*again, *ALONE], check=False).returncode
        unsteady = sorted(failed - failed_tests(Path(folder)))
    print(f"run_tests: {len(unsteady)} tests failed beside others and passed alone", flush=True)
    for test in unsteady:
        print(f"run_tests:   {test}", flush=True)
    if status == 0 and len(unsteady) > known.max_unsteady:
        print(f"run_tests: at most {known.max_unsteady} may; make them steady", flush=True)
        return TESTS_FAILED
    return status


def failed_tests(cache: Path) -> set[str]:
    """Return the names of the tests that pytest's cache lists as failed."""
    file = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(file.read_text())) if file.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
