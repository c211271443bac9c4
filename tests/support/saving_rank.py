"""A trainer rank that saves every version as a checkpoint in FOLDER: `saving_rank.py FOLDER`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from servers import build

from windlass.jobs import FsdpEngine, Samples, run_train_worker
from windlass.jobs.train_worker import TrainContext

KIND = "dense"


class Saving:
    """FSDP2 engine of one rank that saves each version before it publishes it."""

    def __init__(self, inner: FsdpEngine, folder: Path) -> None:
        self._inner, self._folder = inner, folder

    def setup(self, context: TrainContext) -> tuple[int, int]:
        return self._inner.setup(context)

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:
        return self._inner.train_step(step, groups)

    @torch.no_grad()
    def prepare_publish(self, version: int) -> bool:
        plain, folder = build(KIND, seed=1), self._folder / str(version)
        whole = {n: p.full_tensor() for n, p in self._inner.model.named_parameters()}  # type: ignore[attr-defined]
        for name, target in plain.named_parameters():
            target.copy_(whole[name])
        plain.save_pretrained(folder)
        shutil.copy(self._folder / "0.json", folder / "config.json")
        return self._inner.prepare_publish(version)

    def save(self, path: str) -> None:
        self._inner.save(path)

    def load(self, path: str) -> None:
        self._inner.load(path)

    def close(self) -> None:
        self._inner.close()


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
