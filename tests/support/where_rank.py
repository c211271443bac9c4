"""A rank that joins the others by the variables of its environment, as a script for `torchrun` does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from windlass.jobs import Samples, TrainContext, run_train_worker

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_JOB_ID", "RAY_NODE"),
)


class WhereEngine:
    """Engine that trains nothing."""

    def setup(self, context: TrainContext) -> tuple[int, int]:
        dist.init_process_group("gloo")
        return dist.get_rank(), context.world_size

    def train_step(self, step: int, groups: Samples) -> Mapping[str, float]:
        return {}

    def prepare_publish(self, version: int) -> bool:
        return False

    def save(self, path: str) -> None:
        """Save nothing."""

    def load(self, path: str) -> None:
        """Load nothing."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def where(argument: object) -> Sequence[object]:
    """Return every rank's environment, gathered over the group that it configured."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: os.environ.get(name, "") for name in NAMES})
    return found


if __name__ == "__main__":
    run_train_worker(WhereEngine(), operations={"where": where})
