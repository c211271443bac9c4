"""`windlass launch CONFIG.toml`: run a job."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli import Command
from windlass.envs import TOKEN_VARIABLE, secret_value
from windlass.net.logs import configure_logging
from windlass.observability.live import LiveView, can_draw, plain_console
from windlass.progress import Progress
from windlass.wording import counted

if TYPE_CHECKING:
    from windlass.jobs.config import LaunchConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments. The TOML file contains all settings except the token (environment variable WINDLASS_TOKEN)."""
    parser.add_argument("config", type=Path, help="TOML file: trainer, engines, rollout, ...")
    parser.add_argument(
        "--check",
        action="store_true",
        help="make all checks of a start, and start nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Run the job; return 0, or 128 plus the signal's number if a signal ended the job.

    Raises:
        ConfigError: a check of the job found a mistake, or a variable for logging has an unknown value.
        WindlassError: the job failed; see `run_job`.
    """
    configure_logging("controller")
    console = plain_console(stderr=True)
    # The view shows a slow operation while it runs. If no view can be drawn, `Progress` logs it
    # instead. With `--check`, `Progress` logs nothing, so that the output contains only the result.
    progress = (
        Progress(lambda _: None, is_shown=True)
        if args.check
        else Progress(is_shown=can_draw(console))
    )
    with LiveView(console, progress.text, is_transient=True):
        with progress.part(f"checking {args.config.name}"):
            config = _checked_config(args.config, runs_recipe=args.check)
        if args.check:
            steps = counted(config.steps, "step")
            print(f"{args.config}: {steps}, {counted(len(config.engines), 'engine')}: valid")
            return 0
        from windlass.jobs.launch import run_job

        summary = asyncio.run(run_job(config, notify=_print, progress=progress))
    return 128 + summary.stopped_by if summary.stopped_by else 0


def _checked_config(file: Path, *, runs_recipe: bool) -> LaunchConfig:
    """Make all checks that a launch of the job makes, and return the job's configuration.

    If `runs_recipe`, also run the files of the recipe and of the reward function, and call `Recipe.check`.

    Raises:
        ConfigError: a check found a mistake. The error lists the mistakes of all checks. If the file gives no valid
            configuration (`read_job`), no further check runs.
    """
    from windlass.jobs.config import check_all, error_of, name_file, read_job
    from windlass.jobs.launch import check_host, check_job
    from windlass.jobs.recipe import check_recipe, check_rewards

    with name_file(file):
        config, mistakes = read_job(file)
        if config is None:
            raise error_of(mistakes)
        checks: list[Callable[[], object]] = [
            partial(check_job, config),
            partial(check_host, config),
        ]
        if runs_recipe and Path(config.recipe.file).is_file():
            # Read the token before the user's recipe runs: reading removes it from the environment.
            secret_value(TOKEN_VARIABLE)
            checks += [partial(check_recipe, config), partial(check_rewards, config)]
        check_all(checks, mistakes)
    return config


def _print(line: str) -> None:
    print(line, flush=True, file=sys.stdout)


COMMAND = Command(
    "a job of your own from a TOML file: trainers, engines, rollouts, weight updates",
    add_arguments,
    run,
)
