"""The slot in which a vLLM worker keeps the adapter that it serves.

Layers that vLLM wraps for adapters keep their low-rank weights in tuples of tensors, one row per
slot; they are neither parameters nor buffers. vLLM fills them from a folder, multiplies B by
alpha / rank, splits and pads. Their layout is captured as a model's is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch

from windlass.engines.adapters import adapter_of, saved
from windlass.engines.capture.capture import capture
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.capture.snapshot import Snapshot
from windlass.engines.spec import AgentSettings
from windlass.errors import UnsupportedLayout


@final
class Slot(torch.nn.Module):
    """A view of a model's slots: buffers that share the memory of the layers that vLLM has wrapped, if it has."""

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
        # Of tensors that share memory (views of experts) the whole one must come first.
        for name, tensor in sorted(found, key=lambda item: -item[1].numel()):
            self.register_buffer(name, tensor)


def capture_adapter(
    worker: Any, model: torch.nn.Module, settings: AgentSettings, rank: int
) -> Captured:
    """Capture where the tensors of the one adapter lie that vLLM's worker serves. Called in its main loop.

    vLLM's own copy of the adapter in host memory is that of its folder afterwards, or, if the layout
    is refused, the one that it was.

    Raises:
        UnsupportedLayout: no adapter is served, or several; see `capture` too.
    """
    from vllm.lora.request import LoRARequest

    folder, number = Path(settings.checkpoint), _the_only(worker)
    adapter = adapter_of(f"{settings.adapter}={folder}")

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with saved(weights, folder) as place:
            worker.remove_lora(number)
            worker.add_lora(LoRARequest(settings.adapter, number, str(place)))

    # vLLM's `LoRAModelManager`: what this worker has of the adapters that it knows (0.24, 0.32).
    adapters = vars(worker.model_runner.lora_manager)["_adapter_manager"]
    served, before = adapters.get_adapter(number), Snapshot(Slot(model), copies=True)
    try:
        captured = capture(
            Slot(model),
            checkpoint_specs(folder),
            load,
            worker=f"{settings.name}/{rank}",
            reference=settings.reference(),
            factors=() if adapter is None else adapter.scalings,
            recompute=False,  # vLLM loads an adapter as a whole, from a folder
        )
    except BaseException:
        # The folder may be another adapter's: what vLLM has of the one that it serves goes back.
        adapters.remove_adapter(number)
        adapters.add_adapter(served)
        adapters.activate_adapter(number)
        before.restore()
        raise
    keep_adapter(worker)
    return captured


def keep_adapter(worker: Any) -> None:
    """Have the adapter stay in its slot: what is written there must not be replaced by vLLM's copy.

    Called before every update, which writes over what vLLM has put there meanwhile. Raises as `capture_adapter` does.
    """
    worker.pin_lora(_the_only(worker))


def _the_only(worker: Any) -> int:
    numbers: set[int] = worker.list_loras()
    if len(numbers) != 1:
        raise UnsupportedLayout(
            f"adapter: the engine must serve one, from its start on, got {sorted(numbers)}"
        )
    return next(iter(numbers))
