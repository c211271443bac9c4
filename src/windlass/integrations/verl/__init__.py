"""verl's checkpoint engines "windlass" and "windlass_shards", which are registered when this is imported.

verl imports it by `checkpoint_engine.custom_backend_module`, or by its entry point.
"""

from __future__ import annotations

from windlass.integrations.verl.shards import ShardCheckpointEngine, ShardCheckpointManager
from windlass.integrations.verl.whole import WindlassCheckpointEngine

__all__ = ["ShardCheckpointEngine", "ShardCheckpointManager", "WindlassCheckpointEngine"]
