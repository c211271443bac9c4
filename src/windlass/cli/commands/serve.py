"""`windlass serve`: run a controller."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import msgspec

from windlass.cli import Command, add_update_mode
from windlass.config import (
    ControlConfig,
    PauseMode,
    RouterConfig,
    RouterKind,
    UpdateBackend,
    UpdateMode,
)
from windlass.envs import control_token
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.net.logs import configure_logging

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. The token comes from WINDLASS_TOKEN, never from the command line."""
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument(
        "--advertise-host", default="", help="address for trainers and engines, if not --host"
    )
    add_update_mode(parser)
    parser.add_argument(
        "--pause-mode",
        choices=[*map(str, PauseMode)],
        default=str(PauseMode.ABORT),
        help="what happens to running requests at an update: they end (abort, default), start again (retract), or "
        "continue (in_place)",
    )
    parser.add_argument(
        "--backend",
        default="p2p",
        help='p2p, xccl, or a JSON object: \'{"type": "disk", "folder": "/weights"}\'',
    )
    parser.add_argument(
        "--min-engines",
        type=int,
        default=1,
        help="an update waits until this many engines are connected (default 1)",
    )
    parser.add_argument(
        "--router",
        metavar="URL",
        action="append",
        default=[],
        help="sglang-router or vllm-router that gets the list of routable engines; may be repeated",
    )
    parser.add_argument(
        "--webhook",
        metavar="URL",
        action="append",
        default=[],
        help="URL to which the controller posts the state of all engines; may be repeated",
    )
    parser.add_argument(
        "--journal", type=Path, help="file from which a restarted controller continues"
    )


def run(args: argparse.Namespace) -> int:
    """Start a controller, print its URL, and serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: an option or a variable of the environment has a wrong value, or the token is missing or invalid.
    """
    configure_logging("controller")
    config = ControlConfig(
        mode=UpdateMode(args.mode),
        pause_mode=PauseMode(args.pause_mode),
        backend=parse_backend(args.backend),
        min_engines=args.min_engines,
        routers=(
            *(RouterConfig(url=url) for url in args.router),
            *(RouterConfig(url=url, kind=RouterKind.WEBHOOK) for url in args.webhook),
        ),
    )
    asyncio.run(_serve(config, control_token(), args))
    return 0


def parse_backend(text: str) -> UpdateBackend:
    """Return the backend for a name (`p2p`), or for a JSON object with the backend's settings.

    Raises:
        ConfigError: `text` names no backend, or the backend cannot have these settings.
    """
    spelt_out = text if text.startswith("{") else msgspec.json.encode({"type": text})
    try:
        backend: UpdateBackend = msgspec.json.decode(spelt_out, type=UpdateBackend)
    except DECODE_ERRORS as error:
        raise ConfigError(f"--backend must be p2p, xccl or a JSON object, got {text!r}: {error}") from error  # fmt: skip
    return backend


async def _serve(config: ControlConfig, token: str, args: argparse.Namespace) -> None:
    from windlass.controller import Controller

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        async with Controller(
            token=token,
            host=args.host,
            port=args.port,
            advertise_host=args.advertise_host,
            config=config,
            journal_path=args.journal,
        ) as controller:
            print(controller.url, flush=True)
            await stop.wait()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


COMMAND = Command(
    "a controller of weight updates for training loops of your own", add_arguments, run
)
