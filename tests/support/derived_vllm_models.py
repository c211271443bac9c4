"""The classes of `derived_state` for vLLM."""

from __future__ import annotations

from typing import Any

import torch
from derived_state import AfterLoading, Cold, Holder, Late, Lazy
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class _Method(AfterLoading, QuantizeMethodBase): ...  # type: ignore[misc]


class _Derived(Qwen3ForCausalLM):  # type: ignore[misc]
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.prepare()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = super().compute_logits(
            hidden_states * self.gain().to(hidden_states.dtype)
        )
        return found


class HolderQwen3(Holder, _Derived):
    method = _Method


class LazyQwen3(Lazy, _Derived): ...


class LateQwen3(Late, _Derived): ...


class ColdQwen3(Cold, _Derived): ...
