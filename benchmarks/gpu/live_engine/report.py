"""Names of the rows of a run."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from harness import Row
from windlass.config import UpdateMode


@dataclass(frozen=True)
class Stage:
    """Updates of one kind. `num_multiprocessors`: limit for the trainers' stores; 0 for all."""

    label: str
    mode: UpdateMode
    num_multiprocessors: int = 0


def plan_of(options: argparse.Namespace) -> list[Stage]:
    in_place = Stage("in_place", UpdateMode.IN_PLACE)
    if options.in_place_only:
        return [in_place]
    stages = [in_place, Stage("staged", UpdateMode.STAGED)]
    if options.budget:
        label = f"staged by {options.budget} multiprocessors"
        stages.append(Stage(label, UpdateMode.STAGED, options.budget))
    return stages


def case_of(options: argparse.Namespace, stage: Stage, nbytes: int) -> str:
    decode = "by graphs" if options.cuda_graphs else "eager"
    return (
        f"{options.trainer} -> {options.engine} TP{options.tp}, {options.model} "
        f"({nbytes / 1e9:.1f} GB{_label(options)}), {stage.label}, {options.load} streams, decode {decode}"
    )


def capture_rows(case: str, log: Path) -> list[Row]:
    """Return rows for the slowest rank's capture, from the launcher's log."""
    found = re.findall(r"seconds of its capture: (.*)", log.read_text(errors="replace"))
    if not found:
        return []
    stages = {name: float(value) for name, value in re.findall(r"(\w[a-z ]*) ([\d.]+)", found[-1])}
    total = stages.pop("all")
    loads = sum(seconds for name, seconds in stages.items() if name in ("digits", "random values"))
    rows = [Row(case, "capture", total, "s", "its loads", loads)]
    for name, seconds in stages.items():
        rows.append(Row(case, f"capture, {name}", seconds, "s", "all of it", total))
    return rows


def _label(options: argparse.Namespace) -> str:
    if options.quantization == "fp8-block":
        return ", bfloat16 -> block float8"
    return ", from a checkpoint" if options.from_checkpoint else ""
