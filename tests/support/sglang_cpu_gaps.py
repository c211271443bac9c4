"""Parts in plain torch that SGLang 0.5.23 lacks to run some models on CPUs.

`sglang_fresh` installs them in a server of the tests, and `fresh_servers` in a server without
Windlass. They change no weight, no loading and no pause.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Supply the parts in the process of a rank. Call it before the first request."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    # The only attention for a CPU without kernels is in plain torch and reads the latent cache. SGLang gives it
    # prompts in another form; absorbed attention gives it the form that it reads.
    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
    # SGLang's other attention for CPUs has this method. Without it, a server with data-parallel attention ends at its
    # first request.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
    _drop_experts_of_other_ranks()


def _drop_experts_of_other_ranks() -> None:
    """Give experts of other ranks no weight.

    SGLang marks them by -1. Its plain-torch experts take -1 for a place ("index -1 is out of
    bounds"). They also count an expert once per token, so this function runs each choice by
    itself.
    """
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native
    if forward.__module__ == __name__:
        return

    def dropping(layer: Any, x: torch.Tensor, topk: Any, config: Any) -> torch.Tensor:
        weights, numbers, logits = topk
        if not bool((numbers < 0).any()):
            every: torch.Tensor = forward(layer, x, topk, config)
            return every
        kept, places = weights * (numbers >= 0), numbers.clamp(min=0)
        out = torch.zeros_like(x)
        for choice in range(numbers.shape[1]):
            alone = slice(choice, choice + 1)
            out += forward(layer, x, (kept[:, alone], places[:, alone], logits), config)
        return out

    fused_moe_native.moe_forward_native = dropping
