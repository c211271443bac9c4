"""Entry point `vllm.general_plugins` of a plugin that registers the classes of `derived_state`."""

from __future__ import annotations


def register() -> None:
    from vllm import ModelRegistry

    for name in ("Holder", "Lazy", "Late", "Cold"):
        ModelRegistry.register_model(f"{name}Qwen3", f"derived_vllm_models:{name}Qwen3")
