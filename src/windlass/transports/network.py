"""What transports between hosts share: settings, registration in steps, native calls, memory that is freed late."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import ClassVar, Self

import msgspec

from windlass.errors import ConfigError, RegionError
from windlass.memory.ranges import (
    Pieces,
    calls,
    cut_at_edges,
    edges_of,
    merge_adjacent,
    split_pieces,
)
from windlass.net.addresses import own_address
from windlass.transports.base import (
    MemoryType,
    PeerEndpoint,
    TransportConfig,
    WriteBatch,
)
from windlass.transports.region_transport import RegionTransport

_CAP_IPC_LOCK = 14


class NetworkConfig(TransportConfig, frozen=True):
    """Settings that transports between hosts have in common.

    Attributes:
        host: address that peers reach this process at; empty for `addresses.own_address`.
        device: comma-separated names of NICs, as the transport spells them; empty for all. Writes
            are striped over them.
        max_registration_nbytes: larger regions are registered in steps of this; 0 for the
            transport's own limit.
        gpu: ordinal of the GPU whose memory is registered; -1 for host memory. Work on that memory
            must be over before a write begins.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset(MemoryType)
    between_hosts: ClassVar[bool] = True

    host: str = ""
    device: str = ""
    max_registration_nbytes: int = 0
    gpu: int = -1

    def __post_init__(self) -> None:
        if self.gpu < -1:
            raise ConfigError(f"gpu: must be -1 or the ordinal of a GPU, got {self.gpu}")
        nbytes = self.max_registration_nbytes
        if nbytes < 0 or nbytes % 4096:
            raise ConfigError(
                f"max_registration_nbytes: must be 0 or a positive multiple of 4096, got {nbytes}"
            )

    def placed(self, *, towards: str, gpu: int) -> Self:
        """These settings with a host and a GPU; see `TransportConfig.create`."""
        return msgspec.structs.replace(
            self,
            host=self.host or own_address(towards),
            gpu=self.gpu if gpu < 0 else gpu,
        )


class NetworkTransport(RegionTransport):
    """Base of transports whose registrations and writes are a library's.

    Derived classes start the library, then call `__init__` of this class.

    Args:
        endpoint: of this process.
        step_nbytes: larger regions are registered in steps of this; 0 for at once.
        lock: see `RegionTransport`.
    """

    def __init__(self, endpoint: PeerEndpoint, step_nbytes: int, lock: Lock) -> None:
        super().__init__(endpoint, lock)
        self._step_nbytes = step_nbytes

    def _starts(self, address: int, nbytes: int) -> list[int]:
        """Return where the steps begin in which a local region is registered."""
        return [address, *edges_of(address, nbytes, self._step_nbytes)]

    def _calls(
        self,
        batch: WriteBatch,
        remote_steps: Iterable[int],
        max_pieces: int,
        max_nbytes: int,
        max_piece_nbytes: int,
    ) -> Iterator[Pieces]:
        """Yield what goes into one native call each; no piece crosses a seam between two registrations.

        Args:
            batch: what is to be written or read.
            remote_steps: of every published region; step 0 for at once.
            max_pieces: of one call.
            max_nbytes: of one call.
            max_piece_nbytes: of one piece.
        """
        pieces = cut_at_edges(
            merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes),
            local=[edge for span in self._table.spans() for edge in self._starts(*span)],
            remote=[
                edge
                for region, step in zip(batch.regions, remote_steps, strict=True)
                for edge in (region.address, *edges_of(region.address, region.nbytes, step))
            ],
        )
        local, remote, nbytes = split_pieces(*pieces, max_piece_nbytes)
        for part in calls(nbytes, max_pieces=max_pieces, max_nbytes=max_nbytes):
            yield local[part], remote[part], nbytes[part]


def locks_without_limit() -> bool:
    """Return whether this process has CAP_IPC_LOCK, for which RLIMIT_MEMLOCK does not hold."""
    return bool(int(_status("CapEff"), 16) >> _CAP_IPC_LOCK & 1)


def check_lockable(nbytes: int, purpose: str) -> None:
    """Refuse what the kernel would refuse: pinned memory above RLIMIT_MEMLOCK.

    UCX tries again without end when the kernel refuses to pin, so the kernel is not left to refuse.

    Args:
        nbytes: bytes to be pinned beside those that are.
        purpose: what for, at the head of the message.

    Raises:
        RegionError: the limit is too small, and this process has no CAP_IPC_LOCK.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or locks_without_limit():
        return
    needed = int(_status("VmPin")) * 1024 + nbytes
    if needed > limit:
        raise RegionError(
            f"{purpose}: lockable memory must be >= {needed} bytes, got {limit}; see ulimit -l"
        )


def _status(key: str) -> str:
    """Return the number at `key` in what the kernel says of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return text.partition(f"\n{key}:")[2].split(maxsplit=1)[0]
