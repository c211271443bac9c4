"""A trainer rank that saves every version as a checkpoint in FOLDER: `saving_rank.py FOLDER`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from servers import build

from windlass.jobs import FsdpEngine, Samples, run_train_worker
from windlass.jobs.train_worker import WrappedEngine

KIND = "dense"


class Saving(WrappedEngine[FsdpEngine]):
    """FSDP2 engine of one rank that saves each version before it publishes it."""

    def __init__(self, engine: FsdpEngine, folder: Path) -> None:
        super().__init__(engine)
        self._folder = folder

    @torch.no_grad()
    def prepare_publish(self, version: int) -> bool:
        plain, folder = build(KIND, seed=1), self._folder / str(version)
        whole = {n: p.full_tensor() for n, p in self.engine.model.named_parameters()}  # type: ignore[attr-defined]
        for name, target in plain.named_parameters():
            target.copy_(whole[name])
        plain.save_pretrained(folder)
        shutil.copy(self._folder / "0.json", folder / "config.json")
        return self.engine.prepare_publish(version)


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    tokens = torch.tensor([s.prompt_ids + s.output_ids for group in groups for s in group])
    found: torch.Tensor = model(tokens).logits.logsumexp(-1).mean()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_train_worker(
        Saving(
            FsdpEngine(
                model=lambda: build(KIND, seed=1).float(),
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                loss=loss,
                transport=os.environ["WINDLASS_TRANSPORT"],
            ),
            Path(sys.argv[1]),
        )
    )
