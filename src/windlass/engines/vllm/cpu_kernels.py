"""vLLM's kernels for CPUs, some of which multiply by copies of the weights that nobody else can reach.

With AVX-512 or AMX vLLM (0.32) packs the weight of every linear layer into memory of oneDNN or of a
kernel of its own and drops the parameter, or keeps it and never reads it again: an update of it would
go unseen. Without them it multiplies by the parameter, in torch; so it does here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from windlass.errors import UnsupportedLayout


def multiply_by_parameters(applies: Callable[[], bool] = lambda: True) -> None:
    """Have this worker's linear layers read their parameters. Called before its model is loaded.

    Outside a worker of vLLM on a CPU it does nothing. Where `applies`, asked for every layer while the model is
    loaded, says no, vLLM packs.

    Raises:
        UnsupportedLayout: not now, but while the model is loaded: the weight of a convolution was packed
            (AVX512-BF16). Its kernels take no other, and a copy that they read, too, is made once and
            not when weights are loaded again.
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
                "vLLM packs the weights of convolutions on CPUs with AVX512-BF16, and what it reads "
                "besides would keep old weights: recurrent layers are updated on this machine with `--dtype float32` only"
            )

    utils.dispatch_cpu_unquantized_gemm = dispatch
