"""`windlass status URL`: show the state of a controller's fleet."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import msgspec
from rich.console import Console, RenderableType

from windlass.cli import Command
from windlass.cli.controller import add_controller, follow_overview, overview
from windlass.envs import control_token
from windlass.observability.live import LiveView, plain_console
from windlass.observability.terminal import status_of, status_within


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass status`."""
    add_controller(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the controller's answer")
    how.add_argument(
        "--watch", action="store_true", help="show each change when it happens, until Ctrl-C"
    )


def run(args: argparse.Namespace) -> int:
    """Print the fleet, the last rounds, staleness and outstanding work."""
    console = plain_console()
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
    """Show each overview that the controller sends, until the controller ends.

    On a terminal, draw a live view, and print the last overview at the end. Otherwise, print each overview.
    """
    views = follow_overview(args.url.rstrip("/"), control_token(), args.deadline_s)
    newest: dict[str, Any] = {}

    def draw() -> RenderableType:
        return (
            status_within(newest, console, console.height) if newest else f"waiting for {args.url}"
        )

    with LiveView(console, draw, fills_screen=True) as shown:
        async for newest in views:
            # The view redraws itself. Do not draw each overview here: overviews may arrive faster
            # than they can be drawn, and the screen would then show an ever older state.
            if not shown.is_drawn:
                console.print(status_of(newest), "")
    if shown.is_drawn and newest:
        console.print(status_of(newest))
    console.print(f"{args.url}: the controller has ended", soft_wrap=True)


COMMAND = Command("the state of a running controller's fleet", add_arguments, run)
