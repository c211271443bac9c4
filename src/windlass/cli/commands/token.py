"""`windlass token ROLE`: print the token of a role."""

from __future__ import annotations

import argparse

from windlass.cli import Command
from windlass.envs import control_token
from windlass.net.access import Access, role_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument with the role. The owner's token comes from WINDLASS_TOKEN, never from the command line."""
    roles = [role.value for role in Access if role is not Access.OWNER]
    parser.add_argument("role", choices=roles, help="role of the process that gets the token")


def run(args: argparse.Namespace) -> int:
    """Print the environment variables that a process of this role needs, one per line.

    Raises:
        ConfigError: the token is missing or invalid; see `control_token`.
    """
    for name, value in role_environment(control_token(), Access(args.role)).items():
        print(f"{name}={value}")
    return 0


COMMAND = Command(
    "the token of a role, from the owner's secret in WINDLASS_TOKEN", add_arguments, run
)
