"""Windlass: weights from trainers to rollout engines, one-sided, verified, as one transaction.

Trainer side (every rank of a torchrun script):

    with windlass.connect_trainer(model, controller=url, token=token) as trainer:
        trainer.publish(version)

Controller side:

    async with windlass.Controller(token=token) as controller:
        await controller.wait_for_fleet(num_trainers=2, engines=("engine-a",), deadline_s=60)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.config import (
        ControlConfig,
        DiskBackend,
        P2pBackend,
        PauseMode,
        PhaseDeadlines,
        UpdateMode,
        XcclBackend,
    )
    from windlass.controller import Controller
    from windlass.engines.client import EngineClient
    from windlass.errors import WindlassError
    from windlass.rollout.client import BatchClient
    from windlass.rollout.messages import SamplingParams, TrainingBatch, TrainingSample
    from windlass.rollout.staleness import OnStale, StalenessPolicy
    from windlass.trainers.callback import RolloutCallback, WeightGroup
    from windlass.trainers.client import PendingUpdate, TrainerClient, connect_trainer
    from windlass.updates.hooks import EngineHooks
    from windlass.updates.messages import RoundOutcome, UpdateReport

__version__ = "0.1.0"

__all__ = [
    "BatchClient",
    "ControlConfig",
    "Controller",
    "DiskBackend",
    "EngineClient",
    "EngineHooks",
    "OnStale",
    "P2pBackend",
    "PauseMode",
    "PendingUpdate",
    "PhaseDeadlines",
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

# Each name is imported when it is first used: a process that only moves bytes needs no web server.
_HOMES = {
    "ControlConfig": "windlass.config",
    "DiskBackend": "windlass.config",
    "P2pBackend": "windlass.config",
    "XcclBackend": "windlass.config",
    "PauseMode": "windlass.config",
    "PhaseDeadlines": "windlass.config",
    "UpdateMode": "windlass.config",
    "RoundOutcome": "windlass.updates.messages",
    "UpdateReport": "windlass.updates.messages",
    "Controller": "windlass.controller",
    "EngineClient": "windlass.engines.client",
    "EngineHooks": "windlass.updates.hooks",
    "WindlassError": "windlass.errors",
    "BatchClient": "windlass.rollout.client",
    "SamplingParams": "windlass.rollout.messages",
    "TrainingBatch": "windlass.rollout.messages",
    "TrainingSample": "windlass.rollout.messages",
    "StalenessPolicy": "windlass.rollout.staleness",
    "OnStale": "windlass.rollout.staleness",
    "RolloutCallback": "windlass.trainers.callback",
    "WeightGroup": "windlass.trainers.callback",
    "PendingUpdate": "windlass.trainers.client",
    "TrainerClient": "windlass.trainers.client",
    "connect_trainer": "windlass.trainers.client",
}

if not TYPE_CHECKING:  # a type checker must go on refusing names that are not there

    def __getattr__(name: str) -> object:
        """Import a public name.

        Raises:
            AttributeError: there is no such name.
        """
        if name not in _HOMES:
            raise AttributeError(f"module 'windlass' has no attribute {name!r}")
        value = vars(import_module(_HOMES[name]))[name]
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """With the names that are not imported yet."""
        return sorted({*globals(), *__all__})
