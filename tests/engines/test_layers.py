"""Capture loads digits into one layer of each kind, or into all layers if layers of one kind differ in layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from test_capture import deliver
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.engines.capture.capture import EXACT_NUMEL, FEW, capture
from windlass.engines.capture.checkpoint import StoredCheckpoint
from windlass.engines.capture.layers import Layers
from windlass.engines.capture.memory import held_by
from windlass.errors import UnsupportedLayout
from windlass.layout.dtypes import DType

Weights = Iterator[tuple[str, torch.Tensor]]
NUM_LAYERS, NUM_DENSE, NUM_EXPERTS = 12, 2, 3


class Layer(Module):
    """A layer with fused matrices; all but the first layers have experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = Parameter(torch.ones(6))
        self.qkv = Parameter(torch.zeros(12, 6).bfloat16())
        if number >= NUM_DENSE:
            # 2 of the 10 rows are padding.
            self.experts = Parameter(torch.zeros(NUM_EXPERTS, 10, 6).bfloat16())
        self.register_buffer("rotary", torch.arange(4.0))


class Engine(Module):
    """The layers `numbers` of a model.

    Args:
        odd: layer with its rows in another order than the other layers of its kind.
        refusal: error that a load of only a part of the checkpoint raises; None accepts parts.
    """

    loaded: ClassVar[list[Counter[str]]] = []
    """Number of tensors per layer, for each load. Capture does not restore attributes of a class."""

    def __init__(
        self, numbers: range, *, odd: int | None = None, refusal: Exception | None = None
    ) -> None:
        super().__init__()
        self.embed = Parameter(torch.zeros(5, 6).bfloat16())
        self.layers = ModuleDict({str(number): Layer(number) for number in numbers})
        self.odd, self.refusal = odd, refusal
        self.loaded.clear()

    def load(self, weights: Weights) -> None:
        self.loaded.append(Counter())
        for name, tensor in weights:
            self.loaded[-1][name.split(".")[1] if "." in name else name] += 1
            if name == "embed":
                self.embed.data.copy_(tensor)
                continue
            _, number, *path = name.split(".")
            if number in self.layers:
                self._load_layer(number, path, tensor)
        if self.refusal is not None and len(self.loaded[-1]) < NUM_LAYERS + 1:
            raise self.refusal

    def _load_layer(self, number: str, path: list[str], tensor: torch.Tensor) -> None:
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        match path:
            case ["norm"]:
                layer.norm.data.copy_(tensor)
            case ["q" | "k" as which]:
                at = 6 if (which == "k") ^ (int(number) == self.odd) else 0
                layer.qkv.data[at : at + 6].copy_(tensor)
            case ["experts", expert, "gate" | "up" as which]:
                at = 5 if which == "up" else 0
                layer.experts.data[int(expert), at : at + 4].copy_(tensor)
            case _:
                raise AssertionError(path)


def specs() -> list[CheckpointSpec]:
    shapes: dict[str, tuple[tuple[int, ...], DType]] = {"embed": ((5, 6), DType.BFLOAT16)}
    for number in range(NUM_LAYERS):
        shapes[f"layers.{number}.norm"] = (6,), DType.FLOAT32
        for which in "qk":
            shapes[f"layers.{number}.{which}"] = (6, 6), DType.BFLOAT16
        if number >= NUM_DENSE:
            for expert in range(NUM_EXPERTS):
                for which in ("gate", "up"):
                    name = f"layers.{number}.experts.{expert}.{which}"
                    shapes[name] = (4, 6), DType.BFLOAT16
    return [CheckpointSpec(name, *shapes[name]) for name in sorted(shapes)]


def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    types = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
    return {s.name: torch.randn(s.shape, generator=generator).to(types[s.dtype]) for s in specs()}


def require_delivered(engine: Engine, exact_numel: int = EXACT_NUMEL) -> None:
    """Capture, deliver a checkpoint, and compare with the engine's own loader."""
    numbers = [int(number) for number in engine.layers]
    fresh = Engine(range(numbers[0], numbers[-1] + 1), odd=engine.odd)
    fresh.load(iter(checkpoint().items()))
    engine.loaded.clear()
    captured = capture(engine, specs(), engine.load, worker="e/0", exact_numel=exact_numel)
    assert captured.repacked == ()
    assert len(captured.constants) == len(numbers), "only the rotary buffers"
    deliver(captured, checkpoint())
    for name, parameter in fresh.named_parameters():
        assert torch.equal(engine.get_parameter(name), parameter), name


@pytest.mark.parametrize("exact_numel", [0, EXACT_NUMEL], ids=["by_row", "by_place"])
@pytest.mark.parametrize(
    ("numbers", "chosen"),
    [(range(NUM_LAYERS), {"0", "2"}), (range(5, NUM_LAYERS), {"0", "5"})],
    ids=["all", "a_stage"],
)
def test_one_layer_of_each_kind_is_loaded_with_digits(
    numbers: range, chosen: set[str], exact_numel: int
) -> None:
    engine = Engine(numbers)
    require_delivered(engine, exact_numel)
    every = {"embed", *map(str, range(NUM_LAYERS))}
    num_digits = Codes(specs()).num_digits
    digits, (proof, *watched) = engine.loaded[:num_digits], engine.loaded[num_digits:]
    assert all(loaded.keys() == {"embed", *chosen} for loaded in digits)
    assert proof.keys() == every, "the proof is of all layers"
    elsewhere = {str(number) for number in range(numbers[0])}
    assert [loaded.keys() for loaded in watched] == [{"embed", *elsewhere}] * bool(elsewhere)


@pytest.mark.parametrize("odd", [0, 2, 7])
def test_a_layer_with_a_different_layout_is_detected(odd: int) -> None:
    engine = Engine(range(NUM_LAYERS), odd=odd)
    require_delivered(engine)
    assert len(engine.loaded[-3]) == NUM_LAYERS + 1, "all layers were loaded with digits"


class Started(Engine):
    """An engine that loads a checkpoint at its start and then swaps rows of some layers."""

    def start(self, folder: Path, *swapped: int) -> StoredCheckpoint:
        save_file(checkpoint(), folder / "model.safetensors")
        stored = StoredCheckpoint(folder)
        self.load(stored.tensors())
        for number in swapped:
            rows = self.get_parameter(f"layers.{number}.qkv").data
            rows.copy_(rows.clone().roll(6, 0))
        self.loaded.clear()
        return stored


def test_capture_loads_one_layer_of_each_kind_of_the_engines_checkpoint(tmp_path: Path) -> None:
    engine, fresh = Started(range(NUM_LAYERS)), Engine(range(NUM_LAYERS))
    stored = engine.start(tmp_path)
    captured = capture(engine, specs(), engine.load, worker="e/0", reference=stored)
    assert engine.loaded[-1].keys() == {"embed", "0", "2"}
    assert len(captured.constants) == NUM_LAYERS
    fresh.load(stored.tensors())
    assert all(map(torch.equal, engine.parameters(), fresh.parameters()))


def test_capture_without_recomputing_ends_with_a_load_of_the_whole_checkpoint(
    tmp_path: Path,
) -> None:
    """An engine keeps its last loaded adapter, so capture must end with the engine's own."""
    engine = Started(range(NUM_LAYERS))
    stored = engine.start(tmp_path)
    capture(engine, specs(), engine.load, worker="e/0", reference=stored, recompute=False)
    assert engine.loaded[-1].keys() == {"embed", *map(str, range(NUM_LAYERS))}


@pytest.mark.parametrize("swapped", [2, 7], ids=["loaded_again", "looked_at"])
def test_a_layer_that_differs_since_the_engines_start_is_refused(
    swapped: int, tmp_path: Path
) -> None:
    engine = Started(range(NUM_LAYERS))
    stored = engine.start(tmp_path, swapped)
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    with pytest.raises(UnsupportedLayout, match=rf"^'layers\.{swapped}\.qkv': .*does not repeat"):
        capture(engine, specs(), engine.load, worker="e/0", reference=stored)
    assert all(map(torch.equal, engine.parameters(), before))


def test_an_expert_that_moved_since_the_engines_start_is_refused(
    tmp_path: Path,
) -> None:
    """Capture looks at one element or more of every checkpoint tensor."""
    engine = Started(range(NUM_LAYERS))
    stored = engine.start(tmp_path)
    experts = engine.get_parameter("layers.7.experts").data
    experts.copy_(experts[[0, 2, 1]].clone())
    with pytest.raises(UnsupportedLayout, match=r"^'layers\.7\.experts': .*does not repeat"):
        capture(engine, specs(), engine.load, worker="e/0", reference=stored)


def test_an_engine_that_refuses_partial_loads_loads_its_whole_checkpoint(tmp_path: Path) -> None:
    engine = Started(range(NUM_LAYERS), refusal=RuntimeError("missing"))
    stored = engine.start(tmp_path)
    capture(engine, specs(), engine.load, worker="e/0", reference=stored)
    assert [len(loaded) for loaded in engine.loaded[-2:]] == [3, NUM_LAYERS + 1]


class Padded(Engine):
    """An engine that fills the padding of one layer with values of the checkpoint."""

    def _load_layer(self, number: str, path: list[str], tensor: torch.Tensor) -> None:
        super()._load_layer(number, path, tensor)
        if number == "7" and path[-1] == "gate":
            layer = self.layers[number]
            assert isinstance(layer, Layer)
            layer.experts.data[int(path[1]), 4] = tensor[0]


def test_a_layer_with_different_padding_is_loaded_again() -> None:
    """One load does not show whether padding depends on values of the checkpoint."""
    engine, fresh = Padded(range(NUM_LAYERS)), Padded(range(NUM_LAYERS))
    deliver(capture(engine, specs(), engine.load, worker="e/0"), checkpoint())
    fresh.load(iter(checkpoint().items()))
    assert torch.equal(
        engine.get_parameter("layers.7.experts"), fresh.get_parameter("layers.7.experts")
    )


class Scaled(Engine):
    """An engine that also has a parameter of `size` elements in every layer."""

    def __init__(self, size: int) -> None:
        super().__init__(range(NUM_LAYERS))
        for layer in self.layers.values():
            layer.register_parameter("scale", Parameter(torch.zeros(size)))

    def _load_layer(self, number: str, path: list[str], tensor: torch.Tensor) -> None:
        if path == ["scale"]:
            self.layers[number].get_parameter("scale").data.copy_(tensor)
        else:
            super()._load_layer(number, path, tensor)


@pytest.mark.parametrize(("size", "num_proofs"), [(FEW - 1, 2), (FEW, 1)])
def test_tensors_of_few_elements_are_loaded_again(size: int, num_proofs: int) -> None:
    """A tensor of few elements may have the expected values by chance."""
    engine = Scaled(size)
    scales = [
        CheckpointSpec(f"layers.{n}.scale", (size,), DType.FLOAT32) for n in range(NUM_LAYERS)
    ]
    with_scales = sorted([*specs(), *scales], key=lambda spec: spec.name)
    capture(engine, with_scales, engine.load, worker="e/0")
    assert [len(loaded) for loaded in engine.loaded].count(NUM_LAYERS + 1) == num_proofs


class Forgetful(Engine):
    """An engine that does not load one tensor of one layer."""

    def _load_layer(self, number: str, path: list[str], tensor: torch.Tensor) -> None:
        if (number, path) != ("7", ["norm"]):
            super()._load_layer(number, path, tensor)


def test_a_tensor_that_the_loader_skips_in_one_layer_is_refused() -> None:
    engine = Forgetful(range(NUM_LAYERS))
    with pytest.raises(UnsupportedLayout, match=r"layers\.7\.norm.*does not write"):
        capture(engine, specs(), engine.load, worker="e/0")


def test_invented_weights_are_not_restored_and_are_captured_again() -> None:
    """A capture does not mistake random values of an earlier capture for its own."""
    engine = Engine(range(NUM_LAYERS))
    for _ in range(2):
        before = engine.embed.detach().clone()
        captured = capture(engine, specs(), engine.load, worker="e/0", made_up=True)
        assert not torch.equal(engine.embed, before)
        assert engine.loaded[-1].keys() == {"embed", *map(str, range(NUM_LAYERS))}
        assert engine.loaded[-2].keys() == {"embed", "0", "2"}, "nothing was proven twice"
        assert len(captured.constants) == NUM_LAYERS
    assert torch.equal(engine.get_buffer("layers.3.rotary"), torch.arange(4.0))


@pytest.mark.parametrize("refusal", [RuntimeError("missing"), UnsupportedLayout("missing")])
def test_a_loader_that_refuses_partial_checkpoints_gets_all_layers(refusal: Exception) -> None:
    """Check an error of the loader, and an error of Windlass's count of loaded elements."""
    engine = Engine(range(NUM_LAYERS), refusal=refusal)
    require_delivered(engine)
    assert [len(loaded) for loaded in engine.loaded[:2]] == [3, NUM_LAYERS + 1]


def test_an_engine_with_all_layers_in_one_tensor_gets_all_layers() -> None:
    engine, norms = Module(), Parameter(torch.zeros(8, 4))
    engine.register_parameter("norms", norms)
    loads: list[int] = []

    def load(weights: Weights) -> None:
        loads.append(0)
        for name, tensor in weights:
            loads[-1] += 1
            norms.data[int(name.split(".")[1])].copy_(tensor)

    shapes = [CheckpointSpec(f"layers.{n}.norm", (4,), DType.FLOAT32) for n in range(8)]
    captured = capture(engine, shapes, load, worker="e/0")
    values = {spec.name: torch.randn(4) for spec in shapes}
    deliver(captured, values)
    assert torch.equal(norms, torch.stack(list(values.values())))
    assert loads[0] == 1
    assert loads[-3:] == [8, 8, 8]


def test_a_model_with_few_equal_layers_is_not_grouped() -> None:
    engine = ModuleList([Layer(number) for number in range(2)])
    few = [s for s in specs() if s.name.startswith(("embed", "layers.0.", "layers.2."))]
    assert Layers.alike(Codes(few), held_by(engine)) is None
    assert Layers.alike(Codes(specs()), held_by(engine)) is not None
