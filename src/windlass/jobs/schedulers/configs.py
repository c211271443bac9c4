"""Scheduler configurations that a job file may have, and the function that creates a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windlass.jobs.schedulers.base import PluginSchedulerConfig, Scheduler, SchedulerConfig
from windlass.jobs.schedulers.local import LocalSchedulerConfig
from windlass.jobs.schedulers.ray import RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig

KnownScheduler = (
    LocalSchedulerConfig | SlurmSchedulerConfig | RaySchedulerConfig | PluginSchedulerConfig
)
"""Type of `[scheduler]` in a job file. A scheduler of another package has `kind = "plugin"`."""


def create_scheduler(
    config: SchedulerConfig, log_dir: Path, environment: Mapping[str, str] | None = None
) -> Scheduler:
    """Return the scheduler that `config` describes. Enter it with `async with` before you start processes.

    Args:
        config: configuration of a host or a cluster.
        log_dir: folder on this host; the output of process NAME goes to `NAME.log` in this folder. Ray instead leaves
            each log on the node of its process.
        environment: variables added to the environment of every process.

    Raises:
        ConfigError: a setting has an invalid value, or no installed package has registered the scheduler plugin.
    """
    return Scheduler(config.make_backend(log_dir), environment)
