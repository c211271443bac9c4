"""The command line `windlass COMMAND`, and the type of a command.

To add a command, add a file to `windlass/cli/commands` that defines `COMMAND`. Another distribution adds a command
with an entry point of the group `windlass.commands`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.config import UpdateMode
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
        summary: description of the command in `windlass --help`.
        add_arguments: function that declares the options.
        run: function that runs the command and returns the exit status. It may raise `WindlassError`.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_update_mode(parser: argparse.ArgumentParser) -> None:
    """Declare the option `--mode`, which selects how engines get new weights."""
    parser.add_argument(
        "--mode",
        choices=[*map(str, UpdateMode)],
        default=str(UpdateMode.IN_PLACE),
        help="in_place: write the weights of a paused engine (default); staged: write a copy, and pause for its "
        "activation only",
    )


COMMANDS: Registry[Command] = Registry(
    noun="command",
    kind=Command,
    package="windlass.cli.commands",
    attribute="COMMAND",
    group="windlass.commands",
)
"""All commands, by name."""

# Type checkers must not see `__getattr__`: with it they would accept any name.
if not TYPE_CHECKING:
    _, __getattr__, __dir__ = public(__name__)
