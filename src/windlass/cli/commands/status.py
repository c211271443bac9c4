"""`windlass status URL`."""

from __future__ import annotations

import argparse
import asyncio

import msgspec
from rich.console import Console
from rich.live import Live

from windlass.cli import Command
from windlass.cli.controller import add_controller, follow_overview, overview
from windlass.envs import control_token
from windlass.observability.terminal import status_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `windlass status`."""
    add_controller(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print what the controller answered")
    how.add_argument(
        "--watch", action="store_true", help="show every change as it comes, until Ctrl-C"
    )


def run(args: argparse.Namespace) -> int:
    """Print the fleet, the last rounds, staleness and outstanding work."""
    console = Console(markup=False, highlight=False)
    if args.watch:
        asyncio.run(_watch(args, console))
        return 0
    view = overview(args)
    if args.json:
        print(msgspec.json.encode(view).decode())
        return 0
    console.print(status_of(view))
    return 0


async def _watch(args: argparse.Namespace, console: Console) -> None:
    """A live view on a terminal, one view after the other without one; the controller says when."""
    views = follow_overview(args.url.rstrip("/"), control_token(), args.deadline_s)
    if not console.is_terminal:
        async for view in views:
            console.print(status_of(view), "")
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        async for view in views:
            live.update(status_of(view), refresh=True)


COMMAND = Command("what a running controller knows of its fleet", add_arguments, run)
