"""Entry point for the group `vllm.general_plugins`.

vLLM calls `register` first in its API server, in every EngineCore and in every worker (`vllm/plugins/__init__.py`, 0.24
and 0.32). An engine with another backend, or with none, behaves as before.
"""

from __future__ import annotations

import contextlib

from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.engines.vllm.engine_core import BACKEND, is_backend_of, keep_caches_apart
from windlass.engines.vllm.sampling import set_defaults

__all__ = ["register"]


def register() -> None:
    """Register the weight-transfer backend "windlass"; see `windlass.engines.vllm.weight_transfer`."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM raises ValueError if this process has registered the backend before.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "windlass.engines.vllm.weight_transfer", "WindlassTransferEngine"
        )
    keep_caches_apart()
    set_defaults(BACKEND)
    multiply_by_parameters(lambda: is_backend_of(get_current_vllm_config()))
