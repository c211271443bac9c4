"""Windlass: weights from trainers to rollout engines, one-sided, verified, as one transaction.

Trainer side (every rank of a torchrun script):

    with windlass.connect_trainer(model, controller=url, token=token) as trainer:
        trainer.publish(version)

Controller side:

    async with windlass.Controller(token=token) as controller:
        await controller.wait_for_fleet(num_trainers=2, engines=("engine-a",), deadline_s=60)
"""

from __future__ import annotations

from windlass.config import ControlConfig, DiskBackend, P2pBackend, XcclBackend
from windlass.control.messages import PauseMode, RoundOutcome, UpdateMode, UpdateReport
from windlass.controller import Controller
from windlass.errors import WindlassError
from windlass.rollout.client import BatchClient
from windlass.rollout.messages import SamplingParams, TrainingBatch, TrainingSample
from windlass.rollout.staleness import StalenessPolicy
from windlass.training.callback import RolloutCallback, WeightGroup
from windlass.training.client import TrainerClient, connect_trainer

__version__ = "0.1.0"

__all__ = [
    "BatchClient",
    "ControlConfig",
    "Controller",
    "DiskBackend",
    "P2pBackend",
    "PauseMode",
    "RolloutCallback",
    "RoundOutcome",
    "SamplingParams",
    "StalenessPolicy",
    "TrainerClient",
    "TrainingBatch",
    "TrainingSample",
    "UpdateMode",
    "UpdateReport",
    "WeightGroup",
    "WindlassError",
    "XcclBackend",
    "connect_trainer",
]
