"""The processes of `test_verbs_update.py`. A fork server imports this once for all of them.

An emulated processor takes a minute to import torch. Forks have these imports at once.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
import transformers.models.qwen3.modeling_qwen3
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verbs_launch import CONFIG, NUM_VERSIONS, PATIENCE_S

from windlass.engines.embedded.rank import run_rank
from windlass.engines.embedded.spec import EngineSettings
from windlass.layout.dtypes import DType
from windlass.net.logs import configure_logging
from windlass.trainers.fsdp import connect_trainer
from windlass.transports.registry import parse_transport


def run_engine(model: str, url: str, host: str, transport: str, token: str) -> None:
    """Run an engine until it is killed."""
    configure_logging("engine")
    settings = EngineSettings(
        name="engine",
        model=model,
        dtype=DType.BFLOAT16,
        controller=url,
        transport=transport,
        host=host,
        seed=5,
    )
    run_rank(settings, 0, token)


def run_trainer(
    rank: int,
    world_size: int,
    folder: str,
    url: str,
    transport: str,
    token: str,
    hold: Connection,
) -> None:
    """Run an FSDP2 rank: publish versions, save each version's true weights, and wait to be killed."""
    configure_logging(f"trainer-{rank}")
    # The test does not cover the trainers' own traffic.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.manual_seed(99)
    config = transformers.AutoConfig.for_model("qwen3", **CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fully_shard(model)
    with connect_trainer(
        model,
        controller=url,
        token=token,
        transport=parse_transport(transport),
        connect_deadline_s=PATIENCE_S,
    ) as trainer:
        for version in range(NUM_VERSIONS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25 + version)
            truth = {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
                for name, p in model.named_parameters()
            }
            if rank == 0:
                for name, full in truth.items():
                    np.save(Path(folder, f"{version}.{name}.npy"), full.bfloat16().float().numpy())
            report = trainer.publish(version, deadline_s=PATIENCE_S * 2).result()
            if rank == 0:
                print(f"version {version}: {report}", flush=True)
        # The test reads the queue pairs while the trainers live.
        hold.poll(None)
