"""Fingerprints of a vLLM worker's weights: `--worker-extension-cls live_engine.held_weights.HeldWeights`."""

from __future__ import annotations

from typing import Any, cast

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.vllm.rank import cache_storages


class HeldWeights:
    """Extension that vLLM adds to the base classes of its worker. Updates do not use it."""

    def held_weights(self) -> dict[str, str]:
        """Return a fingerprint of every tensor: parameters, buffers and other tensors of modules."""
        worker = cast("Any", self)
        return fingerprints(held_by(worker.model_runner.get_model(), cache_storages(worker)))
