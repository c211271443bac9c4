"""`windlass completion SHELL`."""

from __future__ import annotations

import argparse

from windlass.cli import Command

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the shell."""
    parser.add_argument("shell", choices=SHELLS, help="shell that completes")


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion script, with the options of every command."""
    import shtab

    from windlass.cli.main import full_parser

    print(shtab.complete(full_parser(), args.shell))
    return 0


COMMAND = Command(
    'a script that completes commands and options: eval "$(windlass completion bash)"',
    add_arguments,
    run,
)
