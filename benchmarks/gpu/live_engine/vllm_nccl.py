"""Trainer side of vLLM's own weight transfer by NCCL (0.24), as in its example `examples/rl/rlhf_http_nccl.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def trainer_group(port: int, world_size: int) -> Any:
    """Join the group as rank 0, while the server's ranks join with `server_info`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine.trainer_init(
        {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
    )


def server_info(port: int, world_size: int) -> dict[str, Any]:
    """Return the body of `/init_weight_transfer_engine`."""
    address = {"master_address": "127.0.0.1", "master_port": port}
    return {"init_info": {**address, "rank_offset": 1, "world_size": world_size}}


def update_info(names: Sequence[tuple[str, Sequence[int]]], *, packed: bool) -> dict[str, Any]:
    """Return the body of `/update_weights` for bfloat16 tensors with these names and shapes."""
    return {
        "update_info": {
            "names": [name for name, _ in names],
            "dtype_names": ["bfloat16"] * len(names),
            "shapes": [list(shape) for _, shape in names],
            "packed": packed,
        }
    }


def send(group: Any, weights: Iterable[tuple[str, torch.Tensor]], *, packed: bool) -> None:
    """Send the tensors, while the server receives those in `update_info`."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    arguments = NCCLTrainerSendWeightsArgs(group=group, packed=packed)
    NCCLWeightTransferEngine.trainer_send_weights(iter(weights), arguments)
