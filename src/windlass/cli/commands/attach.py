"""`windlass attach`: connect a running engine server without Windlass to a controller."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from windlass.cli import Command
from windlass.envs import control_token, secret_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass attach`.

    The token comes from WINDLASS_TOKEN, or from the file that WINDLASS_TOKEN_FILE names.
    """
    parser.add_argument(
        "--layout", type=Path, required=True, metavar="FILE", help="file of `windlass capture`"
    )
    parser.add_argument("--url", required=True, help="address of the running SGLang server")
    parser.add_argument("--name", required=True, help="identity in the fleet")
    parser.add_argument("--controller", required=True, help="address of the controller")
    parser.add_argument("--transport", default="mooncake", help="mooncake, or its settings as JSON")
    parser.add_argument(
        "--return-deadline-s", type=float, default=600.0,
        help="seconds to wait for a server that does not answer yet or was restarted",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out the controller's commands for a running SGLang server, until a signal ends this process.

    Raises:
        ConfigError: the token is missing or invalid (`control_token`), or `--layout` is not a layout file.
        WindlassError: the server or the controller refused or did not answer; see `attach`.
    """
    from windlass.engines.launch import exit_at_signal
    from windlass.engines.sglang.outside import Attach, attach
    from windlass.engines.sglang.table import LayoutFile

    signal.signal(signal.SIGTERM, exit_at_signal)
    order = Attach(
        name=args.name,
        url=args.url.rstrip("/"),
        controller=args.controller,
        token=control_token(),
        transport=args.transport,
        api_key=secret_value("SGLANG_API_KEY"),
        admin_api_key=secret_value("SGLANG_ADMIN_API_KEY"),
        return_deadline_s=args.return_deadline_s,
    )
    return attach(order, LayoutFile.read(args.layout))


COMMAND = Command("connect a server without Windlass to a controller", add_arguments, run)
