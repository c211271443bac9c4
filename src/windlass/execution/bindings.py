"""What binding a plan to memory needs to know of the other side. Travels in messages."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.transports.base import PeerEndpoint, RemoteRegion

__all__ = ["DestinationBinding", "LinkOutcome", "LinkStatus"]


class DestinationBinding(msgspec.Struct, frozen=True):
    """Where writes to one destination rank land.

    Attributes:
        worker: the destination.
        endpoint: its transport endpoint.
        regions: registered regions that every write must lie in.
        parameter_addresses: per parameter of its manifest: address of the live parameter
            (`in_place`) or of its shadow (`staged`).
        landing_address: address of the landing region for scatter and loader ops; 0 without one.
    """

    worker: str
    endpoint: PeerEndpoint
    regions: tuple[RemoteRegion, ...]
    parameter_addresses: tuple[int, ...]
    landing_address: int = 0


class LinkStatus(StrEnum):
    """How the writes of one link ended; `UNKNOWN` is not `FAILED`."""

    OK = "ok"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class LinkOutcome(msgspec.Struct, frozen=True):
    """What one source did on one link.

    Attributes:
        destination: destination worker.
        status: how it ended.
        nbytes: bytes written.
        digest: xxh3_128 hex of the link's payload: its ops in plan order, each op's elements
            row-major over `sizes`, in the destination dtype.
        error: one line when `status` is not OK.
    """

    destination: str
    status: LinkStatus
    nbytes: int
    digest: str
    error: str = ""
