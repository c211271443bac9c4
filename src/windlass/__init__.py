"""Windlass: send weights from trainers to rollout engines with one-sided, verified writes, as one transaction.

Trainer side (every rank of a torchrun script):

    with windlass.connect_trainer(model, controller=url, token=token) as trainer:
        trainer.publish(version)

Controller side:

    async with windlass.Controller(token=token) as controller:
        await controller.wait_for_fleet(num_trainers=2, engines=("engine-a",), deadline_s=60)

`docs/api.md` lists all public names. This package has the names that most users need. `windlass.trainers`,
`windlass.rollout`, `windlass.engines`, `windlass.transports`, `windlass.jobs`, `windlass.integrations.vllm`,
`windlass.integrations.trl`, `windlass.layout`, `windlass.planning`, `windlass.cli` and `windlass.testing` have names
for special tasks. Every other module is internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.config import CollectiveFabric as CollectiveFabric
    from windlass.config import ControlConfig as ControlConfig
    from windlass.config import DiskBackend as DiskBackend
    from windlass.config import P2pBackend as P2pBackend
    from windlass.config import PauseMode as PauseMode
    from windlass.config import PhaseDeadlines as PhaseDeadlines
    from windlass.config import PluginBackend as PluginBackend
    from windlass.config import RelayShape as RelayShape
    from windlass.config import ReplicaPlace as ReplicaPlace
    from windlass.config import RouterConfig as RouterConfig
    from windlass.config import RouterKind as RouterKind
    from windlass.config import UpdateMode as UpdateMode
    from windlass.config import XcclBackend as XcclBackend
    from windlass.control.engine_agent import EngineHooks as EngineHooks
    from windlass.control.report import RoundOutcome as RoundOutcome
    from windlass.control.report import UpdateReport as UpdateReport
    from windlass.controller import Controller as Controller
    from windlass.engines.client import EngineClient as EngineClient
    from windlass.engines.client import EngineWeights as EngineWeights
    from windlass.errors import AuthenticationError as AuthenticationError
    from windlass.errors import ConfigError as ConfigError
    from windlass.errors import EngineRefused as EngineRefused
    from windlass.errors import IncompleteCoverage as IncompleteCoverage
    from windlass.errors import ManifestError as ManifestError
    from windlass.errors import PeerTimeout as PeerTimeout
    from windlass.errors import PeerUnreachable as PeerUnreachable
    from windlass.errors import PlanError as PlanError
    from windlass.errors import ProtocolError as ProtocolError
    from windlass.errors import RegionError as RegionError
    from windlass.errors import RolloutError as RolloutError
    from windlass.errors import RoundAborted as RoundAborted
    from windlass.errors import StaleMessage as StaleMessage
    from windlass.errors import TrainerError as TrainerError
    from windlass.errors import TransferError as TransferError
    from windlass.errors import TransferFailed as TransferFailed
    from windlass.errors import TransferOutcomeUnknown as TransferOutcomeUnknown
    from windlass.errors import TransportUnavailable as TransportUnavailable
    from windlass.errors import UnsupportedLayout as UnsupportedLayout
    from windlass.errors import WindlassError as WindlassError
    from windlass.rollout.batches import BatchClient as BatchClient
    from windlass.rollout.handles import RolloutConfig as RolloutConfig
    from windlass.rollout.messages import TrainingBatch as TrainingBatch
    from windlass.rollout.messages import TrainingSample as TrainingSample
    from windlass.rollout.staleness import OnStale as OnStale
    from windlass.rollout.staleness import StalenessPolicy as StalenessPolicy
    from windlass.sampling import SamplingParams as SamplingParams
    from windlass.trainers.callback import RolloutCallback as RolloutCallback
    from windlass.trainers.callback import WeightGroup as WeightGroup
    from windlass.trainers.client import TrainerClient as TrainerClient
    from windlass.trainers.fsdp import connect_trainer as connect_trainer
    from windlass.trainers.pending_update import PendingUpdate as PendingUpdate
    from windlass.trainers.weights import TrainerWeights as TrainerWeights

__version__ = "0.1.0"

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
