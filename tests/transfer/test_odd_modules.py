"""Unusual modules that are valid, or that the trainer refuses by name."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import UnsupportedLayout
from windlass.layout.manifest import Role
from windlass.transfer.dtensor import LiveTensors, describe_module, own_tensors


def test_a_lazy_parameter_is_refused_by_name() -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(4))
    with pytest.raises(
        UnsupportedLayout,
        match=r"parameter '0\.weight': must have a shape, got a parameter of a lazy",
    ):
        describe_module(module, "trainer/0", Role.TRAINER)
    module(torch.ones(1, 3))
    manifest = describe_module(module, "trainer/0", Role.TRAINER)
    assert [each.name for each in manifest.parameters] == ["0.weight", "0.bias"]


def test_a_buffer_with_several_names_has_aliases() -> None:
    module, inner, buffer = torch.nn.Module(), torch.nn.Module(), torch.ones(3)
    inner.register_buffer("q", buffer)
    inner.register_buffer("r", buffer)
    module.first = module.second = inner
    manifest = describe_module(module, "trainer/0", Role.TRAINER)
    assert [each.name for each in manifest.parameters] == ["first.q"]
    assert manifest.aliases == dict.fromkeys(("first.r", "second.q", "second.r"), "first.q")


def test_a_module_may_be_compiled_after_connecting() -> None:
    module = torch.nn.Module()
    module.block = torch.nn.Linear(3, 3)
    live = LiveTensors([module], lambda: own_tensors(module))
    before = live.locate()
    setattr(module, "block", torch.compile(module.block))  # noqa: B010 - the type is a function's
    assert live.locate() == before
