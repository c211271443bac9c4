"""Which packer a transport's memory needs."""

from __future__ import annotations

from windlass.transfer.packer import HostPacker, Packer
from windlass.transports.base import OneSidedTransport

__all__ = ["packer_for"]


def packer_for(transport: OneSidedTransport, limit_nbytes: int) -> Packer:
    """For the memory that `transport` registers. `limit_nbytes`: see `HostPacker`.

    Raises:
        TransportUnavailable: a GPU whose kernels cannot be compiled.
    """
    traits = transport.traits
    if traits.gpu >= 0 and not traits.strided_stores:
        from windlass.memory.cuda.gpu import shared_gpu
        from windlass.transfer.device_packer import DevicePacker

        return DevicePacker(shared_gpu(traits.gpu), transport, limit_nbytes)
    return HostPacker(transport, limit_nbytes)
