"""Adapters of PEFT: Windlass sends the merged base weights of a model, not the adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import is_peft_model


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """In the `with` block, merge the adapter of a PEFT model into its base weights.

    Do nothing if `model` is not a PEFT model.
    """
    if not is_peft_model(model):
        yield
        return
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


def merged_names(prefix: str) -> Callable[[str], str | None]:
    """Return a map from parameter names of a merged PEFT model to names of its base model.

    Args:
        prefix: PEFT's prefix for the adapter's own parameters, such as `lora_`. The map returns None for every name that
            contains this prefix, and for copies that PEFT keeps in `original_module`.
    """

    def name_map(name: str) -> str | None:
        name = name.removeprefix("base_model.model.")
        if prefix in name or "original_module" in name:
            return None
        return name.replace(".base_layer", "").replace("modules_to_save.default.", "")

    return name_map
