"""Trainer rank of the demo for `bench_samples_per_hour.py`, which sends its weights in vLLM's own ways.

python benchmarks/own_transfer_trainer.py MODEL_CONFIG VERSIONS_DIR SEED DEVICE LEARNING_RATE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from windlass.jobs.demo.trainer import SavingEngine, make_engine, save_version
from windlass.jobs.train_worker import run_train_worker


def whole(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every full parameter in the engine's type. All ranks must call this together."""
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield name, full.detach().to(torch.bfloat16)


def main(config: str, versions_dir: str, seed: str, device: str, learning_rate: str) -> None:
    """Serve the train controller until it sends stop."""
    engine = make_engine(
        Path(config), int(seed), device, float(learning_rate), publish_to_fleet=False
    )

    def save(path: str) -> None:
        """Write the file that `reload_weights` reads."""
        weights = {name: tensor.contiguous() for name, tensor in whole(engine.model)}
        if dist.get_rank() == 0:
            save_file(weights, path, metadata={"format": "pt"})

    def ipc(url: str) -> None:
        """Send weights as in vLLM's own example of the backend (`examples/rl/rlhf_http_ipc.py`, 0.24)."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        IPCWeightTransferEngine.trainer_send_weights(
            whole(engine.model), {"send_mode": "http", "url": url, "packed": True}
        )
        torch.cuda.synchronize()

    saving = SavingEngine(engine, lambda path: save_version(engine.model, path), Path(versions_dir))
    run_train_worker(saving, operations={"save": save, "ipc": ipc})


if __name__ == "__main__":
    main(*sys.argv[1:])
