"""A trainer rank of `test_launch.py`. It waits before it publishes version 2, until the test lets
it continue.

The write of version `LOST` fails after the copy, so that version is not published. In `DIES_IN`
(the fourth "train_step", the "write" of version 3, the second "save") rank 1 kills itself once,
and creates the file `DIED`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from windlass.config import ReplicaPlace
from windlass.errors import TransferFailed
from windlass.jobs.fsdp_engine import FsdpEngine, Samples
from windlass.jobs.train_worker import TrainContext, run_train_worker
from windlass.rollout.messages import TrainingSample
from windlass.transfer.bindings import Written
from windlass.transfer.sender import Sender


class Held:
    """FSDP2 engine that reports a publication over one fifo, and waits for another fifo."""

    def __init__(self, inner: FsdpEngine) -> None:
        self._inner, self._dies_in = inner, ""

    def setup(self, context: TrainContext) -> tuple[int, int]:
        self._dies_in = os.environ.get("DIES_IN", "") if context.rank == 1 else ""
        return self._inner.setup(context)

    def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]]
    ) -> Mapping[str, float]:
        if self._dies_in == "train_step" and step == 3:
            die()
        return self._inner.train_step(step, groups)

    def prepare_publish(self, version: int) -> bool:
        # This process has one sender.
        if str(version) == os.environ.get("LOST"):
            Sender.write = cut  # type: ignore[assignment, method-assign]
        if self._dies_in == "write" and version == 3:
            Sender.write = die  # type: ignore[assignment, method-assign]
        if version == 2 and "PUBLISHING" in os.environ:
            Path(os.environ["PUBLISHING"]).write_text("now")
            Path(os.environ["GO_ON"]).read_text()
        return self._inner.prepare_publish(version)

    def save(self, path: str) -> None:
        if self._dies_in == "save" and Path(path).name == "4":
            die()
        self._inner.save(path)

    def load(self, path: str) -> None:
        self._inner.load(path)

    def close(self) -> None:
        self._inner.close()


def die(*_: object) -> None:
    """Kill the first process of this rank; the second process continues."""
    if not Path(os.environ["DIED"]).exists():
        Path(os.environ["DIED"]).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def cut(*_: object) -> Written:
    raise TransferFailed("version lost")


def loss(model: torch.nn.Module, groups: Samples) -> torch.Tensor:
    tokens = torch.tensor([s.prompt_ids + s.output_ids for group in groups for s in group])
    found: torch.Tensor = model(tokens).logits.logsumexp(-1).mean()
    return found


def build_model() -> torch.nn.Module:
    import json
    import sys

    import transformers

    config = json.loads(Path(sys.argv[1]).read_text())
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_train_worker(
        Held(
            FsdpEngine(
                model=build_model,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
                loss=loss,
                replica=ReplicaPlace.HOST if "LOST" in os.environ else ReplicaPlace.OFF,
            )
        )
    )
