"""A rank of `test_train_controller.py`: FSDP2 over gloo; it misbehaves on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import TrainContext, WrappedEngine, run_train_worker
from windlass.rollout.messages import TrainingSample


class Misbehaving(WrappedEngine[FsdpEngine]):
    """Engine that trains until step 4; there rank 1 dies, stops or raises."""

    def __init__(self, engine: FsdpEngine, how: str) -> None:
        super().__init__(engine)
        self._how, self._rank = how, 0

    def setup(self, context: TrainContext) -> tuple[int, int]:
        self._rank = context.rank
        return self.engine.setup(context)

    def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]]
    ) -> Mapping[str, float]:
        print(f"rank {self._rank} step {step}", flush=True)
        if step == 4 and self._rank == 1:
            if self._how == "raise":
                raise ValueError("bad sample")
            os.kill(os.getpid(), getattr(signal, self._how))
        found = dict(self.engine.train_step(step, groups))
        weight = next(self.engine.model.parameters())
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return {**found, "first": float(groups[0][0].reward), "weights": float(full.sum())}


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    rows = torch.tensor([[s.reward, 1.0] for group in groups for s in group])
    found: torch.Tensor = (model(rows) ** 2).mean()
    return found


def own_store(port: int) -> str:
    """Rank 0 starts the store of another group, and reads a value back from it."""
    if torch.distributed.get_rank():
        return ""
    deadline = timedelta(seconds=10)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size=1", timeout=deadline))
    store.set("name", "another group")
    return str(store.get("name").decode())


def wait_for_rank_1(seconds: float) -> None:
    """Rank 1 enters a collective this late."""
    if torch.distributed.get_rank():
        time.sleep(seconds)
    torch.distributed.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fsdp = FsdpEngine(
        model=lambda: torch.nn.Linear(2, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=loss,
        publish_to_fleet=False,
    )
    engine = Misbehaving(fsdp, sys.argv[1])
    run_train_worker(
        engine,
        operations={
            "outputs": lambda rows: fsdp.model(
                torch.stack([torch.as_tensor(row) for row in rows])
            ).tolist(),
            "who": lambda suffix: f"rank {torch.distributed.get_rank()}{suffix}",
            "own store": own_store,
            "wait": wait_for_rank_1,
            **({"only here": own_store} if os.environ["RANK"] == "0" else {}),
            "too few": lambda rows: [],
            "twice": lambda given: {name: given[name] + given[name] for name in given},
        },
    )
