"""Checkpoint engines "windlass" and "windlass_shards" for verl; importing this package registers them.

verl imports the package if `checkpoint_engine.custom_backend_module` names it, or through its entry point.
"""

from __future__ import annotations

from windlass.integrations.verl.shards import ShardCheckpointEngine, ShardCheckpointManager
from windlass.integrations.verl.whole import WindlassCheckpointEngine

__all__ = ["ShardCheckpointEngine", "ShardCheckpointManager", "WindlassCheckpointEngine"]
