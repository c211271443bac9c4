"""Stand-ins for vLLM's worker and for modules of vLLM that our ranks import, for tests without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from windlass.engines.engine_rank import EngineRank
from windlass.engines.vllm.worker import WorkerMethods

LOADER = "vllm.model_executor.model_loader"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide stand-ins for vLLM's modules until the end of the test."""
    world = SimpleNamespace(cpu_group="gloo of the replica")
    modules: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: world},
        "vllm.model_executor": {},
        LOADER: {},
        f"{LOADER}.reload": {},
    }
    layerwise = ModuleType(f"{LOADER}.reload.layerwise")
    vars(layerwise).update(LAYERWISE_INFO={}, get_numel_loaded=lambda *_: (0, None))
    modules[f"{LOADER}.reload"]["layerwise"] = layerwise
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, layerwise.__name__, layerwise)


class Worker(WorkerMethods):
    """Rank with the attributes that vLLM gives it, and with the methods that the plugin adds.

    Args:
        model: model that the rank serves.
        load: loader of the model.
        checkpoint: folder of the model that the rank was started with.
        load_format: value of `--load-format`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        checkpoint: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        load_format: str = "auto",
    ) -> None:
        self._load, self.rank = load, rank
        self.weight_transfer_engine = SimpleNamespace(rank=EngineRank())
        self.model_runner = SimpleNamespace(kv_caches=[], get_model=lambda: model)
        self.parallel_config = SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            world_size=world_size,
        )
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(checkpoint),
                revision=None,
                quantization=None,
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=False,
            ),
            load_config=SimpleNamespace(load_format=load_format),
            speculative_config=None,
        )

    def finish_weight_update(self) -> None:
        """Fail as vLLM does if no update is open."""
        raise RuntimeError("no update is open")

    def reload_weights(
        self, *, weights_iterator: Iterator[tuple[str, torch.Tensor]], is_checkpoint_format: bool
    ) -> None:
        self._load(weights_iterator)
