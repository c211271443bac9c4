"""A rank that sends its weights in the engine's own ways: the file and the shapes that the engine gets."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from windlass.jobs.demo.own_transfer_trainer import OwnSender
from windlass.jobs.demo.trainer import SavingEngine
from windlass.jobs.train_worker import TrainEngine


class Gathers:
    """Function that returns weights, and counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.weights = {"b": torch.randn(3, 2).t(), "a": torch.tensor([1.0, 1e-3])}

    def __call__(self) -> dict[str, torch.Tensor]:
        self.count += 1
        return self.weights


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_the_gathered_weights_in_the_engines_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    gathers = Gathers()
    sender = OwnSender(SavingEngine(cast("TrainEngine", None), gathers, tmp_path))
    sender.save(str(tmp_path / "model.safetensors"))
    assert gathers.count == 1, "every rank takes part in the gather"
    if rank:
        assert not [*tmp_path.iterdir()]
        return
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == gathers.weights.keys()
    for name, tensor in gathers.weights.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16))


def test_shapes_are_gathered_once_and_in_the_order_of_the_tensors(tmp_path: Path) -> None:
    gathers = Gathers()
    sender = OwnSender(SavingEngine(cast("TrainEngine", None), gathers, tmp_path))
    assert [sender.shapes(None) for _ in range(2)] == [[("a", [2]), ("b", [2, 3])]] * 2
    assert gathers.count == 1
    assert [*sender.weights()] == ["a", "b"]
