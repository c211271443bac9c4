"""Model classes of a plugin: Qwen3 with a tensor that a norm's weight determines and no parameter contains.

Each class keeps the tensor in another place and computes it at another time. Plugins register the classes with the
engines (`derived_vllm`, `derived_sglang`), and a checkpoint names one as its architecture.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

STEEPNESS = 20.0
NUM_EARLY = 30
"""Forward passes of `Late` that keep nothing. A test makes fewer of them before it updates the server, and more before it
updates the server again.
"""


def gain_of(norm: torch.nn.Module) -> torch.Tensor:
    """Return the factor of hidden states. It is far from 1 and differs for other weights."""
    return 1 + STEEPNESS * (norm.get_parameter("weight").detach().float() - 1)


class AfterLoading:
    """Mixin for a quantisation method: the layer computes its tensor after every load."""

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, *_: Any, **__: Any) -> Any: ...

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.aside.gain = gain_of(layer)  # type: ignore[union-attr]


class Holder:
    """Keeps the tensor in a plain object and computes it after each load."""

    method: ClassVar[type]
    """`AfterLoading`, as the engine's own class of such methods."""

    def prepare(self: Any) -> None:
        self.model.norm.aside = SimpleNamespace(gain=torch.empty(0))
        self.model.norm.quant_method = self.method()

    def gain(self: Any) -> torch.Tensor:
        found: torch.Tensor = self.model.norm.aside.gain
        return found


class Lazy:
    """Keeps the tensor in a dict and computes it in the first forward pass."""

    def prepare(self: Any) -> None:
        self.by_name: dict[str, torch.Tensor] = {}

    def gain(self: Any) -> torch.Tensor:
        if "gain" not in self.by_name:
            self.by_name["gain"] = gain_of(self.model.norm)
        found: torch.Tensor = self.by_name["gain"]
        return found


class Late:
    """Keeps the tensor in a dict from a later forward pass on, which comes after the first update."""

    def prepare(self: Any) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self.num_passes = 0

    def gain(self: Any) -> torch.Tensor:
        self.num_passes += 1
        if self.num_passes <= NUM_EARLY:
            return gain_of(self.model.norm)
        if "gain" not in self.by_name:
            self.by_name["gain"] = gain_of(self.model.norm)
        found: torch.Tensor = self.by_name["gain"]
        return found


class Cold:
    """Keeps a float32 mirror that only the first load computes."""

    def prepare(self: Any) -> None:
        self.float32_gain = None

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = super().load_weights(weights)  # type: ignore[misc]
        if self.float32_gain is None:
            self.float32_gain = [gain_of(self.model.norm)]
        return loaded

    def gain(self: Any) -> torch.Tensor:
        found: torch.Tensor = self.float32_gain[0]
        return found


KINDS = {"holder": Holder, "lazy": Lazy, "late": Late, "cold": Cold}
