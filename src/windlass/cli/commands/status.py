"""`windlass status URL`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from windlass.cli import Command
from windlass.cli.controller import add_controller, overview
from windlass.net.logs import printable
from windlass.updates.measures import Measure

MAX_LINKS = 20
"""Of a fleet, shown in a table."""


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
    _show(_printable(view), Console(markup=False))
    return 0


def _printable(value: Any) -> Any:
    """What peers say of themselves stands in it: their control characters must not reach a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _printable(each) for key, each in value.items()}
    return value


def _show(view: dict[str, Any], console: Console) -> None:
    now = f", now in {view['phase']}" if view["phase"] else ""
    console.print(
        f"published version {view['published_version']}, epoch {view['epoch']}, "
        f"mode {view['mode']}{now}",
        highlight=False,
    )
    engines = Table("engine", "version", "ranks", "state", "why", "address", box=None)
    for each in view["engines"]:
        state = (
            "serving"
            if each["routable"]
            else "mixed_weights"
            if each["mixed_weights"]
            else "not resumed"
            if each.get("not_resumed")
            else "waiting"
        )
        ranks = f"{each['ranks']}/{each['world_size']}"
        engines.add_row(
            each["name"], str(each["version"]), ranks, state, each["reason"], each["url"]
        )
    console.print(engines)
    for who, reason in view["refused"].items():
        console.print(f"refused: {who}: {reason}", highlight=False)
    links = Table("from", "to", "transport", "why", box=None)
    for each in view["links"][:MAX_LINKS]:
        links.add_row(each["source"], each["destination"], each["transport"], each["reason"])
    if view["links"]:
        console.print(links)
    if (left := len(view["links"]) - MAX_LINKS) > 0:
        console.print(f"and {left} links more: --json shows all", highlight=False)
    figures = [f"{m.label} ms" if m.unit == "seconds" else m.label for m in Measure]
    columns = ("version", "outcome", *figures, "left out")
    rounds = Table(*columns, box=None)
    for each in view["rounds"][-10:]:
        rounds.add_row(
            str(each["version"]),
            each["outcome"],
            *(m.text(each["measures"].get(m, 0.0)) for m in Measure),
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
