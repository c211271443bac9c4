"""The command line: `windlass COMMAND`, and what a command is made of.

A new command is one file in `windlass/cli/commands` that defines `COMMAND`, or an entry point of the group
`windlass.commands` in another distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.lazy import public
from windlass.plugins import Registry

if TYPE_CHECKING:
    from windlass.cli.controller import add_controller as add_controller
    from windlass.cli.controller import overview as overview

__all__ = ["COMMANDS", "Command", "add_controller", "overview"]


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

if not TYPE_CHECKING:  # a type checker must go on refusing names that are not there
    _, __getattr__, __dir__ = public(__name__)
