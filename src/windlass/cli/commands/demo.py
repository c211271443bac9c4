"""`windlass demo`: the job of `jobs/demo/job.toml`, with options."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from windlass import jobs
from windlass.cli import Command
from windlass.config import DiskBackend, P2pBackend, UpdateMode, XcclBackend
from windlass.engines.spec import ENGINES
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.jobs.config import EngineSection, LaunchConfig, load_config
from windlass.jobs.schedulers.configs import (
    LocalSchedulerConfig,
    RaySchedulerConfig,
    SchedulerConfig,
    SlurmSchedulerConfig,
)
from windlass.net.addresses import free_port
from windlass.net.logs import configure_logging

FOLDER = Path(jobs.__file__).parent / "demo"
SERVER_TRANSPORTS = ("cma", "mooncake")
SCHEDULERS: Mapping[str, SchedulerConfig] = {
    "local": LocalSchedulerConfig(),
    "slurm": SlurmSchedulerConfig(host="127.0.0.1"),
    # More processes than a laptop has cores; they take turns as they do without Ray.
    "ray": RaySchedulerConfig(num_cpus=5),
}


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
    parser.add_argument("--scheduler", default="local", choices=list(SCHEDULERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 when it showed something that it must not show."""
    configure_logging("controller")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"demo: --json must be a file in a folder that exists, got {args.json}")
    config = demo_config(args)
    from windlass.jobs.demo.recipe import RepeatOperand
    from windlass.jobs.demo.run import run_demo

    recipe = RepeatOperand(args.seed, args.kill_engine_at)
    return asyncio.run(run_demo(config, recipe, json_path=args.json, plain=args.plain))


def demo_config(args: argparse.Namespace) -> LaunchConfig:
    """Return the job with these options.

    Raises:
        ConfigError: a value that breaks its rule, or options that do not go together.
    """
    job, folder, replace = (
        load_config(FOLDER / "job.toml"),
        args.output.resolve(),
        msgspec.structs.replace,
    )
    engines, rollout, seed = job.engines, job.rollout, str(args.seed)
    if ENGINES.find(args.engine).server is None:
        engines = tuple(replace(e, arguments=(*e.arguments, "--seed", seed)) for e in engines)
        restarts = 1 if args.kill_engine_at else 0
        engines = (*engines[:-1], replace(engines[-1], max_restarts=restarts))
    else:
        # Steps of a size that it answers in seconds on two cores.
        engines, rollout = (_server(args, folder),), replace(rollout, groups_per_step=16)
    backends = {
        "p2p": P2pBackend(),
        "xccl": XcclBackend(),
        "disk": DiskBackend(folder=str(folder / "weights")),
    }
    config = replace(
        job,
        steps=args.steps,
        output_dir=str(folder),
        transport=args.transport,
        scheduler=SCHEDULERS[args.scheduler],
        trainer=replace(
            job.trainer, arguments=(str(FOLDER / "model.json"), str(folder / "versions"), seed)
        ),
        engines=engines,
        rollout=rollout,
        update=replace(job.update, mode=UpdateMode(args.mode), backend=backends[args.backend]),
    )
    if not 0 <= args.kill_engine_at < args.steps:
        raise ConfigError(
            f"demo: kill_engine_at must be in [0, steps={args.steps}), since the engine comes back "
            f"with a later version, got {args.kill_engine_at}"
        )
    return config


def _server(args: argparse.Namespace, folder: Path) -> EngineSection:
    """One unmodified server in an environment of its own, which has its own torch."""
    kind, spec = args.engine, ENGINES.find(args.engine)
    if args.backend != "p2p" or args.transport not in SERVER_TRANSPORTS:
        raise ConfigError(
            f"demo: --engine {kind} goes with --backend p2p and --transport one of "
            f"{list(SERVER_TRANSPORTS)}, got {args.backend!r} and {args.transport!r}"
        )
    if args.kill_engine_at:
        raise ConfigError(f"demo: kill_engine_at needs two engines, got 1 {kind}")
    venv = environment_value(f"WINDLASS_{kind.upper()}_VENV") or f".venv-{kind}"
    return EngineSection(
        name="engine-a",
        kind=kind,
        model=str(folder / "start"),
        port=free_port(),
        arguments=("--dtype", "bfloat16", *spec.cpu_arguments),
        python=str((Path(venv) / "bin" / "python").absolute()),
        environment={
            **spec.cpu_environment,
            "PYTHONPATH": str(folder / "package"),
            "TOKENIZERS_PARALLELISM": "false",
        },
        max_restarts=0,
    )


COMMAND = Command(
    "asynchronous GRPO on this machine: trainers, engines and rollouts, live",
    add_arguments,
    run,
)
