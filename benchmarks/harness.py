"""Code that all benchmarks share: rows, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Makes `tools.plan` importable, which benchmarks use for plans.
sys.path.append(str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True, slots=True)
class Row:
    """Figure and its reference from the same run.

    `ratio`: value divided by the reference, if no other ratio is given.
    """

    case: str
    metric: str
    value: float
    unit: str
    reference: str
    reference_value: float
    ratio: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.ratio):
            object.__setattr__(self, "ratio", self.value / self.reference_value)


def median_p95(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile (nearest rank) of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return median, ordered[math.ceil(0.95 * len(ordered)) - 1]


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return made


def report(rows: Sequence[Row], json_path: Path | None, title: str) -> None:
    """Print `rows` and, if there is a path, write them as a JSON list."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "metric", "value", "unit", "reference", "reference value", "ratio"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in rows:
        table.add_row(
            row.case,
            row.metric,
            f"{row.value:.4g}",
            row.unit,
            row.reference,
            f"{row.reference_value:.4g}",
            f"{row.ratio:.3g}",
        )
    Console(width=140).print(table)
    save(rows, json_path)


def save(rows: Sequence[Row], json_path: Path | None) -> None:
    """Write `rows` as a JSON list, if there is a path."""
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
