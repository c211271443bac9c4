"""A checkpoint of an FSDP2 engine, on one gloo rank, before its first step and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import TrainContext
from windlass.rollout.messages import TrainingSample

BuildOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, BuildOptimizer] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
REWARDS = (0.5, 1.0)


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    rows = torch.tensor([[each.reward, 1.0] for group in groups for each in group])
    found: torch.Tensor = (model(rows) ** 2).mean()
    return found


@contextmanager
def engine_with(optimizer: BuildOptimizer) -> Iterator[FsdpEngine]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    engine = FsdpEngine(
        model=lambda: torch.nn.Linear(2, 3),
        optimizer=optimizer,
        loss=loss,
        publish_to_fleet=False,
    )
    try:
        engine.setup(TrainContext(0, 1, "127.0.0.1", store.port, "", "", 60.0))
        yield engine
    finally:
        engine.close()


def train(engine: FsdpEngine, steps: range) -> torch.Tensor:
    """Train these steps and return the weight."""
    for step in steps:
        group = [
            TrainingSample(
                prompt_ids=(1,),
                output_ids=(2,),
                logprobs=(-0.5,),
                versions=(0,),
                reward=reward + step,
                group_id=step,
                engine="e",
            )
            for reward in REWARDS
        ]
        engine.train_step(step, [group])
    weight = engine.model.get_parameter("weight")
    assert isinstance(weight, dist.tensor.DTensor)
    return weight.full_tensor().detach().clone()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_checkpoint_changes_no_later_step(name: str, num_before: int, tmp_path: Path) -> None:
    """Regression: after a save or load before the first step, Adam's first step was too small."""
    path, before, after = str(tmp_path), range(num_before), range(num_before, 4)
    with engine_with(OPTIMIZERS[name]) as engine:
        train(engine, before)
        never_saved = train(engine, after)
    with engine_with(OPTIMIZERS[name]) as engine:
        train(engine, before)
        engine.save(path)
        assert torch.equal(train(engine, after), never_saved)
        # A job that starts its ranks again loads into an engine that has not stepped, or into one that has.
        engine.load(path)
        assert torch.equal(train(engine, after), never_saved)
    with engine_with(OPTIMIZERS[name]) as engine:
        engine.load(path)
        assert torch.equal(train(engine, after), never_saved)
