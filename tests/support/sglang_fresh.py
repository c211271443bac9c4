"""The oracle inside SGLang's ranks: a second model, made by the engine's own loader from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.rank_reports import carry_out
from windlass.engines.sglang.hook import own_rank

FAILS = os.environ.get("WINDLASS_TEST_LOAD_FAILS", "")
"""A file: while it is there, every load fails after as many tensors as it says."""


def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, as long as there is no such file."""
    for number, named in enumerate(weights):
        if FAILS and Path(FAILS).exists() and number == int(Path(FAILS).read_text()):
            raise RuntimeError("told to fail")
        yield named


class LoadAfresh(msgspec.Struct, frozen=True):
    """Report the digests of a model loaded from `checkpoint` in `folder`, as JSON."""

    checkpoint: str
    folder: str


def run(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in the main loop of every rank."""
    if FAILS and "load_weights" not in vars(model):
        load = model.load_weights
        model.load_weights = lambda weights: load(failing(weights))
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_loader import get_model
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )
    from sglang.srt.runtime_context import get_server_args

    # SGLang's attention in plain torch, the only one on a CPU without kernels, reads the latent
    # cache; SGLang sends prompts to it that want another. Absorbed attention suits it.
    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
    drop_experts_of_other_ranks()
    # As SGLang's other attention for CPUs has it. Without it a server whose attention is data-parallel dies with its
    # first request, which must come after this.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
    order = msgspec.json.decode(named_tensors[0][0], type=LoadAfresh)
    config = ModelConfig.from_server_args(get_server_args(), model_path=order.checkpoint)
    fresh = get_model(
        model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", 0)
    )
    digests = msgspec.json.encode(fingerprints(held_by(fresh)))
    carry_out(order.folder, own_rank(), lambda _: digests)


def drop_experts_of_other_ranks() -> None:
    """SGLang marks them by -1, which its experts in plain torch take for a place ("index -1 is out of
    bounds"): give them no weight. These count an expert once per token, so every choice goes alone."""
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
