"""Which memory weights are in: that of this host, or that of a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.errors import PlanError
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.host import HostMemory
from windlass.memory.ops import MemoryOps


def memory_at(addresses: Iterable[int], worker: str) -> MemoryOps:
    """Return the memory that all of a rank's parameters are in; the address of one without bytes is 0.

    Raises:
        PlanError: they are in host memory and on a GPU, or on several GPUs.
        TransportUnavailable: a GPU whose kernels cannot be compiled.
    """
    ordinals = {gpu_of(address) for address in addresses if address}
    if len(ordinals) > 1:
        raise PlanError(
            f"{worker}: its weights must be on one GPU or in host memory, got GPUs {sorted(ordinals)} "
            "(-1 is host memory)"
        )
    return memory_on(ordinals.pop() if ordinals else -1)


def memory_on(ordinal: int) -> MemoryOps:
    """Return the memory of the GPU of this process that is `ordinal`; host memory for -1.

    Raises:
        TransportUnavailable: a GPU whose kernels cannot be compiled.
    """
    if ordinal < 0:
        return HostMemory()
    from windlass.memory.cuda.gpu import shared_gpu
    from windlass.memory.cuda.ops import CudaMemory

    return CudaMemory(shared_gpu(ordinal))
