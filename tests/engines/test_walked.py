"""`Walked` repeats its walk through a model if, and only if, the model has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from windlass.engines.capture.memory import Holding, Walked, Watched, held_by
from windlass.engines.capture.mirrors import Later
from windlass.engines.capture.reach import Signature, reach


def closures(scale: torch.Tensor) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return a function that sets a tensor in its closure, and a function that counts its calls in its closure."""
    num_calls = 0

    def scaled(value: torch.Tensor, bias: torch.Tensor = torch.zeros(2)) -> None:  # noqa: B008
        nonlocal scale
        scale = value + bias[0]

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    return scaled, count


def engine() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    model.register_buffer("table", torch.arange(5.0))
    model.method = SimpleNamespace(scales=[torch.ones(2), torch.zeros(3)], rank=0)  # type: ignore[assignment]
    model.lists = [torch.ones(4)], [], [], []  # type: ignore[assignment]
    model.scaled, model.count = closures(torch.ones(3))  # type: ignore[assignment]
    model.many = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(100))
    return model


def places(held: Mapping[str, Holding]) -> dict[str, tuple[int, int]]:
    return {name: (holding.address, holding.nbytes) for name, holding in held.items()}


def replace_parameter(model: Any) -> None:
    model[1].weight = torch.nn.Parameter(torch.ones(4, 2))


def replace_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def replace_buffer(model: Any) -> None:
    model.table = torch.zeros(5)


def replace_item(model: Any) -> None:
    model.method.scales[1] = torch.ones(3)


def add_tensor(model: Any) -> None:
    model[0].cache = torch.ones(7)


def drop_module(model: Any) -> None:
    model[1] = torch.nn.Identity()


def move_tensor_to_the_next_container(model: Any) -> None:
    """Keep the order of all tensors, so that only the containers' sizes change."""
    at = next(number for number, held in enumerate(model.lists) if held)
    model.lists[at + 1].append(model.lists[at].pop())


def change_the_last_of_many_modules(model: Any) -> None:
    model.many[-1].weight = torch.nn.Parameter(torch.ones(1, 1))


def set_a_tensor_in_a_closure(model: Any) -> None:
    model.scaled(torch.arange(3.0))


def set_a_default_of_a_function(model: Any) -> None:
    model.scaled.__defaults__ = (torch.ones(2),)


def replace_a_number_by_a_tensor(model: Any) -> None:
    model.method.rank = torch.ones(2)


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_data,
        replace_buffer,
        replace_item,
        add_tensor,
        drop_module,
        move_tensor_to_the_next_container,
        change_the_last_of_many_modules,
        set_a_tensor_in_a_closure,
        set_a_default_of_a_function,
        replace_a_number_by_a_tensor,
    ],
)
def test_a_changed_model_is_walked_again(change: Callable[[Any], None]) -> None:
    model = engine()
    walked = Walked(model)
    before = places(walked.held())
    assert before == places(held_by(model))
    change(model)
    assert places(walked.held()) == places(held_by(model)) != before
    # A later tensor may get the memory of the first one.
    for _ in range(2):
        change(model)
        assert places(walked.held()) == places(held_by(model))


def test_an_unchanged_model_is_not_walked_again() -> None:
    model = engine()
    walked = Walked(model)
    held = walked.held()
    model.method.rank = 1
    model.count()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    assert walked.held() is held


def test_a_tensor_with_the_id_of_an_earlier_one_is_found() -> None:
    model = engine()
    walked = Walked(model)
    walked.held()
    for number in range(20):
        # CPython gives the memory of the freed tensor to the next one.
        model.method.scales[0] = None
        model.method.scales[0] = torch.full((2,), float(number))
        holding = walked.held()["method.scales[0]"]
        assert holding.tensor is model.method.scales[0]


def test_a_log_of_settings_is_no_change_of_the_model() -> None:
    names: dict[str, Any] = {
        "__slots__": ("_overrides_log", "resources"),
        "__module__": "sglang.srt.runtime_context",
        "__qualname__": "RuntimeContext",
    }
    context: Any = type("RuntimeContext", (), names)()
    log: list[object] = []
    for name, value in zip(names["__slots__"], (log, [torch.ones(3)]), strict=True):
        setattr(context, name, value)
    model = engine()
    model.context = context
    walked = Walked(model)
    held = walked.held()
    log.append(("scheduler.weight_version", {"weight_version": "7"}))
    assert walked.held() is held
    context.resources.append(torch.zeros(4))
    assert set(walked.held()) - set(held) == {"context.resources[1]"}


def test_a_signature_notices_a_tensor_with_the_id_of_a_freed_one() -> None:
    model = engine()
    signature, scales = Signature(reach(model)), model.method.scales
    assert signature.holds()
    first, others = id(scales[0]), list[torch.Tensor]()
    scales[0] = None
    while id(tensor := torch.ones(2)) != first:
        others.append(tensor)
        assert len(others) < 100_000
    scales[0] = tensor
    assert not signature.holds()


def test_a_copy_at_the_address_of_a_freed_tensor_is_refilled() -> None:
    """An allocator gives the memory of a freed tensor to a later one. Here, an array stands for this memory."""
    module = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    block = np.zeros((8, 8), np.float32)
    module.work = torch.from_numpy(block).copy_(torch.arange(64.0).view(8, 8))
    later = Later(Watched(module), ["weight"], ["weight"], {})
    for _ in range(3):
        later.look()
    del module.work
    block[:] = module.weight.float().numpy()
    module.work = torch.from_numpy(block)
    later.look()
    module.weight.copy_(torch.arange(64.0).view(8, 8) - 20)
    later.refill()
    assert torch.equal(torch.from_numpy(block), module.weight.float())
