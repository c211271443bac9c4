"""One rank of the stock trainer, which trains two steps on the samples in a file, for `test_live_images.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from windlass.backends.collective_group import Rendezvous
from windlass.jobs.stock_trainer import StockTrainer
from windlass.jobs.train_worker import TrainContext
from windlass.jobs.training import TrainingSection
from windlass.rollout.messages import TRAINING_BATCHES
from windlass.sampling import SamplingParams
from windlass.training.batches import VisionModel, token_batch, with_advantages
from windlass.training.losses import token_logprobs
from windlass.training.settings import Advantage

DEADLINE_S = 300.0


def main(folder: str, file: str) -> None:
    """Print the largest difference between the trainer's and the samples' log-probabilities, and the losses of two steps."""
    torch.set_num_threads(1)
    samples = list(TRAINING_BATCHES.decode(Path(file).read_bytes()).samples)
    store = Rendezvous("127.0.0.1", DEADLINE_S)
    trainer = StockTrainer(
        TrainingSection(model=folder, learning_rate=1e-2), transport="cma", publish_to_fleet=False
    )
    trainer.setup(
        TrainContext(
            rank=0,
            world_size=1,
            store_host="127.0.0.1",
            store_port=store.port,
            controller="",
            token="",
            deadline_s=DEADLINE_S,
            sampling=SamplingParams(max_new_tokens=12),
        )
    )
    batch = token_batch(with_advantages(samples, Advantage.GRPO), torch.device("cpu"))
    model = trainer.engine.model
    with torch.no_grad():
        logits = model(**VisionModel(model).arguments(batch)).logits
    mine = token_logprobs(logits, batch.targets)
    differences = ((mine - batch.rollout_logprobs) * batch.mask).abs()
    metrics = [dict(trainer.train_step(step, [samples])) for step in range(2)]
    trainer.close()
    found = {"difference": float(differences.max()), "num_tokens": int(batch.mask.sum())}
    print(json.dumps({**found, "metrics": metrics}))


if __name__ == "__main__":
    main(*sys.argv[1:])
