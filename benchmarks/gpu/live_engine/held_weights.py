"""What a worker of vLLM holds, for those who compare: `--worker-extension-cls live_engine.held_weights.HeldWeights`."""

from __future__ import annotations

from typing import Any, cast

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.vllm.rank import cache_storages


class HeldWeights:
    """vLLM makes this a base class of its worker. It takes no part in updates."""

    def held_weights(self) -> dict[str, str]:
        """A fingerprint of every tensor: parameters, buffers and what modules keep besides."""
        worker = cast("Any", self)
        return fingerprints(held_by(worker.model_runner.get_model(), cache_storages(worker)))
