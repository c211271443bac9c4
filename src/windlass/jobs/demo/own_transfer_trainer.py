"""Trainer rank of `windlass demo --compare`, which sends its weights in the engine's own ways.

`own_transfer_trainer.py KIND MODEL VERSIONS_DIR SEED DEVICE LEARNING_RATE`, where KIND is the name of the script that trains
in the other job: `trainer` or `megatron_trainer`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from windlass.jobs.demo.trainer import SavingEngine
from windlass.jobs.demo.trainer import saving_engine as fsdp_engine
from windlass.jobs.train_worker import run_train_worker


def make_saving(
    kind: str, model: str, versions_dir: str, seed: str, device: str, learning_rate: str
) -> SavingEngine:
    """Return the engine of a rank that does not connect to a fleet. For the arguments see the top of this file."""
    words = Path(model), Path(versions_dir), int(seed), device, float(learning_rate)
    if kind == "trainer":
        return fsdp_engine(*words, publish_to_fleet=False)
    from windlass.jobs.demo.megatron_trainer import saving_engine

    return saving_engine(*words, publish_to_fleet=False)


class OwnSender:
    """Operations of a rank: gather the weights in the engine's dtype, and let rank 0 send them."""

    def __init__(self, saving: SavingEngine) -> None:
        self._saving = saving
        self._group: Any = None
        self._shapes: list[tuple[str, list[int]]] = []

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the whole model in bfloat16, in the order of their names. Collective over all ranks."""
        return {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in sorted(self._saving.whole().items())
        }

    def save(self, path: str) -> None:
        """Write the whole model's weights to the file `path`, which the engine then loads. Collective over all ranks."""
        weights = self.weights()
        if dist.get_rank() == 0:
            save_file(weights, path, metadata={"format": "pt"})

    def shapes(self, _: None) -> list[tuple[str, list[int]]]:
        """Return the names and shapes of all weights, in the order in which `own_send` sends them.

        The first call is collective.
        """
        # Gather only once: the shapes do not change, and every later call runs while the job measures an update.
        if not self._shapes:
            self._shapes = [(name, list(tensor.shape)) for name, tensor in self.weights().items()]
        return self._shapes

    def own_init(self, argument: tuple[str, int, int]) -> None:
        """On trainer rank 0, join the engine's NCCL group as rank 0; do nothing on other ranks.

        Args:
            argument: kind of the engine, port of the group's TCP store on this host, and number of ranks in the group.
        """
        engine, port, world_size = argument
        if dist.get_rank():
            return
        if engine == "vllm":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            info = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
            self._group = NCCLWeightTransferEngine.trainer_init(info)
            return
        from sglang.srt.utils import init_custom_process_group

        self._group = init_custom_process_group(
            backend="nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=world_size,
            rank=0,
            group_name="own",
        )

    def own_send(self, engine: str) -> None:
        """Gather the weights (collective over all ranks), and let rank 0 send them over the engine's NCCL group.

        Args:
            engine: kind of the engine, `vllm` or `sglang`.
        """
        weights = self.weights()
        if dist.get_rank():
            return
        if engine == "vllm":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerSendWeightsArgs,
                NCCLWeightTransferEngine,
            )

            NCCLWeightTransferEngine.trainer_send_weights(
                iter(weights.items()), NCCLTrainerSendWeightsArgs(group=self._group, packed=True)
            )
        else:
            for tensor in weights.values():
                dist.broadcast(tensor, src=0, group=self._group)
        torch.cuda.synchronize()


def main(words: Sequence[str]) -> None:
    """Run commands of the train controller until it sends `Stop`. For the errors, see `run_train_worker`."""
    saving = make_saving(*words)
    sender = OwnSender(saving)
    run_train_worker(
        saving,
        operations={
            "save": sender.save,
            "shapes": sender.shapes,
            "own_init": sender.own_init,
            "own_send": sender.own_send,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
