"""Settings of the NIXL transport; importing them loads nothing native."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from windlass.config import take_names
from windlass.transports.base import OneSidedTransport
from windlass.transports.network import NetworkConfig


class NixlWire(StrEnum):
    """The wire that UCX must write through; AUTO takes what it finds and reports it."""

    AUTO = "auto"
    CMA = "cma"
    TCP = "tcp"
    RC = "rc"
    UD = "ud"


class NixlConfig(NetworkConfig, frozen=True, tag="nixl"):
    """NIXL with its UCX backend.

    Attributes:
        wire: refused when UCX chooses another one.

    Of the settings that all networks have, `device` takes UCX's names (`mlx5_0:1`, `eth0`), and
    `max_registration_nbytes` 0 stands for one registration per region.
    """

    remedy: ClassVar[str] = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"

    wire: NixlWire = NixlWire.AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        take_names(self, {"wire": NixlWire})

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:
        from windlass.transports.nixl.transport import NixlTransport

        return NixlTransport(self.placed(towards=towards, gpu=gpu))
