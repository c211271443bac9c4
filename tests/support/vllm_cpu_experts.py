"""Parts that vLLM 0.32 lacks on CPUs to run experts that are spread over ranks; `vllm_fresh`
installs them.

Without them a server starts and ends at its first request. The kernel of the experts takes numbers
of all experts for places among its own (and reads past their end). The CPU's communicator can
neither gather tokens of replicas nor add up their outputs ("NotImplementedError"). Nothing here
affects weights, loading or pauses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

Communicator = Any


def install() -> None:
    """Install the parts in the process of a rank."""
    _map_experts()
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def _map_experts() -> None:
    kernel, apply = cpu_moe.cpu_fused_moe, cpu_moe.CPUUnquantizedExperts.apply

    def mapped(
        experts: Any, *arguments: Any, expert_map: torch.Tensor | None, **named: Any
    ) -> None:
        def fused(out: Any, x: Any, w1: Any, w2: Any, b1: Any, b2: Any, *rest: Any) -> Any:
            weights, numbers, *others = rest
            if expert_map is not None:
                local = expert_map[numbers.long()].to(numbers.dtype)
                weights, numbers = weights * (local >= 0), local.clamp(min=0)
            return kernel(out, x, w1, w2, b1, b2, weights, numbers, *others)

        cpu_moe.cpu_fused_moe = fused
        try:
            apply(experts, *arguments, expert_map=expert_map, **named)
        finally:
            cpu_moe.cpu_fused_moe = kernel

    cpu_moe.CPUUnquantizedExperts.apply = mapped


def all_gatherv(
    self: Communicator, given: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """Return the tensors of all ranks, one below the other; `sizes` are the rows of every rank."""
    assert dim == 0
    if isinstance(given, list):
        return [all_gatherv(self, one, dim, sizes) for one in given]
    rows = sizes or [len(given)] * self.world_size
    padded = given.new_zeros((max(rows), *given.shape[1:]))
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def reduce_scatterv(
    self: Communicator, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks."""
    assert dim == 0
    rows = sizes or [len(given) // self.world_size] * self.world_size
    summed = given.contiguous().clone()
    dist.all_reduce(summed, group=self.device_group)
    begin = sum(rows[: self.rank_in_group])
    return summed[begin : begin + rows[self.rank_in_group]].clone()
