"""Choice of the `MemoryOps` for a rank's weights: host memory or the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.errors import PlanError
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.host import HostMemory
from windlass.memory.ops import MemoryOps


def memory_at(addresses: Iterable[int], worker: str) -> MemoryOps:
    """Return the `MemoryOps` for a rank's parameters. Without parameters, return the `MemoryOps` of host memory.

    Args:
        addresses: address of each parameter; 0 for an empty parameter.
        worker: name of the rank, for errors.

    Raises:
        PlanError: the parameters are on several GPUs, or both on a GPU and in host memory.
        TransferFailed: see `gpu_of`.
        TransportUnavailable: kernels cannot be compiled for the GPU.
    """
    ordinals = {gpu_of(address) for address in addresses if address}
    if len(ordinals) > 1:
        raise PlanError(
            f"{worker}: weights must be on one GPU or in host memory, got GPUs {sorted(ordinals)} "
            "(-1 is host memory)"
        )
    return memory_on(ordinals.pop() if ordinals else -1)


def memory_on(ordinal: int) -> MemoryOps:
    """Return the `MemoryOps` of GPU `ordinal`, or of host memory if `ordinal` is -1.

    Raises:
        TransportUnavailable: kernels cannot be compiled for the GPU.
    """
    if ordinal < 0:
        return HostMemory()
    from windlass.memory.cuda.gpu import shared_gpu
    from windlass.memory.device import CudaMemory

    return CudaMemory(shared_gpu(ordinal))
