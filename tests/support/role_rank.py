"""A rank of `test_train_controllers.py`: of the actor (served by engines), of the critic, or of
the reference."""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import run_train_worker

SEEDS = {"actor": 0, "critic": 1, "reference": 0}


def build() -> torch.nn.Module:
    return torch.nn.Linear(24, 40, bias=False)


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    rows = torch.tensor([[s.reward] * 24 for group in groups for s in group])
    found: torch.Tensor = (model(rows) ** 2).mean()
    return found


def weights(engine: FsdpEngine) -> list[list[float]]:
    """Return the whole weight; collective."""
    (weight,) = engine.model.parameters()
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    found: list[list[float]] = whole.tolist()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    role = sys.argv[1]
    engine = FsdpEngine(
        model=build,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        seed=SEEDS[role],
        publish_to_fleet=role == "actor",
    )
    run_train_worker(
        engine,
        operations={
            "weights": lambda _: weights(engine),
            "sums": lambda rows: [float(engine.model(torch.tensor(row)).sum()) for row in rows],
        },
    )
