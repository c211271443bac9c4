"""`windlass demo`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from windlass.cli import Command
from windlass.config import UpdateMode
from windlass.engines.spec import ENGINES
from windlass.errors import ConfigError
from windlass.net.logs import configure_logging

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options; the defaults end in under four minutes on two cores."""
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps (default 40)")
    parser.add_argument("--engine", default="embedded", choices=ENGINES.names())
    parser.add_argument("--backend", default="p2p", choices=["p2p", "xccl", "disk"])
    parser.add_argument("--transport", default="cma", choices=["cma", "shm", "mooncake"])
    parser.add_argument("--mode", default="in_place", choices=[m.value for m in UpdateMode])
    parser.add_argument(
        "--kill-engine-at", type=int, default=0, metavar="N",
        help="kill -9 one engine in the middle of the update to version N",
    )  # fmt: skip
    parser.add_argument("--scheduler", default="local", choices=["local", "slurm", "ray"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="demo-output", metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 when it showed something that it must not show."""
    configure_logging("controller")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"demo: --json must be a file in a folder that exists, got {args.json}")
    from windlass.jobs.demo.run import run_demo
    from windlass.jobs.demo.settings import (
        REAL_ENGINES,
        DemoSettings,
        SchedulerKind,
        real_engine_settings,
    )

    settings = DemoSettings(
        steps=args.steps,
        engine=args.engine,
        scheduler=SchedulerKind(args.scheduler),
        backend=args.backend,
        transport=args.transport,
        mode=UpdateMode(args.mode),
        kill_engine_at=args.kill_engine_at,
        seed=args.seed,
        output_dir=args.output,
    )
    if settings.engine in REAL_ENGINES:
        settings = real_engine_settings(settings)
    return asyncio.run(run_demo(settings, json_path=args.json, plain=args.plain))


COMMAND = Command(
    "asynchronous GRPO on this machine: trainers, engines and rollouts, live",
    add_arguments,
    run,
)
