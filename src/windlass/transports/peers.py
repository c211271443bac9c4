"""Peers: addresses of their processes, rights to write their memory, and mapping of that memory into this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from windlass.memory.cuda.gpu import Gpu


class PeerEndpoint(msgspec.Struct, frozen=True):
    """Address and identity of the process that owns memory.

    Attributes:
        transport: registry name of the transport.
        address: address in the form of the transport: `host:port`, a pid or a name.
        incarnation: identity of the process behind `address` (start time, random id). A new process
            has a new incarnation, and a write to an old incarnation is refused.
    """

    transport: str
    address: str
    incarnation: str


class RemoteRegion(msgspec.Struct, frozen=True):
    """Right to write `nbytes` bytes at `address` in the memory of another process. Sent in messages.

    Attributes:
        endpoint: process that owns the memory.
        address: virtual address in that process.
        nbytes: size in bytes.
        key: data that the transport also needs for a write, such as a segment name or an rkey; empty
            if it needs none.
    """

    endpoint: PeerEndpoint
    address: int
    nbytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Region of a peer that is mapped in this process.

    Attributes:
        start, stop: range of the region, as addresses in the peer's process.
        shift: address in this process minus address in the peer's process.
    """

    start: int
    stop: int
    shift: int


class PeerMapper(Protocol):
    """Mappings of peers' memory into the address space of this process, for kernels that write there."""

    @property
    def gpu(self) -> Gpu:
        """GPU that runs the kernels."""
        ...

    def map_region(self, region: RemoteRegion) -> MappedRegion:
        """Map the allocation that contains a peer's region, unless it is mapped already.

        The allocation stays mapped until `keep_mapped` is called without a region of this allocation.

        Raises:
            PeerUnreachable: the peer's process has ended.
            RegionError: the key is malformed, or the region exceeds its allocation.
            TransferFailed: the driver cannot open the allocation.
        """
        ...

    def keep_mapped(self, regions: Iterable[RemoteRegion]) -> None:
        """Unmap every allocation of a peer that contains none of `regions`.

        Memory that a peer frees stays allocated on the peer's GPU while this process maps it. After
        a write with an unknown outcome nothing is unmapped, because kernels may still write.
        """
        ...
