"""`windlass capture`: write the layout of an engine's weights to a file, for servers without Windlass."""

from __future__ import annotations

import argparse
from pathlib import Path

from windlass.cli import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass capture`."""
    parser.add_argument(
        "--engine", choices=["sglang"], required=True, help="engine, installed here"
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder (safetensors)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="layout file")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="-- OPTIONS",
        help="options of the engine's server, as the live server gets them",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Start the engine, write the layout of its ranks, and end the engine."""
    from windlass.engines.sglang.offline import capture

    options = args.options[1:] if args.options[:1] == ["--"] else args.options
    return capture(args.model, args.tp, args.output, options)


COMMAND = Command(
    "the layout of an engine's weights, for servers without Windlass", add_arguments, run
)
