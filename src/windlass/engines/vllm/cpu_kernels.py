"""Replacement of vLLM's CPU kernels that multiply by private copies of the weights.

On a CPU with AVX-512 or AMX, vLLM (0.32) packs the weight of every linear layer into memory of oneDNN or of a vLLM
kernel, and never reads the parameter again. An update of the parameter would have no effect. This module makes vLLM call
`torch.nn.functional.linear` with the parameter, as vLLM does on other CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from windlass.errors import UnsupportedLayout


def multiply_by_parameters(applies: Callable[[], bool]) -> None:
    """Make this worker's linear layers compute with their parameters, not with packed copies.

    Call this before vLLM loads the model.

    This has no effect outside a vLLM worker on a CPU. If vLLM packs the weight of a convolution (AVX512-BF16), vLLM fails
    to load the model: it raises UnsupportedLayout, because updates cannot reach the packed copy.

    Args:
        applies: function that is called for every layer; if it returns False, vLLM packs the layer's weight.
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
                "on CPUs with AVX512-BF16, vLLM computes convolutions with a packed copy of their weights, and no update "
                "reaches this copy; on this machine, serve recurrent models only with `--dtype float32`"
            )

    utils.dispatch_cpu_unquantized_gemm = dispatch
