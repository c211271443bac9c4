"""Schedulers by configuration: what the demo and `windlass launch` choose from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from windlass.jobs.schedulers.base import Scheduler
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.jobs.schedulers.ray import ray_scheduler
from windlass.jobs.schedulers.slurm import SlurmOptions, slurm_scheduler


class LocalSchedulerConfig(
    msgspec.Struct, frozen=True, tag="local", tag_field="kind", forbid_unknown_fields=True
):
    """Subprocesses of this host, which end with this process.

    Attributes:
        gpus: those to give out, as CUDA_VISIBLE_DEVICES has them; all that this process sees when omitted.
    """

    gpus: tuple[str, ...] | None = None


class SlurmSchedulerConfig(
    SlurmOptions, frozen=True, tag="slurm", tag_field="kind", forbid_unknown_fields=True
):
    """The Slurm cluster of this host.

    Attributes:
        options, srun_options, prefix, gpu_type: of every process, see `SlurmOptions`.
        host: address of this host as the nodes reach it; empty for its host name.
        processes: what is added for those whose names fit the key: `trainer-*`, `engine-a`, `worker-*`.
    """

    host: str = ""
    processes: Mapping[str, SlurmOptions] = {}


class RaySchedulerConfig(
    msgspec.Struct, frozen=True, tag="ray", tag_field="kind", forbid_unknown_fields=True
):
    """A Ray cluster.

    Attributes:
        address: of a running one; empty starts one on this host that ends with the scheduler.
        num_cpus: of a cluster that is started here; Ray counts the cores when omitted.
    """

    address: str = ""
    num_cpus: int | None = None


SchedulerConfig = LocalSchedulerConfig | SlurmSchedulerConfig | RaySchedulerConfig


def create_scheduler(
    config: SchedulerConfig, log_dir: Path, environment: Mapping[str, str]
) -> Scheduler:
    """The scheduler that `config` describes; enter it as a context.

    Args:
        config: which, and how.
        log_dir: where `NAME.log` is written; Ray keeps logs on the nodes.
        environment: variables for every process.
    """
    match config:
        case LocalSchedulerConfig(gpus=gpus):
            return LocalScheduler(log_dir, environment, watched=True, gpus=gpus)
        case SlurmSchedulerConfig(host=host, processes=processes):
            return slurm_scheduler(
                log_dir, environment, options=config, processes=processes, host=host
            )
        case RaySchedulerConfig(address=address, num_cpus=num_cpus):
            return ray_scheduler(environment, address=address, num_cpus=num_cpus)
