"""Settings of the Mooncake transport; importing them loads nothing native."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from windlass.config import take_names
from windlass.transports.base import OneSidedTransport
from windlass.transports.network import NetworkConfig


class MooncakeProtocol(StrEnum):
    """The wire that Mooncake must use; AUTO takes what it finds and reports it."""

    AUTO = "auto"
    TCP = "tcp"
    RDMA = "rdma"


class MooncakeConfig(NetworkConfig, frozen=True, tag="mooncake"):
    """Mooncake TransferEngine.

    Attributes:
        protocol: refused when Mooncake chooses another one.

    Of the settings that all networks have, `max_registration_nbytes` 0 stands for the least of what
    the NICs say and MC_MAX_MR_SIZE.
    """

    remedy: ClassVar[str] = "pip install 'windlass[mooncake]' and the package libibverbs1"

    protocol: MooncakeProtocol = MooncakeProtocol.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        take_names(self, {"protocol": MooncakeProtocol})

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        from windlass.transports.mooncake.transport import MooncakeTransport

        return MooncakeTransport(self.placed(towards=towards, gpu=gpu))
