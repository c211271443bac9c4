"""The command `windlass`: sub-commands by name, each imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from windlass import __version__
from windlass.cli import COMMANDS, Command
from windlass.errors import ConfigError, WindlassError

_EXTRAS = {
    "torch": "embedded",
    "transformers": "embedded",
    "safetensors": "embedded",
    "matplotlib": "demo",
    "psutil": "demo",
    "ray": "ray",
}
"""Package that a command may need -> the extra that brings it."""
_OWN_EXTRAS = {"demo": "demo"}
"""Command that needs an extra of its own -> that extra."""


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
        extra = _OWN_EXTRAS.get(chosen, extra)
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
    wants_summaries = arguments[:1] in (["-h"], ["--help"])
    command: Command | None = None
    for name in COMMANDS.names():
        summary = _summary(name) if wants_summaries or name == chosen else None
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command = COMMANDS.find(name)
            command.add_arguments(subparser)
    args = parser.parse_args(arguments)
    if command is None:  # pragma: no cover - argparse has refused anything else
        parser.error(f"unknown command {chosen!r}")
    return command.run(args)


def _summary(name: str) -> str:
    """For argparse, which formats it; a plugin that cannot be used says why."""
    try:
        return COMMANDS.find(name).summary.replace("%", "%%")
    except ConfigError as error:
        return f"cannot be used: {error}".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
