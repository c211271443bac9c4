"""Which packer a transport's memory needs."""

from __future__ import annotations

from windlass.transfer.packer import HostPacker, Packer
from windlass.transports.base import OneSidedTransport, gpu_ordinal_of

__all__ = ["packer_for"]


def packer_for(transport: OneSidedTransport, limit_nbytes: int) -> Packer:
    """For the memory that `transport` registers. `limit_nbytes`: see `HostPacker`.

    Raises:
        TransportUnavailable: a GPU whose kernels cannot be compiled.
    """
    if (ordinal := gpu_ordinal_of(transport)) >= 0:
        from windlass.memory.cuda.gpu import shared_gpu
        from windlass.transfer.device_packer import DevicePacker

        return DevicePacker(shared_gpu(ordinal), transport, limit_nbytes)
    return HostPacker(transport, limit_nbytes)
