"""One trainer rank of `test_verbs_update.py`: FSDP2, published over the transport that it is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import windlass
from windlass.transports.configs import parse_transport


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    folder, url, transport = Path(sys.argv[3]), sys.argv[4], parse_transport(sys.argv[5])
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    config = transformers.AutoConfig.for_model(**json.loads((folder / "config.json").read_text()))
    torch.manual_seed(99)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fully_shard(model)
    token = os.environ["WINDLASS_TOKEN"]
    with windlass.connect_trainer(
        model, controller=url, token=token, transport=transport
    ) as trainer:
        for version in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25 + version)
            truth = {
                name: p.full_tensor() if isinstance(p, DTensor) else p
                for name, p in model.named_parameters()
            }
            if rank == 0:
                whole = {name: tensor.detach().clone() for name, tensor in truth.items()}
                torch.save(whole, folder / f"{version}.pt")
            trainer.publish(version)
        sys.stdin.read()  # the engine is looked at while the trainers live
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
