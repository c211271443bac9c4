"""`windlass report URL`: compare a controller's last updates with the links' limit, and save the controller's page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli import Command
from windlass.cli.controller import add_controller, overview
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.errors import ConfigError, ProtocolError
from windlass.files import write_file
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.observability.page import saved_page
from windlass.observability.speed_of_light import SpeedOfLight, save_plot


class _Shown(msgspec.Struct):
    """Fields of an overview that the command reads; it ignores all others."""

    engines: list[dict[str, Any]]
    rounds: list[UpdateReport]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass report`."""
    add_controller(parser)
    parser.add_argument(
        "--ceiling-gbps",
        type=float,
        metavar="GB/S",
        help="measured limit of one link (default: memcpy rate of one thread, measured now on this host)",
    )
    parser.add_argument("--links", type=int, default=1, help="number of parallel links (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write the controller's page and its current data as one file",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print every published update in the controller's overview, and write the requested files.

    Raises:
        ConfigError: an option has an invalid value.
        AuthenticationError, PeerTimeout, PeerUnreachable, ProtocolError: see `fetch_overview`.
    """
    if args.links < 1:
        raise ConfigError(f"report: --links must be >= 1, got {args.links}")
    if args.ceiling_gbps is not None and not args.ceiling_gbps > 0:
        raise ConfigError(f"report: --ceiling-gbps must be > 0, got {args.ceiling_gbps}")
    for name, path in (("--json", args.json), ("--plot", args.plot), ("--html", args.html)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"report: {name} must be a file in a folder that exists, got {path}")
    view = overview(args)
    try:
        shown = msgspec.convert(view, _Shown)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{args.url}: overview: {error}") from error
    ceiling = measure_memcpy_gbps() if args.ceiling_gbps is None else args.ceiling_gbps
    updates = [
        SpeedOfLight(report, ceiling, args.links)
        for report in shown.rounds
        if report.outcome is RoundOutcome.PUBLISHED
    ]
    for update in updates:
        print(update.text())
    if not updates:
        print("no update was published yet")
    if args.json is not None:
        write_file(args.json, msgspec.json.encode([update.as_dict() for update in updates]))
    if args.plot is not None:
        save_plot(updates, args.plot)
    if args.html is not None:
        write_file(args.html, saved_page(view, args.url).encode())
        print(f"wrote {args.html}: open it in a browser, or send it")
    return 0


COMMAND = Command("the last updates of a controller and the limit of its links", add_arguments, run)
