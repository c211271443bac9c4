"""After a capture, a serving model answers as before, whatever its loader did to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from windlass.element_ids.codes import CheckpointSpec
from windlass.engines.capture.capture import capture
from windlass.engines.capture.snapshot import Snapshot
from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType

Weights = Iterator[tuple[str, torch.Tensor]]
WIDTH = 6


class Failure(Exception):
    """An error of an engine's loader."""


@dataclass
class Kernel:
    """Values that a quantisation method derives from weights."""

    scale: torch.Tensor
    shift: float = 0.5


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 3.0


class Facts(msgspec.Struct, frozen=True):
    """An object that refuses assignments to its attributes."""

    rank: int = 0


@dataclass
class Method:
    """An object like `quant_method` of engines."""

    kernel: Kernel | None
    facts: Facts = field(default_factory=Facts)
    slotted: Slotted = field(default_factory=Slotted)
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    unused: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    later: OrderedDict[int, int] = field(default_factory=OrderedDict)


def numbered(first: int, *shape: int) -> torch.Tensor:
    """Return a tensor of distinct values."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + first) / 64


class Layer(torch.nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbered(first, WIDTH, WIDTH), requires_grad=False)
        vars(self.weight)["loader"] = "direct"
        self.register_buffer("shift", numbered(first + 40, WIDTH), persistent=False)
        self.absorbed = numbered(first + 50, WIDTH)
        self.adapters = (numbered(first + 60, WIDTH), [numbered(first + 70, WIDTH)])
        self.factor = 0.25
        self.quant_method = Method(Kernel(numbered(first + 80, WIDTH)))
        self.shared = {"mode": "plain"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        method = self.quant_method
        kernel = method.kernel
        assert kernel is not None
        assert vars(self.weight)["loader"] == "direct"
        assert self.shared == {"mode": "plain"}
        empty = len(method.unused) + len(method.names) + len(method.later)
        x = x @ self.weight * self.factor + self.get_buffer("shift") * self.absorbed
        x = x * self.adapters[0] + self.adapters[1][0]
        return x * kernel.scale + kernel.shift + method.slotted.gain + len(method.sizes) + empty


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [Layer(100), Layer(300)]
        self.layers = torch.nn.ModuleList(self.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.rows:
            x = layer(x)
        return x

    def load(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.rows[int(name)].weight.copy_(tensor)


SPECS = [CheckpointSpec(str(i), (WIDTH, WIDTH), DType.FLOAT32) for i in range(2)]
X = numbered(7, 3, WIDTH)


def addresses(model: Model) -> list[int]:
    tensors = [t for layer in model.rows for t in (layer.weight, layer.absorbed, *layer.buffers())]
    return [tensor.data_ptr() for tensor in tensors]


def to_meta(model: Model) -> None:
    """Replace parameters and buffers by tensors on `meta`, as vLLM does before it loads again."""
    for layer in model.rows:
        del layer.weight
        layer.register_parameter(
            "weight", torch.nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"), False)
        )
        shift = layer.get_buffer("shift")
        del layer.shift
        layer.register_buffer("shift", shift.to("meta"))


def replace_tensors(model: Model) -> None:
    for layer in model.rows:
        layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
        layer.absorbed = layer.absorbed + 1
        layer.register_buffer("further", torch.ones(2))
        layer.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))


def make_anew(model: Model) -> None:
    """Replace tensors, as SGLang's loader does with absorbed projections."""
    for layer in model.rows:
        layer.absorbed = layer.absorbed + 1
        layer.register_buffer("further", torch.ones(2))


def rebind_data(model: Model) -> None:
    for layer in model.rows:
        layer.weight.data = torch.zeros(2, 2, dtype=torch.bfloat16)
        layer.get_buffer("shift").data = torch.zeros(1)


def write_in_place(model: Model) -> None:
    for layer in model.rows:
        held = [layer.absorbed, layer.adapters[0], *layer.adapters[1], *layer.buffers()]
        assert layer.quant_method.kernel is not None
        for tensor in (*held, layer.quant_method.kernel.scale):
            tensor.fill_(9.0)


def change_attributes(model: Model) -> None:
    for layer in model.rows:
        layer.factor = 17.0
        layer.shared["mode"] = "packed"
        vars(layer.weight)["loader"] = "wrapped"
        layer.quant_method.sizes.append(3)
        layer.quant_method.slotted.gain = 0.0
        del layer.absorbed


def change_methods(model: Model) -> None:
    first, second = model.rows
    assert first.quant_method.kernel is not None
    first.quant_method.kernel.shift = 8.0
    first.quant_method.kernel = None
    second.quant_method = Method(Kernel(torch.zeros(WIDTH)))


def fill_what_was_empty(model: Model) -> None:
    """Add a hook, and fill an empty list, set and dictionary."""
    for layer in model.rows:
        layer.register_forward_hook(lambda _module, _inputs, output: output + 1)
        layer.quant_method.unused.append(1)
        layer.quant_method.names.add("further")
        layer.quant_method.later[0] = 1


def replace_layers(model: Model) -> None:
    model.layers[0] = torch.nn.Identity()
    model.rows.reverse()
    model.layers.append(torch.nn.Identity())


HARMS: list[Callable[[Model], None]] = [
    to_meta,
    replace_tensors,
    rebind_data,
    write_in_place,
    change_attributes,
    change_methods,
    fill_what_was_empty,
    replace_layers,
]


def named(harm: Callable[[Model], None]) -> str:
    return harm.__name__


@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("failure", [Failure, KeyboardInterrupt, UnsupportedLayout])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("harm", HARMS, ids=named)
def test_a_loader_that_fails_leaves_an_engine_that_answers_as_before(
    harm: Callable[[Model], None], at: int, failure: type[BaseException], inference: bool
) -> None:
    with torch.inference_mode() if inference else nullcontext():
        model = Model()
    answer, before = model(X).clone(), addresses(model)
    loads: list[int] = []

    def load(weights: Weights) -> None:
        loads.append(0)
        if len(loads) <= at:
            with torch.inference_mode():
                model.load(weights)
            return
        next(weights)
        with torch.inference_mode(inference):
            harm(model)
        raise failure("no such layer")

    expected = UnsupportedLayout if failure is Failure else failure
    with pytest.raises(expected, match="no such layer") as raised:
        capture(model, SPECS, load, worker="e/0")
    if failure is Failure:
        assert "e/0" in str(raised.value)
        assert "Failure" in str(raised.value)
    assert torch.equal(model(X), answer)
    assert addresses(model) == before
    assert [name for name, _ in model.named_parameters()] == ["layers.0.weight", "layers.1.weight"]


@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize(
    "harm", [make_anew, write_in_place, change_attributes, change_methods], ids=named
)
def test_a_loader_that_succeeds_leaves_an_engine_that_answers_as_before(
    harm: Callable[[Model], None], inference: bool
) -> None:
    with torch.inference_mode() if inference else nullcontext():
        model = Model()
    answer, before = model(X).clone(), addresses(model)
    weights_of = [layer.weight for layer in model.rows]

    def load(weights: Weights) -> None:
        with torch.inference_mode():
            for name, tensor in weights:
                weights_of[int(name)].copy_(tensor)
        if all(layer.factor == 0.25 for layer in model.rows):
            with torch.inference_mode(inference):
                harm(model)
            for layer, weight in zip(model.rows, weights_of, strict=True):
                layer.weight, layer.factor = weight, 0.5

    capture(model, SPECS, load, worker="e/0")
    assert torch.equal(model(X), answer)
    assert addresses(model) == before


def test_a_layout_that_is_refused_leaves_an_engine_that_answers_as_before() -> None:
    model = Model()
    answer = model(X).clone()

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            model.rows[int(name)].weight.copy_(tensor * 3)
        for layer in model.rows:
            layer.factor += 1.0

    with pytest.raises(UnsupportedLayout, match="cannot compute them again"):
        capture(model, SPECS, load, worker="e/0", recompute=False)
    assert torch.equal(model(X), answer)


def test_a_tensor_that_only_a_load_makes_is_refused() -> None:
    """The restored engine does not have this tensor, so an update would have no place to write it."""
    model = Model()
    answer = model(X).clone()

    def load(weights: Weights) -> None:
        model.load(weights)
        for layer in model.rows:
            vars(layer)["transposed"] = layer.weight.t().contiguous()

    with pytest.raises(
        UnsupportedLayout, match=r"2 of 'layers\.\*\.transposed': .*did not exist before"
    ):
        capture(model, SPECS, load, worker="e/0")
    assert torch.equal(model(X), answer)


class Communicator:
    """State that is shared with other processes."""

    def __init__(self) -> None:
        self.lock, self.turn = threading.Lock(), 0


def test_a_snapshot_does_not_restore_shared_objects() -> None:
    model = Model()
    vars(model)["communicator"] = communicator = Communicator()
    before = Snapshot(model)
    communicator.turn = 5
    model.rows[0].factor = 1.0
    before.restore()
    assert (communicator.turn, model.rows[0].factor) == (5, 0.25)


class LoadsOnAccess(OrderedDict[str, object]):
    """A dict like the tables of transformers' `AutoModel`: each access imports a class, which may be missing."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError("a class of another model is missing")

    def keys(self) -> Any:
        raise ValueError("a class of another model is missing")

    values = items = keys

    def __getitem__(self, key: str) -> object:
        raise ValueError("a class of another model is missing")


CLASSES_OF_MODELS = LoadsOnAccess()
CLASSES_OF_MODELS["linear"] = torch.nn.Linear
CLASSES_OF_MODELS["scale"] = 2.0


class Scaled(torch.nn.Linear):
    """A model that reads a global table."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) * len(CLASSES_OF_MODELS)


def test_a_snapshot_does_not_load_the_values_of_a_dict_that_loads_them_on_access() -> None:
    model = Scaled(2, 2)
    vars(model)["own"] = own = LoadsOnAccess(first=1.0)
    before = Snapshot(model)
    CLASSES_OF_MODELS["scale"] = 3.0
    own["second"] = 2.0
    before.restore()
    assert dict(OrderedDict.items(CLASSES_OF_MODELS)) == {"linear": torch.nn.Linear, "scale": 2.0}
    assert dict(OrderedDict.items(own)) == {"first": 1.0}


def test_a_snapshot_does_not_rebuild_an_unchanged_set() -> None:
    """A rebuilt set may iterate in another order, and readers may see it empty."""
    model = Model()
    vars(model)["layers_left"] = left = set(range(200))
    for number in set(left) - {9, 64}:
        left.discard(number)
    before, order = Snapshot(model), list(left)
    model.rows[0].factor = 1.0
    before.restore()
    assert (list(left), model.rows[0].factor) == (order, 0.25)
