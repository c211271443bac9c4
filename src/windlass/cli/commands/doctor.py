"""`windlass doctor`: report what works in this environment, and how to repair what fails."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.cli import Command
from windlass.cli.checks import (
    FAILS,
    LIMITED,
    OTHER_PROJECT,
    PACKAGE,
    WORKS,
    Finding,
    check_flags,
    of_other_project,
    run_checks,
)
from windlass.cli.frameworks import FRAMEWORKS, check_entry_points, check_framework
from windlass.observability.live import LiveView, plain_console
from windlass.progress import Progress
from windlass.wording import install_command

_STYLES = {WORKS: "green", LIMITED: "yellow", FAILS: "red"}
_INTERPRETER_DEADLINE_S = 180.0

Report = dict[str, tuple[Finding, ...]]
"""Path of a Python interpreter -> findings in its environment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass doctor`."""
    parser.add_argument(
        "--require", action="append", default=[], metavar="NAME",
        help="exit with 1 unless this check reports `works`; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="also say whether the layout of this checkpoint can be captured",
    )  # fmt: skip
    parser.add_argument(
        "--engine-python", action="append", default=[], metavar="PATH",
        help="also check the environment of this interpreter, for example an engine's; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--engine-flags", action="append", default=[], metavar="'ENGINE OPTIONS'",
        help="also say whether updates work with these options: 'vllm --enable-sleep-mode'",
    )  # fmt: skip
    parser.add_argument(
        "--framework", choices=sorted(FRAMEWORKS),
        help="also check that this framework can load Windlass, here or with --engine-python; exit with 1 if it cannot",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print every finding; return 1 if a required check fails or the framework cannot load Windlass.

    Raises:
        ConfigError: `--engine-flags` does not start with the name of an engine, or lacks a closing quotation mark.
    """
    console = plain_console(stderr=True)
    progress = Progress(lambda _: None, is_shown=True)
    with LiveView(console, progress.text, is_transient=True):
        with progress.part("checking this environment"):
            flags = tuple(check_flags(command, args.checkpoint) for command in args.engine_flags)
            here = run_checks(args.checkpoint)
            here += check_entry_points(but=None if args.engine_python else args.framework)
            if args.framework and not args.engine_python:
                here += check_framework(args.framework)
        report: Report = {sys.executable: here + flags}
        for path in args.engine_python:
            with progress.part(f"checking {path}", _INTERPRETER_DEADLINE_S):
                report[path] = _check_interpreter(path, args.framework)
    if args.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(report)
    missing = _missing(report, args.require)
    if missing:
        known = sorted({finding.name for there in report.values() for finding in there})
        for name in missing:
            why = "does not work" if name in known else f"must be one of {known}"
            print(f"windlass doctor: --require {name}: {why}", file=sys.stderr)
    return 1 if missing or not _finds_windlass(args.framework, report) else 0


def _print(report: Mapping[str, Sequence[Finding]]) -> None:
    for path, findings in report.items():
        table = Table(box=None, pad_edge=False, title=path, title_justify="left", padding=(0, 1))
        for column in ("check", "", "found, and what to do"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            found, style = Text(finding.found), _STYLES[finding.status]
            if finding.remedy:
                found.append(f"\nto do: {finding.remedy}", style="bold")
            table.add_row(finding.name, Text(finding.status, style=style), found)
        Console(markup=False, emoji=False).print(table)


def _check_interpreter(path: str, framework: str | None) -> tuple[Finding, ...]:
    """Run `windlass doctor` with the interpreter at `path`, and return its findings.

    If the interpreter or Windlass cannot run there, return one finding that says so.
    """
    command = [path, "-m", "windlass.cli.main", "doctor", "--json"]
    command += ["--framework", framework] if framework else []
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_INTERPRETER_DEADLINE_S,
            check=False,
        )
    except OSError as error:
        return (Finding("interpreter", FAILS, str(error), "give the path of a Python"),)
    except subprocess.TimeoutExpired:
        found = f"no answer within {_INTERPRETER_DEADLINE_S:.0f} s"
        return (Finding("interpreter", FAILS, found),)
    lines = done.stdout.splitlines()
    try:
        (findings,) = msgspec.json.decode(lines[-1], type=Report).values()
    except (IndexError, ValueError, msgspec.MsgspecError):
        findings = ()
    if not findings or (done.returncode != 0 and not framework):
        if version := _other_project(path):
            remedy = f"{path} -m pip uninstall {OTHER_PROJECT}, then {install_command(python=path)}"
            return (Finding(PACKAGE, FAILS, of_other_project(version), remedy),)
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        remedy = (
            f"{install_command(python=path)}, or `pip install --target` into a folder on PYTHONPATH "
            "(docs/engines.md)"
        )
        return (Finding(PACKAGE, FAILS, f"cannot run with this Python: {said[-1]}", remedy),)
    return findings


def _other_project(path: str) -> str:
    """Return the version of `OTHER_PROJECT` in the environment of the Python at `path`; "" if it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({OTHER_PROJECT!r}))"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_INTERPRETER_DEADLINE_S,
            check=True,
        )
        return done.stdout.decode(errors="replace").strip()
    return ""


def _missing(report: Mapping[str, Sequence[Finding]], required: list[str]) -> list[str]:
    works = {f.name for there in report.values() for f in there if f.status is WORKS}
    return [name for name in required if name not in works]


def _finds_windlass(framework: str | None, report: Report) -> bool:
    """Return whether a checked Python has a supported release of the framework, and one can import Windlass's module for it.

    Return True if no framework is checked.
    """
    if framework is None:
        return True
    good = {f.name for there in report.values() for f in there if f.status is not FAILS}
    return {framework, FRAMEWORKS[framework].module} <= good


COMMAND = Command(
    "what works in this environment, and how to repair what fails", add_arguments, run
)
