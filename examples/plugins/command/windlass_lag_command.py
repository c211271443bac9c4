"""`windlass lag URL`: how many versions every engine of a fleet is behind."""

from __future__ import annotations

import argparse
import asyncio

from windlass.cli import Command
from windlass.cli.commands.status import fetch_overview
from windlass.envs import control_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The token comes from WINDLASS_TOKEN."""
    parser.add_argument("url", help="address of the controller")
    parser.add_argument("--deadline-s", type=float, default=10.0)


def run(args: argparse.Namespace) -> int:
    """Print a line per engine; 1 if one is behind."""
    view = asyncio.run(fetch_overview(args.url.rstrip("/"), control_token(), args.deadline_s))
    lags = {each["name"]: view["published_version"] - each["version"] for each in view["engines"]}
    for name, lag in lags.items():
        print(f"{name}: {lag}")
    return int(any(lags.values()))


COMMAND = Command("how many versions every engine of a fleet is behind", add_arguments, run)
