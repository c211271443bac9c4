"""What Windlass knows of its own engine, and what one is told."""

from __future__ import annotations

import msgspec

from windlass.engines.spec import EngineSpec
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType

ENGINE = EngineSpec(name="embedded", title="embedded", module="windlass.engines.embedded")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine, the same for all of its ranks.

    Attributes:
        name: identity in the fleet; ranks are called `name/rank`.
        model: path of a transformers configuration (random weights) or of a checkpoint folder.
        controller: address; empty serves the initial weights without a controller.
        transport: what receives weights; see `parse_transport`.
        host: address to bind. port: 0 lets the system choose.
        advertise_host: what others connect to; empty for `host`.
        seed: of random weights and of sampling.
        max_batch: requests that run at once. max_positions: tokens per request.
    """

    name: str
    model: str
    tensor_parallel_size: int = 1
    dtype: DType = DType.FLOAT32
    controller: str = ""
    transport: str = "auto"
    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    seed: int = 0
    max_batch: int = 64
    max_positions: int = 64

    def __post_init__(self) -> None:
        counts = {
            "tp": self.tensor_parallel_size,
            "max_batch": self.max_batch,
            "max_positions": self.max_positions,
        }
        for field, value in counts.items():
            if value < 1:
                raise ConfigError(f"engine {self.name}: {field} must be >= 1, got {value}")
