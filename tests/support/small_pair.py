"""One trainer rank and one engine rank with one small tensor, connected over `cma`, in this process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windlass.control.engine_agent import EngineHooks
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.net.access import Access, role_token
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transports.registry import create_transport, parse_transport

__all__ = ["SmallPair", "connect_small_pair", "small_manifest"]

_SHAPE = (4, 6)
_NBYTES = 24


@dataclass(frozen=True)
class SmallPair:
    """Both ends.

    Attributes:
        trained: bytes that the trainer publishes, all different.
        served: the engine's memory.
    """

    trained: np.ndarray
    served: np.ndarray
    trainer: TrainerClient
    engine: EngineClient

    def close(self) -> None:
        """Disconnect both ends."""
        self.trainer.close()
        self.engine.close()


def connect_small_pair(controller: str, token: str, hooks: EngineHooks, url: str) -> SmallPair:
    """Connect both ends; the engine is group `a`. Blocks.

    Args:
        controller: URL of the controller.
        token: token of all roles.
        hooks: hooks of the engine.
        url: URL of the engine's server.
    """
    trained, served = np.arange(_NBYTES, dtype=np.uint8), np.zeros(_NBYTES, np.uint8)
    addresses = [int(array.ctypes.data) for array in (trained, served)]
    sides = [create_transport(parse_transport("cma"), towards=controller) for _ in range(2)]
    regions = [s.register(a, _NBYTES) for s, a in zip(sides, addresses, strict=True)]
    memory = (ParameterMemory(addresses[0], _NBYTES),)
    trainer = TrainerClient(
        TrainerWeights(
            manifest=small_manifest("trainer/0", Role.TRAINER),
            parameters=lambda: memory,
        ),
        transport=sides[0],
        controller=controller,
        token=role_token(token, Access.TRAINER),
        registered=[regions[0]],
    )
    engine = EngineClient(
        EngineWeights(
            manifest=small_manifest("a/0", Role.ENGINE),
            addresses=[addresses[1]],
            regions=[regions[1]],
        ),
        transport=sides[1],
        hooks=hooks,
        controller=controller,
        token=role_token(token, Access.ENGINE),
        url=url,
    )
    return SmallPair(trained, served, trainer, engine)


def small_manifest(worker: str, role: Role) -> ShardManifest:
    """Return the manifest of either end: one whole checkpoint tensor."""
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("p", nbytes=_NBYTES, dtype=DType.UINT8)
    builder.add_shard("weight", _SHAPE, Box((0, 0), _SHAPE), "p")
    return builder.build()
