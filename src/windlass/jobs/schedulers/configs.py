"""Configurations of all schedulers, and the function that creates a scheduler from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windlass.jobs.schedulers.base import Scheduler
from windlass.jobs.schedulers.local import LocalScheduler, LocalSchedulerConfig
from windlass.jobs.schedulers.ray import RayBackend, RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmBackend, SlurmSchedulerConfig

SchedulerConfig = LocalSchedulerConfig | SlurmSchedulerConfig | RaySchedulerConfig


def create_scheduler(
    config: SchedulerConfig, log_dir: Path, environment: Mapping[str, str] | None = None
) -> Scheduler:
    """Return the scheduler that `config` describes; enter it as a context.

    The output of process NAME is written to `NAME.log` in `log_dir` on this host. Ray keeps logs on the nodes.
    """
    match config:
        case LocalSchedulerConfig(gpus=gpus):
            return LocalScheduler(log_dir, environment, watched=True, gpus=gpus)
        case SlurmSchedulerConfig():
            return Scheduler(SlurmBackend(log_dir, config), environment)
        case RaySchedulerConfig():
            return Scheduler(RayBackend(config), environment)
