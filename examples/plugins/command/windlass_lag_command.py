"""Command `windlass lag URL`: print the number of versions that every engine is behind."""

from __future__ import annotations

import argparse

from windlass.cli import Command, add_controller, overview


def run(args: argparse.Namespace) -> int:
    """Print a line per engine; return 1 if an engine is behind."""
    view = overview(args)
    lags = {each["name"]: view["published_version"] - each["version"] for each in view["engines"]}
    for name, lag in lags.items():
        print(f"{name}: {lag}")
    return int(any(lags.values()))


COMMAND = Command("how many versions every engine of a fleet is behind", add_controller, run)
