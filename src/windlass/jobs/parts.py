"""What a job consists of, as its file says: a controller, trainer ranks, and processes beside them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from windlass.controller import Controller
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.jobs.config import EngineSection, LaunchConfig
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.train_controller import TrainController
from windlass.net.access import Access, role_environment
from windlass.rollout.staleness import StalenessPolicy

__all__ = ["KeptProcess", "job_controller", "job_processes", "job_trainers"]

MAX_WORKER_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """A process that is started again when it dies, `max_restarts` times."""

    spec: ProcessSpec
    max_restarts: int


def job_controller(config: LaunchConfig, token: str) -> Controller:
    """The controller, not yet started."""
    rollout = config.rollout
    return Controller(
        token=token,
        host=config.controller.host,
        port=config.controller.port,
        advertise_host=config.controller.advertise_host,
        config=config.update,
        staleness=StalenessPolicy(
            max_staleness=rollout.max_staleness,
            batch_size=rollout.groups_per_step * rollout.samples_per_group,
            max_concurrent=rollout.max_concurrent,
            on_stale=rollout.on_stale,
            max_resubmits=rollout.max_resubmits,
        ),
    )


def job_trainers(config: LaunchConfig, scheduler: Scheduler, token: str) -> TrainController:
    """What starts the trainer ranks and calls them; not yet mounted."""
    trainer = config.trainer
    return TrainController(
        scheduler,
        command=(trainer.python or sys.executable, trainer.script, *trainer.arguments),
        world_size=trainer.world_size,
        token=token,
        environment=trainer.environment,
        num_cpus=trainer.num_cpus,
        num_gpus=trainer.num_gpus,
    )


def job_processes(config: LaunchConfig, url: str, token: str) -> list[KeptProcess]:
    """Engines and rollout workers of the controller at `url`."""
    engines = [
        KeptProcess(_engine(config, engine, url, token), engine.max_restarts)
        for engine in config.engines
    ]
    workers = [
        KeptProcess(_worker(config, number, url, token), MAX_WORKER_RESTARTS)
        for number in range(config.rollout.num_workers)
    ]
    return engines + workers


def _worker(config: LaunchConfig, number: int, url: str, token: str) -> ProcessSpec:
    script, name = config.rollout.worker_script, f"worker-{number}"
    program = (script,) if script else ("-m", "windlass.rollout.worker")
    return ProcessSpec(
        name=name,
        command=(
            *(sys.executable, *program, "--controller", url, "--name", name),
            *config.rollout.worker_arguments,
        ),
        environment=role_environment(token, Access.WORKER),
    )


def _engine(config: LaunchConfig, engine: EngineSection, url: str, token: str) -> ProcessSpec:
    options = EngineOptions(
        name=engine.name,
        model=engine.model,
        tensor_parallel_size=engine.tensor_parallel_size,
        transport=config.transport,
        controller=url,
        port=engine.port,
        arguments=engine.arguments,
        python=engine.python,
    )
    return ProcessSpec(
        name=engine.name,
        command=ENGINES.find(engine.kind).command(options),
        environment={**engine.environment, **role_environment(token, Access.ENGINE)},
        num_cpus=engine.num_cpus,
        num_gpus=engine.num_gpus,
    )
