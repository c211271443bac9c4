"""`windlass status URL`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from windlass.cli import Command
from windlass.cli.controller import add_controller, overview

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `windlass status`."""
    add_controller(parser)
    parser.add_argument("--json", action="store_true", help="print what the controller answered")


def run(args: argparse.Namespace) -> int:
    """Print the fleet, the last rounds, staleness and outstanding work."""
    view = overview(args)
    if args.json:
        print(msgspec.json.encode(view).decode())
        return 0
    _show(view, Console(markup=False))
    return 0


def _show(view: dict[str, Any], console: Console) -> None:
    now = f", now in {view['phase']}" if view["phase"] else ""
    console.print(
        f"published version {view['published_version']}, epoch {view['epoch']}, "
        f"mode {view['mode']}{now}",
        highlight=False,
    )
    engines = Table("engine", "version", "ranks", "state", "address", box=None)
    for each in view["engines"]:
        state = (
            "serving"
            if each["routable"]
            else "tainted"
            if each["tainted"]
            else "at rest"
            if each.get("at_rest")
            else "waiting"
        )
        ranks = f"{each['ranks']}/{each['world_size']}"
        engines.add_row(
            each["name"], str(each["version"]), ranks, each["refused"] or state, each["url"]
        )
    console.print(engines)
    columns = ("version", "outcome", "update ms", "pause ms", "pack ms", "bytes", "left out")
    rounds = Table(*columns, box=None)
    for each in view["rounds"][-10:]:
        rounds.add_row(
            str(each["version"]),
            each["outcome"],
            f"{each['update_s'] * 1e3:.1f}",
            f"{each['pause_s'] * 1e3:.1f}",
            f"{each['pack_s'] * 1e3:.1f}" if each["pack_s"] else "-",
            f"{each['nbytes']:,}",
            ", ".join(each["left_out"]),
        )
    console.print(rounds)
    rollouts = view["rollouts"]
    for what, words in (
        ("", ("outstanding", "running", "waiting", "completed", "failed", "lost", "workers")),
        (" thrown away", ("too_old", "stopped_early", "dropped", "rejected", "wasted_tokens")),
    ):
        counts = ", ".join(f"{word.replace('_', ' ')} {rollouts[word]}" for word in words)
        console.print(f"rollouts{what}: {counts}", highlight=False)
    ages = ", ".join(f"{age}: {count}" for age, count in view["staleness"].items()) or "none yet"
    console.print(f"staleness of trained samples (versions: count): {ages}", highlight=False)


COMMAND = Command(
    "what a running controller knows of its fleet",
    add_arguments,
    run,
)
