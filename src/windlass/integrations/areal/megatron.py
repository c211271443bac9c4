"""AReaL's Megatron-core engine: tensor, pipeline, expert, context and data parallel ranks write their shards into the servers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

from areal.engine import megatron_engine

from windlass.integrations.areal.updates import DEADLINE_S, UpdatingActor, UpdatingEngine
from windlass.integrations.hosted import HostAddress
from windlass.trainers.client import TrainerClient
from windlass.trainers.megatron import connect_megatron_trainer

if TYPE_CHECKING:
    from windlass.trainers.exporter import Exporter

__all__ = ["MegatronEngine", "MegatronPPOActor"]


class MegatronEngine(UpdatingEngine, megatron_engine.MegatronEngine):  # type: ignore[misc]
    """AReaL's Megatron engine with weight updates by Windlass, for scripts that create engines themselves."""

    def connect_trainer(self, address: HostAddress) -> TrainerClient:
        """Connect this rank's shards to the controller. Collective; blocks.

        The exporter of AReaL's bridge (`megatron.bridge_type`) determines the names and places of the shards. If it
        computes values, the naming table of the checkpoint's `model_type` is used. Updates gather and convert nothing.
        """
        return connect_megatron_trainer(
            self.model,
            vocab_size=self.hf_config.get_text_config().vocab_size,
            family=self.hf_config.model_type,
            exporter=self._exporter(),
            controller=address.url,
            token=address.token,
            connect_deadline_s=DEADLINE_S,
        )

    def _exporter(self) -> Exporter | None:
        """Return the exporter of AReaL's bridge; None if AReaL has created the model without a bridge."""
        if self.bridge is None:
            return None
        if self.bridge_cls == "megatron-bridge":
            return partial(self.bridge.export_hf_weights, show_progress=False)
        exporter: Exporter = self.bridge.export_weights
        return exporter


@final
class MegatronPPOActor(UpdatingActor, MegatronEngine, megatron_engine.MegatronPPOActor):  # type: ignore[misc]
    """AReaL's PPO actor, based on `MegatronEngine` of this module."""
