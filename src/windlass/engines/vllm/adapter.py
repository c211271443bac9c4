"""Capture the slot of the LoRA adapter that a vLLM worker serves.

vLLM wraps layers for adapters. The wrappers have the low-rank weights in tuples of tensors, one row per adapter
slot; these tensors are neither parameters nor buffers. vLLM fills them from a folder, multiplies B by alpha / rank, splits and
pads them. Windlass captures their layout in the same way as a model's layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch

from windlass.engines.adapters import adapter_of, saved
from windlass.engines.capture.capture import capture
from windlass.engines.capture.codes import checkpoint_specs, started_with
from windlass.engines.capture.description import Captured
from windlass.engines.capture.snapshot import Snapshot
from windlass.engines.spec import AgentSettings
from windlass.errors import UnsupportedLayout


@final
class Slot(torch.nn.Module):
    """View of a model's slots: buffers that share memory with the layers that vLLM wrapped for adapters."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.lora.layers import BaseLayerWithLoRA

        super().__init__()
        found = [
            (f"adapter/{path}/{attribute}/{index}".replace(".", "/"), tensor)
            for path, module in model.named_modules()
            if isinstance(module, BaseLayerWithLoRA)
            for attribute, value in vars(module).items()
            if isinstance(value, tuple | list)
            for index, tensor in enumerate(value)
            if isinstance(tensor, torch.Tensor)
        ]
        # If tensors share memory (views of experts), the largest one must come first.
        for name, tensor in sorted(found, key=lambda item: -item[1].numel()):
            self.register_buffer(name, tensor)


def capture_adapter(
    worker: Any, model: torch.nn.Module, settings: AgentSettings, rank: int
) -> Captured:
    """Capture the layout of the adapter that vLLM's worker serves. The worker's main loop calls this.

    Afterwards, vLLM's copy of the adapter in host memory has the weights of the adapter's folder. If capture
    refuses the layout, the copy does not change.

    Raises:
        UnsupportedLayout: vLLM serves no adapter, or several; see also `capture`.
    """
    from vllm.lora.request import LoRARequest

    folder, number = Path(settings.checkpoint), _the_only(worker)
    adapter = adapter_of(f"{settings.adapter}={folder}")

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with saved(weights, folder) as place:
            worker.remove_lora(number)
            worker.add_lora(LoRARequest(settings.adapter, number, str(place)))

    # vLLM's `LoRAModelManager` (0.24, 0.32), which has the worker's copies of all loaded adapters.
    adapters = vars(worker.model_runner.lora_manager)["_adapter_manager"]
    served, before = adapters.get_adapter(number), Snapshot(Slot(model), copies=True)
    try:
        captured = capture(
            Slot(model),
            checkpoint_specs(folder, adapter=True),
            load,
            worker=f"{settings.name}/{rank}",
            reference=started_with(settings),
            factors=() if adapter is None else adapter.scalings,
            # vLLM loads an adapter only as a whole, from a folder.
            recompute=False,
        )
    except BaseException:
        # Restore the served adapter from vLLM's own copy, because the folder may have another adapter.
        adapters.remove_adapter(number)
        adapters.add_adapter(served)
        adapters.activate_adapter(number)
        before.restore()
        raise
    keep_adapter(worker)
    return captured


def keep_adapter(worker: Any) -> None:
    """Pin the adapter to its slot, so that vLLM never fills the slot from its own copy in host memory.

    Called before every update. The update then overwrites anything that vLLM wrote to the slot before.

    Raises:
        UnsupportedLayout: vLLM serves no adapter, or several.
    """
    worker.pin_lora(_the_only(worker))


def _the_only(worker: Any) -> int:
    numbers: set[int] = worker.list_loras()
    if len(numbers) != 1:
        raise UnsupportedLayout(
            f"adapter: the engine must serve exactly one from its start, got the ids {sorted(numbers)}"
        )
    return next(iter(numbers))
