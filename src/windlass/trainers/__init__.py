"""Trainer adapters, and the client that publishes the weights of a trainer rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.layout.naming.adapters import adapter_names as adapter_names
    from windlass.trainers.callback import RolloutCallback as RolloutCallback
    from windlass.trainers.callback import WeightGroup as WeightGroup
    from windlass.trainers.client import TrainerClient as TrainerClient
    from windlass.trainers.exporter import Exporter as Exporter
    from windlass.trainers.fsdp import connect_trainer as connect_trainer
    from windlass.trainers.megatron import check_whole as check_whole
    from windlass.trainers.megatron import connect_megatron_trainer as connect_megatron_trainer
    from windlass.trainers.megatron import make_whole as make_whole
    from windlass.trainers.pending_update import PendingUpdate as PendingUpdate
    from windlass.trainers.weights import TrainerWeights as TrainerWeights
    from windlass.transfer.base import ParameterMemory as ParameterMemory
    from windlass.transfer.replica import CopyTimes as CopyTimes

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
