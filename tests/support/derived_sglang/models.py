"""The classes of `derived_state` for SGLang."""

from __future__ import annotations

from typing import Any

from derived_state import AfterLoading, Cold, Holder, Late, Lazy
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class _Method(AfterLoading, QuantizeMethodBase): ...  # type: ignore[misc]


class _Derived(Qwen3ForCausalLM):  # type: ignore[misc]
    def __init__(self, *made_with: Any, **named: Any) -> None:
        super().__init__(*made_with, **named)
        self.prepare()
        self.logits_processor.register_forward_pre_hook(self._multiply)

    def _multiply(self, _module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, hidden_states, *others = given
        return tokens, hidden_states * self.gain().to(hidden_states.dtype), *others


class HolderQwen3(Holder, _Derived):
    method = _Method


class LazyQwen3(Lazy, _Derived): ...


class LateQwen3(Late, _Derived): ...


class ColdQwen3(Cold, _Derived): ...


EntryClass = [HolderQwen3, LazyQwen3, LateQwen3, ColdQwen3]
