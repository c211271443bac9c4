"""Asynchronous rollouts: the controller that dispatches them, the workers that run them, and training batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.rollout.batches import BatchClient as BatchClient
    from windlass.rollout.batches import BatchQueue as BatchQueue
    from windlass.rollout.batches import training_samples as training_samples
    from windlass.rollout.chat.agent import agent_workflow as agent_workflow
    from windlass.rollout.chat.client import Claimed as Claimed
    from windlass.rollout.chat.client import claim_rollout as claim_rollout
    from windlass.rollout.chat.client import set_reward as set_reward
    from windlass.rollout.chat.server import ChatSettings as ChatSettings
    from windlass.rollout.chat.session import ChatSession as ChatSession
    from windlass.rollout.controller import RolloutController as RolloutController
    from windlass.rollout.controller import mount_rollout_routes as mount_rollout_routes
    from windlass.rollout.directory import EngineDirectory as EngineDirectory
    from windlass.rollout.directory import Routing as Routing
    from windlass.rollout.directory import StaticEngines as StaticEngines
    from windlass.rollout.generate import GeneratedToken as GeneratedToken
    from windlass.rollout.generate import Reject as Reject
    from windlass.rollout.generate import Watch as Watch
    from windlass.rollout.handles import GroupHandle as GroupHandle
    from windlass.rollout.handles import Recovered as Recovered
    from windlass.rollout.handles import Rollout as Rollout
    from windlass.rollout.handles import RolloutConfig as RolloutConfig
    from windlass.rollout.handles import RolloutGroup as RolloutGroup
    from windlass.rollout.handles import RolloutHandle as RolloutHandle
    from windlass.rollout.handles import RolloutStats as RolloutStats
    from windlass.rollout.messages import OnAbort as OnAbort
    from windlass.rollout.messages import TrainingBatch as TrainingBatch
    from windlass.rollout.messages import TrainingSample as TrainingSample
    from windlass.rollout.messages import Turn as Turn
    from windlass.rollout.packing import Pack as Pack
    from windlass.rollout.packing import pack as pack
    from windlass.rollout.reward_server import RewardServer as RewardServer
    from windlass.rollout.reward_server import ServerRewards as ServerRewards
    from windlass.rollout.rewards import ProcessRewards as ProcessRewards
    from windlass.rollout.rewards import RewardError as RewardError
    from windlass.rollout.rewards import RewardPool as RewardPool
    from windlass.rollout.rewards import Scorer as Scorer
    from windlass.rollout.staleness import OnStale as OnStale
    from windlass.rollout.staleness import StalenessPolicy as StalenessPolicy
    from windlass.rollout.tensors import SampleTensor as SampleTensor
    from windlass.rollout.text import Chat as Chat
    from windlass.rollout.trajectories import Trajectory as Trajectory
    from windlass.rollout.trajectories import merge_turns as merge_turns
    from windlass.rollout.worker import run_rollout_worker as run_rollout_worker
    from windlass.rollout.workflows import Workflow as Workflow
    from windlass.rollout.workflows import WorkflowContext as WorkflowContext
    from windlass.sampling import SamplingParams as SamplingParams

# Hidden from type checkers: with a module `__getattr__` they would accept unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
