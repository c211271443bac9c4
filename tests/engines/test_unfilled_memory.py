"""Memory of a rank that an update does not fill: it must outlive a sleep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import checkpoint_specs
from windlass.engines.capture.memory import held_by
from windlass.engines.capture.sleeping import unfilled, unfilled_ranges

NBYTES = 4096
WHOLE, PADDED, BUFFER = (256, 4, 6), (1024, 5, 6), (2048, 3, 6)
"""Offset in the memory, rows and columns of each tensor."""


class Model(torch.nn.Module):
    """Model whose tensors are in one memory. The last row of `padded` belongs to no checkpoint tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(NBYTES, dtype=torch.uint8)
        self.whole = torch.nn.Parameter(self._tensor(*WHOLE))
        self.padded = torch.nn.Parameter(self._tensor(*PADDED))
        self.register_buffer("buffer", self._tensor(*BUFFER))
        del self.memory

    def _tensor(self, offset: int, rows: int, columns: int) -> torch.Tensor:
        flat = self.memory[offset : offset + 2 * rows * columns].view(torch.bfloat16)
        return flat.view(rows, columns)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data[:4].copy_(tensor)


def test_only_memory_that_an_update_writes_completely_is_filled(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(4, 6, dtype=torch.bfloat16) for name in ("whole", "padded")}
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    captured = capture(model, checkpoint_specs(tmp_path), model.load, worker="engine/0")
    found = [holding.name for holding in unfilled(captured, held_by(model).values(), ())]
    assert sorted(found) == ["buffer", "padded"]

    whole, nbytes = model.whole.data_ptr(), 2 * 4 * 6
    start, stop = whole - WHOLE[0], whole - WHOLE[0] + NBYTES
    after = whole + nbytes
    both = [(start, start, whole), (start, after, stop)]
    assert [*unfilled_ranges(captured, [(start, stop)], ())] == both
    # Memory that ends or begins inside a parameter, before all parameters, and after them.
    inside = whole + 10
    parts = [(inside, stop), (start, inside)]
    assert [*unfilled_ranges(captured, parts, ())] == [(inside, after, stop), (start, start, whole)]
    assert [*unfilled_ranges(captured, [(whole, after)], ())] == []
    for begin, end in ((start, start + 8), (stop - 8, stop)):
        assert [*unfilled_ranges(captured, [(begin, end)], ())] == [(begin, begin, end)]


class Rebuilt(torch.nn.Module):
    """Model whose loader doubles, rounds or squares checkpoint tensors. The last row of each `padded_*` is padding."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            for prefix, rows in (("whole", 4), ("padded", 5)):
                memory = torch.zeros(rows, 6, dtype=torch.bfloat16)
                self.register_buffer(f"{prefix}_{name}", memory)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            value = tensor.bfloat16()
            if name != "rounded":
                value = value * 2 if name == "doubled" else value * value
            for prefix in ("whole", "padded"):
                self.get_buffer(f"{prefix}_{name}")[:4] = value


@pytest.mark.parametrize("names", [("doubled", "rounded"), ("squared",)])
def test_padding_is_not_filled_although_its_tensor_is_computed_again(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """Updates write buffers of these tensors; engines pad tensors, for example the slots of adapters."""
    dtypes = {name: torch.float16 if name == "rounded" else torch.bfloat16 for name in names}
    tensors = {name: torch.zeros(4, 6, dtype=dtype) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model, specs = Rebuilt(names), checkpoint_specs(tmp_path)
    captured = capture(model, specs, model.load, worker="engine/0", factors=(2.0,))
    computed = {*captured.repacked, *captured.recomputed} - {"loader/squared"}
    assert computed == {f"{prefix}_{name}" for name in names for prefix in ("whole", "padded")}
    found = [holding.name for holding in unfilled(captured, held_by(model).values(), ())]
    assert sorted(found) == [f"padded_{name}" for name in names]


class Packed(torch.nn.Module):
    """Model whose loader computes integers. The last row of `padded` is padding."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("whole", 4), ("padded", 5)):
            self.register_buffer(name, torch.full((rows, 6), 7, dtype=torch.int8))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            packed = (tensor.float().square() * 50).clamp(0, 120).round().to(torch.int8)
            for name in ("whole", "padded"):
                self.get_buffer(name)[:4] = packed


def test_integers_that_are_computed_again_may_have_padding(tmp_path: Path) -> None:
    """A load shows padding only in tensors that can contain NaN. Sleep saves the others whole."""
    save_file({"packed": torch.zeros(4, 6, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    model = Packed()
    captured = capture(model, checkpoint_specs(tmp_path), model.load, worker="engine/0")
    assert {"whole", "padded"} <= {*captured.recomputed}
    found = {holding.name for holding in unfilled(captured, held_by(model).values(), ())}
    assert {"whole", "padded"} <= found
