"""Replacement of vLLM's CPU kernels that multiply by private copies of the weights.

With AVX-512 or AMX, vLLM (0.32) packs the weight of every linear layer into memory of oneDNN or of its own
kernel. It then drops the parameter, or keeps the parameter and never reads it again, so that an update of the
parameter would have no effect. Without these instructions vLLM multiplies by the parameter in torch; this
module makes it do so on every CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from windlass.errors import UnsupportedLayout


def multiply_by_parameters(applies: Callable[[], bool] = lambda: True) -> None:
    """Make this worker's linear layers read their parameters. Call it before vLLM loads the model.

    It has no effect outside a vLLM worker on a CPU. vLLM calls `applies` for every layer while it loads the
    model; where it returns False, vLLM packs the weight.

    Raises:
        UnsupportedLayout: raised later, while the model is loaded, if vLLM packed the weight of a convolution
            (AVX512-BF16). The convolution kernels need the packed weight, and they also read a copy that vLLM
            makes once and that no later load renews.
    """
    if "vllm" not in sys.modules:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if not applies():
            pack(layer, remove_weight)
            return
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
            return
        place = layer.weight.data_ptr()
        pack(layer, remove_weight)
        if layer.weight.data_ptr() != place:
            raise UnsupportedLayout(
                "vLLM packs the weights of convolutions on CPUs with AVX512-BF16, and also reads a copy that no "
                "load renews; on this machine, recurrent layers can be updated only with `--dtype float32`"
            )

    utils.dispatch_cpu_unquantized_gemm = dispatch
