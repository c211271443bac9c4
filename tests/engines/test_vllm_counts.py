"""vLLM's reload counts the elements that weight loaders copy; Windlass counts only once for equal tensors."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch

from windlass.engines.vllm.rank import SeenTensors, counted_once


class Experts:
    """A layer with a weight loader."""

    def weight_loader(
        self, param: torch.Tensor, loaded: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        raise AssertionError("only looked at")


@pytest.fixture
def layerwise(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provide vLLM's module, with a function that returns the number of its calls."""
    called: list[object] = []

    def get_numel_loaded(loader: object, arguments: inspect.BoundArguments) -> tuple[int, object]:
        called.append(loader)
        return len(called), True

    name = "vllm.model_executor.model_loader.reload"
    for at in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:at])
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    module = ModuleType(f"{name}.layerwise")
    module.__dict__["get_numel_loaded"] = get_numel_loaded
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules[name], "layerwise", module, raising=False)
    return module


def test_a_count_is_reused_only_for_equal_loads(layerwise: ModuleType) -> None:
    known, count = SeenTensors(), layerwise.get_numel_loaded

    def counted(*, layer: int = 0, size: int = 8, shard_id: str = "w1", expert: int = 3) -> int:
        loader = Experts().weight_loader
        arguments = inspect.signature(loader).bind(
            torch.empty(2, 2 * size, 4, device="meta"),
            torch.zeros(size, 4),
            f"model.layers.{layer}.experts.{expert}.w13_weight",
            shard_id,
            expert,
        )
        found: tuple[int, object] = layerwise.get_numel_loaded(loader, arguments)
        return found[0]

    with counted_once(known):
        assert counted() == 1
        assert counted(layer=17) == 1
        assert counted(shard_id="w3") == 2
        assert counted(expert=4) == 3
        assert counted(size=16) == 4
    with counted_once(known):
        assert counted(layer=5, shard_id="w3") == 2
    assert layerwise.get_numel_loaded is count
    assert counted() == 5


def test_a_load_with_unknown_arguments_is_counted_each_time(layerwise: ModuleType) -> None:
    with counted_once(SeenTensors()):
        for number in (1, 2):
            arguments = inspect.signature(lambda param, how: None).bind(torch.zeros(1), object())
            assert layerwise.get_numel_loaded(None, arguments)[0] == number
