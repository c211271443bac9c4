"""One rank of an FSDP2 trainer in vLLM's environment. It sends weights by vLLM's
`WeightTransferTrainerFactory`.

Arguments and output are the same as in `sync_rank.py`.
"""

from __future__ import annotations

import copy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from sync_rank import Order, Sent, Settings, answer


def main() -> None:
    rank, world_size = (int(word) for word in sys.argv[1:3])
    settings = msgspec.json.decode(sys.argv[4], type=Settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world_size)
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from windlass.config import ControlConfig, UpdateMode
    from windlass.errors import ConfigError
    from windlass.integrations.vllm import ModuleShards, TrainerInit

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        settings.source, dtype=torch.float32
    )
    plain = copy.deepcopy(model).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    client = HTTPVLLMWeightSyncClient(settings.servers[0])

    def made(rank: int, source: object) -> Any:
        init = TrainerInit(
            rank=rank,
            config=ControlConfig(mode=UpdateMode(settings.mode)),
            pause=settings.pause,
            deadline_s=settings.deadline_s,
        )
        return WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)

    for misfit in ((rank, ModuleSource(model)), (rank + 1, ModuleShards(model))):
        try:
            made(*misfit)
        except ConfigError as refused:
            print(refused, file=sys.stderr)
        else:
            raise AssertionError(misfit)
    engine = made(rank, ModuleShards(model))
    answer(Sent())
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        torch.manual_seed(order.version)
        with torch.no_grad():
            for parameter, target in zip(model.parameters(), plain.parameters(), strict=True):
                parameter.to_local().add_(torch.randn_like(parameter.to_local()) * 0.03)
                target.copy_(parameter.full_tensor())
        if rank == 0:
            plain.save_pretrained(order.checkpoint)
            shutil.copy(Path(settings.source) / "config.json", order.checkpoint)
        began_s = time.monotonic()
        sent = engine.send_weights()
        answer(
            Sent(
                version=sent.version, servers=list(sent.servers), left_out=dict(sent.left_out),
                digest_ok=sent.report.digest_ok, nbytes=sent.report.nbytes,
                pause_s=sent.report.pause_s, took_s=time.monotonic() - began_s,
            )
        )  # fmt: skip
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
