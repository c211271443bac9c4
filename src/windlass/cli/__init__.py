"""The command line: `windlass COMMAND`, and what a command is made of.

A new command is one file in `windlass/cli/commands` that defines `COMMAND`, or an entry point of the group
`windlass.commands` in another distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from windlass.plugins import Registry

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command of `windlass`.

    Attributes:
        summary: one line for `windlass --help`.
        add_arguments: declares its options.
        run: carries it out; returns the exit status. A `WindlassError` is printed as one line.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Registry[Command] = Registry(
    noun="command",
    kind=Command,
    package="windlass.cli.commands",
    attribute="COMMAND",
    group="windlass.commands",
)
"""All commands, by name."""
