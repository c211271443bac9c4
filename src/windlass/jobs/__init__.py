"""Whole jobs: `windlass launch CONFIG.toml` runs a job from one file, or a script starts trainers and calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.jobs.config import LaunchConfig as LaunchConfig
    from windlass.jobs.config import load_config as load_config
    from windlass.jobs.data import DataSection as DataSection
    from windlass.jobs.dataset_recipe import DatasetRecipe as DatasetRecipe
    from windlass.jobs.fsdp_engine import FsdpEngine as FsdpEngine
    from windlass.jobs.fsdp_engine import LossMean as LossMean
    from windlass.jobs.fsdp_engine import ParallelSizes as ParallelSizes
    from windlass.jobs.fsdp_engine import Samples as Samples
    from windlass.jobs.launch import run_job as run_job
    from windlass.jobs.megatron_engine import MegatronEngine as MegatronEngine
    from windlass.jobs.recipe import Recipe as Recipe
    from windlass.jobs.recipe import Task as Task
    from windlass.jobs.recipe import rewards_differ as rewards_differ
    from windlass.jobs.results import JobSummary as JobSummary
    from windlass.jobs.results import StepResult as StepResult
    from windlass.jobs.schedulers.base import ClusterBackend as ClusterBackend
    from windlass.jobs.schedulers.base import PluginSchedulerConfig as PluginSchedulerConfig
    from windlass.jobs.schedulers.base import ProcessSpec as ProcessSpec
    from windlass.jobs.schedulers.base import ProcessStatus as ProcessStatus
    from windlass.jobs.schedulers.base import Scheduler as Scheduler
    from windlass.jobs.schedulers.base import SchedulerPlugin as SchedulerPlugin
    from windlass.jobs.schedulers.configs import create_scheduler as create_scheduler
    from windlass.jobs.schedulers.local import LocalScheduler as LocalScheduler
    from windlass.jobs.schedulers.local import LocalSchedulerConfig as LocalSchedulerConfig
    from windlass.jobs.schedulers.ray import RaySchedulerConfig as RaySchedulerConfig
    from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig as SlurmSchedulerConfig
    from windlass.jobs.stock_trainer import StockTrainer as StockTrainer
    from windlass.jobs.train_controller import TrainController as TrainController
    from windlass.jobs.train_worker import TrainContext as TrainContext
    from windlass.jobs.train_worker import TrainEngine as TrainEngine
    from windlass.jobs.train_worker import run_train_worker as run_train_worker
    from windlass.jobs.training import TrainingSection as TrainingSection

# Type checkers must not see `__getattr__`: with it they would accept any name.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
