"""Weight updates of plain `vllm serve` servers: `--weight-transfer-config '{"backend": "windlass"}'`.

Every trainer rank runs:

    sync = WeightSync(model, servers=["http://127.0.0.1:8000"])
    sync.send_weights(version)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.integrations.fleet_sync import SentWeights as SentWeights
    from windlass.integrations.vllm.colocated import ColocatedEngine as ColocatedEngine
    from windlass.integrations.vllm.colocated import ColocatedSync as ColocatedSync
    from windlass.integrations.vllm.servers import PAUSE_MODES as PAUSE_MODES
    from windlass.integrations.vllm.servers import VllmServers as VllmServers
    from windlass.integrations.vllm.sync import WeightSync as WeightSync
    from windlass.integrations.vllm.trainer import ModuleShards as ModuleShards
    from windlass.integrations.vllm.trainer import TrainerInit as TrainerInit

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
