"""Names of LoRA adapters: PEFT's names in a live module mapped to its names in a saved adapter."""

from __future__ import annotations

import re
from collections.abc import Callable

_WEIGHTS = "lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"


def adapter_names(adapter: str = "default") -> Callable[[str], str | None]:
    """Return a `name_map` that selects the tensors of one LoRA adapter and leaves out all other tensors.

    The map turns a live name such as `....q_proj.lora_A.default.weight` into
    `....q_proj.lora_A.weight`, the name in a saved adapter (`peft.get_peft_model_state_dict`).

    Args:
        adapter: name of the adapter in the live module.
    """
    inside = re.compile(rf"(.*\.(?:{_WEIGHTS}))\.{re.escape(adapter)}(\.weight)?")
    saved = re.compile(rf"(.*)\.modules_to_save\.{re.escape(adapter)}(\..*)")

    def name_of(name: str) -> str | None:
        found = inside.fullmatch(name) or saved.fullmatch(name)
        if found is not None and found.group(1).endswith(".lora_magnitude_vector"):
            return found.group(1)
        return None if found is None else found.group(1) + (found.group(2) or "")

    return name_of
