"""Asynchronous rollouts: admission, dispatch, completion callbacks."""

from __future__ import annotations

from windlass.rollout.batches import BatchQueue, training_samples
from windlass.rollout.client import BatchClient
from windlass.rollout.controller import RolloutController
from windlass.rollout.directory import EngineDirectory, StaticEngines
from windlass.rollout.handles import (
    GroupHandle,
    Recovered,
    Rollout,
    RolloutConfig,
    RolloutGroup,
    RolloutHandle,
    RolloutStats,
)
from windlass.rollout.messages import (
    OnAbort,
    SamplingParams,
    TrainingBatch,
    TrainingSample,
    Turn,
)
from windlass.rollout.runner import run_rollout_worker
from windlass.rollout.service import mount_rollout_routes
from windlass.rollout.staleness import OnStale, StalenessPolicy
from windlass.rollout.workflows import Reject, Workflow, WorkflowContext

__all__ = [
    "BatchClient",
    "BatchQueue",
    "RolloutConfig",
    "EngineDirectory",
    "GroupHandle",
    "OnAbort",
    "OnStale",
    "Recovered",
    "Reject",
    "Rollout",
    "RolloutController",
    "RolloutGroup",
    "RolloutHandle",
    "RolloutStats",
    "SamplingParams",
    "StalenessPolicy",
    "StaticEngines",
    "TrainingBatch",
    "TrainingSample",
    "Turn",
    "Workflow",
    "WorkflowContext",
    "mount_rollout_routes",
    "run_rollout_worker",
    "training_samples",
]
