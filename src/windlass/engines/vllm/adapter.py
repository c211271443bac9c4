"""Capture the memory layout of the LoRA adapter that a vLLM worker serves.

vLLM wraps each layer to which an adapter applies. The wrapper has tuples of tensors with the low-rank weights of all
adapter slots; these tensors are neither parameters nor buffers. vLLM loads an adapter from a folder, multiplies B by
alpha / rank, and splits and pads the result. Windlass captures the layout of these tensors as it does for a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch

from windlass.engines.adapters import adapter_of, saved
from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import checkpoint_specs, started_with
from windlass.engines.capture.description import Captured
from windlass.engines.capture.snapshot import Snapshot
from windlass.engines.spec import AgentSettings
from windlass.errors import UnsupportedLayout


@final
class Slot(torch.nn.Module):
    """Module with the low-rank weights of a model's wrapped layers as buffers."""

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
        # Capture takes the first of several tensors that share memory (views of experts): register the largest first.
        for name, tensor in sorted(found, key=lambda item: -item[1].numel()):
            self.register_buffer(name, tensor)


def capture_adapter(
    worker: Any, model: torch.nn.Module, settings: AgentSettings, rank: int
) -> Captured:
    """Capture the layout of the adapter that vLLM's worker serves. The worker's main loop calls this.

    vLLM keeps a copy of each loaded adapter in host memory. A successful capture sets this copy to the weights in the
    adapter's folder. It also pins the adapter to its slot, so that vLLM does not overwrite updated weights with the copy.
    A failed capture restores the old copy.

    Raises:
        ConfigError: see `adapter_of` and `checkpoint_specs`.
        UnsupportedLayout: vLLM does not serve exactly one adapter; see also `capture` and `adapter_of`.
    """
    from vllm.lora.request import LoRARequest

    folder, number = Path(settings.checkpoint), _the_only(worker)
    adapter = adapter_of(f"{settings.adapter}={folder}")

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with saved(weights, folder) as place:
            worker.remove_lora(number)
            worker.add_lora(LoRARequest(settings.adapter, number, str(place)))

    # This is vLLM's `LoRAModelManager` (0.24, 0.32). It has the copies of all loaded adapters in host memory.
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
            # `load` cannot load single tensors again: vLLM loads an adapter only as a whole, from a folder.
            recompute=False,
        )
    except BaseException:
        # Restore the adapter from vLLM's old copy, because the folder may have other weights by now.
        adapters.remove_adapter(number)
        adapters.add_adapter(served)
        adapters.activate_adapter(number)
        before.restore()
        raise
    keep_adapter(worker)
    return captured


def keep_adapter(worker: Any) -> None:
    """Pin the adapter to its slot, so that vLLM does not overwrite the slot with the copy in host memory.

    The caller must pin the adapter before every update.

    Raises:
        UnsupportedLayout: vLLM does not serve exactly one adapter.
    """
    worker.pin_lora(_the_only(worker))


def _the_only(worker: Any) -> int:
    """Return vLLM's id of the adapter that the worker serves.

    Raises:
        UnsupportedLayout: the worker does not serve exactly one adapter.
    """
    numbers: set[int] = worker.list_loras()
    if len(numbers) != 1:
        raise UnsupportedLayout(
            f"adapter: the engine must serve exactly one adapter from its start, got the ids {sorted(numbers)}"
        )
    return next(iter(numbers))
