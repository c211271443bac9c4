"""The command `windlass`: one sub-command per module, each imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from windlass import __version__
from windlass.errors import WindlassError

__all__ = ["main"]

_COMMANDS = {
    "bench": "the benchmarks that this machine can run",
    "demo": "asynchronous GRPO on this machine: trainers, engines and rollouts, live",
    "doctor": "what will and will not work in this environment, and how to mend it",
    "launch": "a job of your own from a TOML file: trainers, engines, rollouts, weight updates",
    "report": "the last updates of a controller against the speed of light",
    "serve": "a controller of weight updates for training loops of your own",
    "status": "what a running controller knows of its fleet",
    "token": "the token of a role, from the owner's secret in WINDLASS_TOKEN",
}

_EXTRAS = {
    "torch": "embedded",
    "transformers": "embedded",
    "safetensors": "embedded",
    "matplotlib": "demo",
    "psutil": "demo",
    "ray": "ray",
}
"""Package that a command may need -> the extra that brings it."""


class _Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, run one sub-command, return the exit status.

    Errors of Windlass, and a missing package that one of its extras brings, are printed as one line;
    anything else is a defect and shows its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    try:
        return _run(arguments, chosen)
    except WindlassError as error:
        print(f"windlass {chosen}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        print(
            f"windlass {chosen}: needs {error.name}, which is not installed here; the extra "
            f"windlass[{extra}] brings it",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str], chosen: str) -> int:
    parser = argparse.ArgumentParser(
        prog="windlass",
        description="Weights from trainers to rollout engines, and asynchronous rollouts.",
    )
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    command: _Command | None = None
    for name, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command = cast("_Command", importlib.import_module(f"windlass.cli.{name}"))
            command.add_arguments(subparser)
    args = parser.parse_args(arguments)
    if command is None:  # pragma: no cover - argparse has refused anything else
        parser.error(f"unknown command {chosen!r}")
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())
