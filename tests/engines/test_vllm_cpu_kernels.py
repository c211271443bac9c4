"""On a CPU, linear layers of vLLM read their parameters, which updates write, instead of packed copies."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.errors import UnsupportedLayout


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Provide the used modules of vLLM; `packed` lists the layers that vLLM has packed."""
    found = SimpleNamespace(packed=[], is_cpu=True, moves=False)

    def pack(layer: SimpleNamespace, remove_weight: bool) -> None:
        found.packed.append((layer, remove_weight))
        if found.moves:
            layer.weight = layer.weight.clone()

    utils, platforms = ModuleType("vllm.model_executor.layers.utils"), ModuleType("vllm.platforms")
    vars(utils)["dispatch_cpu_unquantized_gemm"] = pack
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: found.is_cpu)
    layers = ModuleType("vllm.model_executor.layers")
    vars(layers)["utils"] = utils
    modules = (ModuleType("vllm"), ModuleType("vllm.model_executor"), layers, utils, platforms)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found.utils = utils
    return found


def test_a_linear_layer_multiplies_by_its_parameter(vllm: SimpleNamespace) -> None:
    multiply_by_parameters(lambda: True)
    layer = SimpleNamespace(weight=torch.ones(3, 2))
    vllm.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    # An update changes the parameter in place.
    layer.weight *= 5
    assert layer.cpu_linear(torch.ones(1, 2), layer.weight, None).tolist() == [[10.0] * 3]
    assert vllm.packed == []


def test_a_convolution_that_is_not_packed_is_left_to_vllm(vllm: SimpleNamespace) -> None:
    multiply_by_parameters(lambda: True)
    layer = SimpleNamespace(weight=torch.ones(3, 1, 4))
    vllm.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert vllm.packed == [(layer, False)]


def test_a_convolution_that_is_packed_is_refused(vllm: SimpleNamespace) -> None:
    vllm.moves = True
    multiply_by_parameters(lambda: True)
    layer = SimpleNamespace(weight=torch.ones(3, 1, 4))
    with pytest.raises(UnsupportedLayout, match="only with `--dtype float32`"):
        vllm.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def test_the_kernel_patch_changes_nothing_on_gpus(vllm: SimpleNamespace) -> None:
    vllm.is_cpu = False
    before = vllm.utils.dispatch_cpu_unquantized_gemm
    multiply_by_parameters(lambda: True)
    assert vllm.utils.dispatch_cpu_unquantized_gemm is before


def test_the_kernel_patch_does_not_import_vllm() -> None:
    assert "vllm" not in sys.modules
    multiply_by_parameters(lambda: True)
    assert "vllm" not in sys.modules
