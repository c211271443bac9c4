"""Capture finds values derived from weights that functions, classes and other Python modules keep, not the model's objects."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_derived_state import (
    DERIVED,
    HOLDERS,
    Engine,
    Layer,
    require_right,
    thawed,
)

__all__ = ["thawed"]

tables = types.ModuleType("engine_tables")
"""Stands for a module of the engine that its functions import and name, as in `tables.CACHE`."""
vars(tables)["CACHE"] = {}
BY_LAYER: dict[int, torch.Tensor] = {}
KEYS = itertools.count()
Get = Callable[..., torch.Tensor]


class Keyed(Layer):
    """A layer with its own key in caches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.key = next(KEYS)


def memoised(function: Callable[[Any], torch.Tensor]) -> Get:
    """Decorate a function of a layer with a cache, which only the function's closure references."""
    found: dict[int, torch.Tensor] = {}

    def get(layer: Keyed, *, again: bool = False) -> torch.Tensor:
        if again or layer.key not in found:
            found[layer.key] = function(layer)
        return found[layer.key]

    return get


@memoised
def widened(layer: Keyed) -> torch.Tensor:
    return layer.w.detach().float()


class OfOtherModule(Keyed):
    def value(self, *, again: bool = False) -> torch.Tensor:
        if again or self.key not in tables.CACHE:
            tables.CACHE[self.key] = self.w.detach().float()
        found: torch.Tensor = tables.CACHE[self.key]
        return found


class Method:
    """A plain object of a layer, whose method keeps values in a global variable."""

    def get(self, layer: Keyed, *, again: bool) -> torch.Tensor:
        if again or layer.key not in BY_LAYER:
            BY_LAYER[layer.key] = layer.w.detach().float()
        return BY_LAYER[layer.key]


class OfObject(Keyed):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.method = Method()

    def value(self, *, again: bool = False) -> torch.Tensor:
        return self.method.get(self, again=again)


class OfDecorator(Keyed):
    @memoised
    def value(self) -> torch.Tensor:
        return self.w.detach().float()


class OfDefault(Keyed):
    def value(
        self,
        *,
        again: bool = False,
        found: dict[int, torch.Tensor] = {},  # noqa: B006
    ) -> torch.Tensor:
        if again or self.key not in found:
            found[self.key] = self.w.detach().float()
        return found[self.key]


class OfFunction(Keyed):
    def value(self, *, again: bool = False) -> torch.Tensor:
        return widened(self, again=again)


helpers = types.ModuleType("engine_helpers")
"""Stands for another module of the engine. Its variable is two calls away from `outer`."""
exec(
    """
CACHE = {}

def inner(layer, again):
    if again or layer.key not in CACHE:
        CACHE[layer.key] = layer.w.detach().float()
    return CACHE[layer.key]

def outer(layer, again):
    return inner(layer, again)

def method(layer):
    return outer(layer, False)
""",
    vars(helpers),
)


class OfHelpers(Keyed):
    """A layer with a function of another module. Its own method calls a function that this function calls, too."""

    method = helpers.method

    def value(self, *, again: bool = False) -> torch.Tensor:
        found: torch.Tensor = helpers.outer(self, again)
        return found


class Sharing(Engine):
    """An engine whose layers are of `kind` and keep their derived values outside the model's objects."""

    def __init__(self, kind: type[Keyed], when: str) -> None:
        super().__init__(DERIVED["cast"], HOLDERS["attribute"], when)
        self.rows = [kind(torch.bfloat16) for _ in self.rows]
        self.layers = torch.nn.ModuleList(self.rows)

    def keep(self) -> None:
        for layer in self.rows:
            layer.value(again=True)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.rows:
            value = layer.value()  # type: ignore[operator]
            x = x @ layer.w.float() @ layer.v.float() * layer.norm.float() / len(value)
            x = torch.tanh(x) + torch.tanh(value.sum()) + value[-1].square().sum()
        return x


@pytest.mark.parametrize("when", ["load", "cold", "lazy", "lazy_before"])
@pytest.mark.parametrize(
    "kind", [OfOtherModule, OfObject, OfDecorator, OfDefault, OfFunction, OfHelpers]
)
def test_values_outside_the_models_objects_are_right(
    kind: type[Keyed], when: str, tmp_path: Path
) -> None:
    require_right(
        tmp_path,
        lambda: Sharing(kind, when.partition("_")[0]),
        served_before=when == "lazy_before",
    )
