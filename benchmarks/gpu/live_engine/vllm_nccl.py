"""vLLM's own weight transfer by NCCL (0.24), as its example `examples/rl/rlhf_http_nccl.py` does it: the trainer's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def trainer_group(port: int, world_size: int) -> Any:
    """Join as rank 0, while the server's ranks join by `server_info`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine.trainer_init(
        {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
    )


def server_info(port: int, world_size: int) -> dict[str, Any]:
    """What `/init_weight_transfer_engine` is given."""
    address = {"master_address": "127.0.0.1", "master_port": port}
    return {"init_info": {**address, "rank_offset": 1, "world_size": world_size}}


def update_info(names: Sequence[tuple[str, Sequence[int]]], *, packed: bool) -> dict[str, Any]:
    """What `/update_weights` is given, of bfloat16 tensors: names and shapes."""
    return {
        "update_info": {
            "names": [name for name, _ in names],
            "dtype_names": ["bfloat16"] * len(names),
            "shapes": [list(shape) for _, shape in names],
            "packed": packed,
        }
    }


def send(group: Any, weights: Iterable[tuple[str, torch.Tensor]], *, packed: bool) -> None:
    """Send the tensors, while the server receives what it was told of."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    arguments = NCCLTrainerSendWeightsArgs(group=group, packed=packed)
    NCCLWeightTransferEngine.trainer_send_weights(iter(weights), arguments)
