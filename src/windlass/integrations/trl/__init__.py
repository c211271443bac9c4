"""Weight updates of TRL's trainers.

- `AsyncGRPOTrainer` with plain vLLM servers: `weight_transfer=WeightTransfer([...])`.
- `GRPOTrainer(vllm_mode="colocate")`, with vLLM in the trainer's process: call `colocate()` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.integrations.trl.colocated import colocate as colocate
    from windlass.integrations.trl.weight_transfer import WeightTransfer as WeightTransfer

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
