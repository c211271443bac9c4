"""Trainer engine of vLLM's weight-transfer backend "windlass"; importing this module registers it.

`WeightTransferTrainerFactory` (vLLM 0.32, `vllm/distributed/weight_transfer/factory.py`; vLLM 0.24 lacks it) creates a
backend's trainer engine from an init info, a client and a source. The engine of this module creates a `WeightSync`
from all three. Every trainer rank runs:

    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=rank), client=HTTPVLLMWeightSyncClient(url), source=ModuleShards(model)
    )
    engine.send_weights()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, final

import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from windlass.config import ControlConfig
from windlass.engines.vllm.backend import BACKEND
from windlass.errors import ConfigError
from windlass.integrations.fleet_sync import SentWeights
from windlass.integrations.hosted import TrainerRanks
from windlass.integrations.vllm.sync import WeightSync

__all__ = ["ModuleShards", "TrainerInit", "WindlassTrainerEngine"]


@final
class ModuleShards(ModuleSource):  # type: ignore[misc]
    """Source with the trained model; every rank sends its own shards of this model.

    The backend "windlass" reads `module` and does not iterate over the source. For vLLM's own backends, which iterate,
    the source gathers tensors as `ModuleSource` does.

    Args:
        module: see `WeightSync`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.module = module


@dataclass(kw_only=True)
class TrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """Arguments of `WeightTransferTrainerFactory.trainer_init` for this backend.

    Attributes:
        rank: rank of this process in torch.distributed.
        servers: URLs of all servers, in the same order on every rank; if empty, the URL of the
            `HTTPVLLMWeightSyncClient` is used.
        config, transport, api_key, deadline_s: see `WeightSync`.
        pause: see `WeightSync`; None by default, because callers of vLLM's trainer engines pause and resume.
    """

    backend: ClassVar[str] = BACKEND

    servers: Sequence[str] = ()
    config: ControlConfig | None = None
    transport: str = "auto"
    pause: str | None = None
    api_key: str = ""
    deadline_s: float = 600.0


@final
class WindlassTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Trainer engine of one rank. Create it with `trainer_init`. Every method is collective, as in `WeightSync`."""

    init_info_cls = TrainerInit

    def __init__(
        self, sync: WeightSync, client: VLLMWeightSyncClient, source: ModuleShards
    ) -> None:
        super().__init__(
            client=client, source=source, is_sender=TrainerRanks.of_process().rank == 0
        )
        self._sync, self._num_sent = sync, 0

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Connect this trainer's ranks to the servers. Collective; blocks.

        Args:
            init_info: see `TrainerInit`.
            client: an `HTTPVLLMWeightSyncClient`; its URL is used if `init_info.servers` is empty. Its methods are not
                called.
            source: a `ModuleShards`.

        Raises:
            ConfigError: an argument is invalid.
            WindlassError: any error of `WeightSync`.
        """
        rank = TrainerRanks.of_process().rank
        if init_info.rank != rank:
            raise ConfigError(
                f"rank: must be {rank}, the rank in torch.distributed, got {init_info.rank}"
            )
        if not isinstance(source, ModuleShards):
            raise ConfigError(
                "source: must be windlass.integrations.vllm.ModuleShards(model), which gathers no tensor, "
                f"got {type(source).__name__}"
            )
        servers = init_info.servers
        if not servers:
            if not isinstance(client, HTTPVLLMWeightSyncClient):
                raise ConfigError(
                    "client: must be an HTTPVLLMWeightSyncClient if `servers` is empty, "
                    f"got {type(client).__name__}"
                )
            servers = (client.base_url,)
        sync = WeightSync(
            source.module,
            servers=servers,
            config=init_info.config,
            transport=init_info.transport,
            pause=init_info.pause,
            api_key=init_info.api_key,
            deadline_s=init_info.deadline_s,
        )
        return cls(sync, client, source)

    def send_weights(self) -> SentWeights:
        """Publish the current weights to every server. Collective; blocks.

        The first call publishes version 1, the next call version 2, and so on.

        Raises:
            WindlassError: see `WeightSync.send_weights`.
        """
        self._num_sent += 1
        return self._sync.send_weights(self._num_sent)

    def shutdown(self) -> None:
        """Disconnect from the servers; see `WeightSync.shutdown`."""
        self._sync.shutdown()


WeightTransferTrainerFactory.register_engine(BACKEND, WindlassTrainerEngine)
