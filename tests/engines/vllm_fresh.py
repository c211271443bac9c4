"""The oracle inside vLLM's ranks: a second model, made by the engine's own loader from a checkpoint."""

from __future__ import annotations

import copy
from typing import Any, cast

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.vllm.extension import WindlassExtension


class FreshLoads(WindlassExtension):
    """What the fleet uses, and the oracle."""

    def fresh_digests(self, checkpoint: str) -> dict[str, str]:
        """Of a model loaded from `checkpoint`, beside the one that serves."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        config = copy.copy(cast("Any", self).vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = checkpoint
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
        return fingerprints(held_by(model))
