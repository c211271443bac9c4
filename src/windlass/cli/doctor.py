"""`windlass doctor`: what will and will not work here, and how to mend it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from windlass.cli.checks import Finding, Status, run_checks

__all__ = ["add_arguments", "run"]

_STYLES = {Status.WORKS: "green", Status.LIMITED: "yellow", Status.FAILS: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `windlass doctor`."""
    parser.add_argument(
        "--require", action="append", default=[], metavar="NAME",
        help="exit with 1 unless this check says that it works; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="also say whether the layout of this checkpoint can be captured",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when a required one is not there."""
    findings = run_checks(args.checkpoint)
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.status]
        table.add_row(finding.name, f"[{style}]{finding.status}[/]", finding.found, finding.remedy)
    Console().print(table)
    return 1 if _missing(findings, args.require) else 0


def _missing(findings: tuple[Finding, ...], required: list[str]) -> list[str]:
    works = {f.name for f in findings if f.status is Status.WORKS}
    return [name for name in required if name not in works]
