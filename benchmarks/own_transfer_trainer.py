"""Trainer rank of the demo for `bench_samples_per_hour.py`, which sends its weights in vLLM's own ways.

python benchmarks/own_transfer_trainer.py KIND MODEL VERSIONS_DIR SEED DEVICE LEARNING_RATE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from windlass.jobs.demo.own_transfer_trainer import OwnSender, make_saving
from windlass.jobs.train_worker import run_train_worker


def main(words: Sequence[str]) -> None:
    """Run commands of the train controller until it sends `Stop`."""
    saving = make_saving(*words)
    sender = OwnSender(saving)

    def ipc(url: str) -> None:
        """Send weights as in vLLM's own example of the backend (`examples/rl/rlhf_http_ipc.py`, 0.24)."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        IPCWeightTransferEngine.trainer_send_weights(
            iter(sender.weights().items()), {"send_mode": "http", "url": url, "packed": True}
        )
        torch.cuda.synchronize()

    run_train_worker(saving, operations={"save": sender.save, "ipc": ipc})


if __name__ == "__main__":
    main(sys.argv[1:])
