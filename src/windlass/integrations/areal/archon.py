"""AReaL's Archon: FSDP2, tensor, context, pipeline and expert parallel ranks write their shards into the servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from areal.experimental.engine import archon_engine
from torch.distributed.tensor import DTensor

from windlass.integrations.areal.updates import DEADLINE_S, UpdatingActor, UpdatingEngine
from windlass.integrations.hosted import HostAddress
from windlass.trainers.client import TrainerClient
from windlass.trainers.fsdp import connect_trainer

__all__ = ["ArchonEngine", "ArchonPPOActor"]


class ArchonEngine(UpdatingEngine, archon_engine.ArchonEngine):  # type: ignore[misc]
    """AReaL's Archon engine with weight updates by Windlass, for scripts that create engines themselves."""

    def skip_own_group(self) -> None:
        """Tell AReaL's engine that it has a process group with the servers, so that it creates none."""
        self._weight_sync_state.group_initialized = True

    def connect_trainer(self, address: HostAddress) -> TrainerClient:
        """Connect this rank's shards to the controller. Collective; blocks.

        AReaL's own conversion to checkpoint tensors determines the names and places of the shards. It runs a few times on
        element numbers, and gathers one parameter at a time. Updates gather nothing.
        """
        parts = self.model_parts
        return connect_trainer(
            parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts),
            exporter=lambda _: self._converted(),
            controller=address.url,
            token=address.token,
            connect_deadline_s=DEADLINE_S,
        )

    def _converted(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this pipeline rank's checkpoint tensors, as AReaL's own weight update does. Collective."""
        for name, parameter in self._get_model_name_parameters():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                # With `offload_params`, the shards are in host memory, and the mesh has no collectives there.
                tensor = tensor.to(tensor.device_mesh.device_type)
            yield from self.state_dict_adapter.convert_single_to_hf(name, tensor)


@final
class ArchonPPOActor(UpdatingActor, ArchonEngine, archon_engine.ArchonPPOActor):  # type: ignore[misc]
    """AReaL's PPO actor, based on `ArchonEngine` of this module."""
