"""Stand-ins for modules of vLLM that our ranks import, for tests without vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

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
