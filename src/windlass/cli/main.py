"""The command `windlass`. A sub-command is imported when the user calls it."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from windlass import __version__
from windlass.cli import COMMANDS, Command
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    EngineRefused,
    PeerUnreachable,
    TransportUnavailable,
    WindlassError,
)
from windlass.wording import install_command

_Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EXTRAS = {
    "torch": "embedded",
    "transformers": "embedded",
    "safetensors": "embedded",
    "matplotlib": "demo",
    "psutil": "demo",
    "ray": "ray",
}
"""Package that a command may import -> extra of Windlass that installs this package."""
_OWN_EXTRAS = {"demo": "demo"}
"""Command -> extra that installs every package that the command may import."""
_NEXT: Mapping[type[WindlassError], str] = {
    AuthenticationError: "set WINDLASS_TOKEN to the controller's token, or to the token of a role that "
    "`windlass token` derives from it",
    PeerUnreachable: "check that a controller runs at this address and that this host can connect to it; "
    "`windlass serve` and `windlass launch` print the address",
    EngineRefused: "`windlass doctor --engine-python PATH` checks the engine's environment",
    TransportUnavailable: "`windlass doctor` says what this machine lacks, and how to install it",
}
"""Type of error -> advice that `main` prints below the text of such an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, run one sub-command, return the exit status.

    A `WindlassError` is printed as one line, followed by its notes and advice. If a package is missing, the command
    that installs it is printed. In both cases, the exit status is 2. On Ctrl-C, the exit status is 130. Any other
    exception is a defect of Windlass and propagates.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    try:
        return _run(arguments, chosen)
    except WindlassError as error:
        _print_error(f"windlass {chosen}: {type(error).__name__}: {error}")
        for note in vars(error).get("__notes__", ()):
            _print_error(note)
        if following := _NEXT.get(type(error)):
            _print_error(f"next: {following}")
        return 2
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        extra = _OWN_EXTRAS.get(chosen, extra)
        _print_error(f"windlass {chosen}: needs {error.name}, which is not installed here")
        _print_error(f"next: {install_command(extra)}")
        return 2
    except KeyboardInterrupt:
        return 130


def _print_error(text: str) -> None:
    """Print a text on stderr. On a terminal, break its lines between words."""
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        text = "\n".join(
            textwrap.fill(
                line,
                columns,
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in text.split("\n")
        )
    print(text, file=sys.stderr)


def _run(arguments: Sequence[str], chosen: str) -> int:
    parser, subparsers = _empty_parser()
    wants_summaries = arguments[:1] in ([], ["-h"], ["--help"])
    command: Command | None = None
    chosen_parser = parser
    for name in COMMANDS.names():
        summary = _summary(name) if wants_summaries or name == chosen else None
        subparser = subparsers.add_parser(
            name, help=summary, description=summary, allow_abbrev=False
        )
        if name == chosen:
            command, chosen_parser = COMMANDS.find(name), subparser
            command.add_arguments(subparser)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen_parser.error(_unknown_options(unknown, chosen_parser))
    if command is None:  # pragma: no cover - argparse has refused anything else
        parser.error(f"unknown command {chosen!r}")
    return command.run(args)


def _unknown_options(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return an error text for options that a command does not have. Suggest a similar option if there is one."""
    known = [*re.findall(r"--[a-z0-9-]+", parser.format_help())]
    similar = difflib.get_close_matches(words[0], known, n=1)
    meant = f"; did you mean {similar[0]}?" if similar else ""
    return f"unrecognized arguments: {' '.join(words)}{meant}"


def full_parser() -> argparse.ArgumentParser:
    """Return a parser for all commands. If the package of a plugin cannot be imported, its command has no options."""
    parser, subparsers = _empty_parser()
    for name in COMMANDS.names():
        summary = _summary(name)
        subparser = subparsers.add_parser(
            name, help=summary, description=summary, allow_abbrev=False
        )
        with contextlib.suppress(ConfigError):
            COMMANDS.find(name).add_arguments(subparser)
    return parser


def _empty_parser() -> tuple[argparse.ArgumentParser, _Subparsers]:
    parser = argparse.ArgumentParser(
        prog="windlass",
        description="Weights from trainers to rollout engines, and asynchronous rollouts.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"windlass {__version__}")
    return parser, parser.add_subparsers(dest="command", required=True, metavar="COMMAND")


def _summary(name: str) -> str:
    """Return a command's summary, escaped for argparse. If the command cannot be imported, return the error instead."""
    try:
        return COMMANDS.find(name).summary.replace("%", "%%")
    except ConfigError as error:
        return f"cannot be used: {error}".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
