"""Trainer rank with its own loop, which waits for batches in `BatchClient.next_batch`."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

import windlass
from windlass.config import ReplicaPlace


@dataclass
class BatchTrainerSettings:
    """Settings that the rank gets at its start.

    Attributes:
        changes_late: the rank changes its weights after it has published them.
    """

    url: str
    token: str
    config: dict[str, object]
    replica: ReplicaPlace
    changes_late: bool


def run(pipe: Connection, settings: BatchTrainerSettings) -> None:
    """Publish version 0, wait for a batch, publish version 1, and stay until the pipe closes."""
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(**settings.config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with (
        windlass.connect_trainer(
            model, controller=settings.url, token=settings.token, replica=settings.replica
        ) as trainer,
        windlass.BatchClient(settings.url, settings.token) as batches,
    ):
        trainer.publish(0)
        if settings.changes_late:
            change(model)
        batches.next_batch(0, 0, 1, deadline_s=60)
        change(model)
        trainer.publish(1)
        pipe.poll(None)


def change(model: torch.nn.Module) -> None:
    """Change every weight in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
