"""The reference in vLLM's ranks: a second model that the engine's own loader makes from a checkpoint."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import vllm_cpu_experts
import vllm_cpu_store

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.vllm.adapter import Slot
from windlass.engines.vllm.rank import cache_storages
from windlass.engines.vllm.spec import draft_follows

vllm_cpu_experts.install()
vllm_cpu_store.install_copies()
# Mooncake's connector records an event of the GPU before it reads the KV cache.
torch.cuda.Event = torch.cpu.Event  # type: ignore[misc,assignment]
if os.environ.get("WINDLASS_TEST_WITHOUT_AVX512_BF16"):
    torch.cpu._is_avx512_bf16_supported = lambda: False
FAILS = os.environ.get("WINDLASS_TEST_LOAD_FAILS", "")
"""File that makes every load fail while it exists, after the number of tensors in it."""


def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; fail if the file exists."""
    for number, named in enumerate(weights):
        if FAILS and Path(FAILS).exists() and number == int(Path(FAILS).read_text()):
            raise RuntimeError("told to fail")
        yield named


def let_loads_fail() -> None:
    """Patch vLLM's worker so that its loads fail on request."""
    from vllm.v1.worker.gpu_worker import Worker

    reload = Worker.reload_weights

    def reload_weights(worker: Any, *, weights_iterator: Any, is_checkpoint_format: bool) -> None:
        reload(
            worker,
            weights_iterator=failing(weights_iterator),
            is_checkpoint_format=is_checkpoint_format,
        )

    Worker.reload_weights = reload_weights


if FAILS:
    let_loads_fail()


class FreshLoads:
    """Worker extension with digests of fresh loads, next to the methods of Windlass's plugin."""

    def write_digests(self, checkpoint: str, folder: str) -> None:
        """Write `windlass_digests`, or `fresh_digests` of a checkpoint, to `folder`/rank.

        vLLM answers for its first replica only, so the ranks write files.
        """
        worker = cast("Any", self)
        digests = self.fresh_digests(checkpoint) if checkpoint else worker.windlass_digests()
        (Path(folder) / str(worker.windlass_rank())).write_bytes(msgspec.json.encode(digests))

    def draft_digests(self) -> dict[str, str]:
        """Return digests of the draft model's tensors, without those that it shares with the served model."""
        runner = cast("Any", self).model_runner
        model = vars(vars(runner).get("drafter") or runner).get("model")
        if model is None or model is runner.get_model():
            return {}
        shared = {holding.address for holding in held_by(runner.get_model()).values()}
        held = held_by(model, cache_storages(self))
        return fingerprints({n: h for n, h in held.items() if h.address not in shared})

    def fresh_digests(self, checkpoint: str) -> dict[str, str]:
        """Return digests of a model loaded from `checkpoint`, and of its drafting model, next to
        the serving ones."""
        from vllm.config import set_current_vllm_config

        model, config = self._fresh(checkpoint)
        if not draft_follows(cast("Any", self).vllm_config):
            return fingerprints(held_by(model))
        drafter = copy.copy(cast("Any", self).model_runner.drafter)
        drafter.vllm_config = config
        drafter.speculative_config = config.speculative_config = copy.copy(
            config.speculative_config
        )
        drafts = copy.copy(config.speculative_config.draft_model_config)
        drafts.model, config.speculative_config.draft_model_config = checkpoint, drafts
        with set_current_vllm_config(config):
            drafter.load_model(model)
        both = torch.nn.ModuleDict({"target": model, "draft": drafter.model})
        return fingerprints(held_by(both))

    def fresh_adapter_digests(self, adapter: str) -> dict[str, str]:
        """Return digests of the adapter slots of a new model with the same weights, after vLLM
        loads an adapter."""
        from vllm.config import set_current_vllm_config
        from vllm.lora.request import LoRARequest
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        worker = cast("Any", self)
        model, config = self._fresh(worker.vllm_config.model_config.model)
        with set_current_vllm_config(config):
            manager = LRUCacheWorkerLoRAManager(config, worker.device, model.embedding_modules)
            wrapped = manager.create_lora_manager(model, config)
        manager.add_adapter(LoRARequest("fresh", 1, adapter))
        return fingerprints(held_by(Slot(wrapped)))

    def load_another_adapter(self, adapter: str) -> str:
        """Return vLLM's answer to an adapter that would evict the serving adapter."""
        from vllm.lora.request import LoRARequest

        try:
            cast("Any", self).add_lora(LoRARequest("another", 7, adapter))
        except RuntimeError as error:
            return str(error)
        return "loaded"

    def run_dummy_batch(self) -> None:
        """Run vLLM's dummy batch; vLLM's own `execute_dummy_batch` drops every adapter at its end."""
        cast("Any", self).model_runner._dummy_run(1, uniform_decode=True, remove_lora=False)

    def _fresh(self, checkpoint: str) -> tuple[Any, Any]:
        """Return a new model and its configuration."""
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
        return model, config
