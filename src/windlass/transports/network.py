"""What transports between hosts share: settings, registration in steps, memory that is freed late."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import ClassVar, Self

import msgspec

from windlass.errors import ConfigError
from windlass.memory.ranges import Pieces, cut_at_edges, edges_of, merge_adjacent
from windlass.net.addresses import own_address
from windlass.transports.base import (
    MemoryRegion,
    MemoryType,
    OneSidedTransport,
    PeerEndpoint,
    RemoteRegion,
    TransportConfig,
    WriteBatch,
)
from windlass.transports.deferred_free import DeferredFree
from windlass.transports.regions import RegionTable


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


class NetworkTransport(OneSidedTransport):
    """Base of transports whose registrations and writes are a library's.

    Derived classes start the library, then call `__init__` of this class. Everything private is
    guarded by `lock`.

    Args:
        endpoint: of this process.
        step_nbytes: larger regions are registered in steps of this; 0 for at once.
        lock: around every registration and every look at writes that are not over.
    """

    def __init__(self, endpoint: PeerEndpoint, step_nbytes: int, lock: Lock) -> None:
        self._endpoint = endpoint
        self._step_nbytes = step_nbytes
        self._lock = lock
        self._table = RegionTable()
        self._deferred = DeferredFree(endpoint.transport)

    def endpoint(self) -> PeerEndpoint:
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`; over RDMA this pins the memory."""
        with self._lock, self._current():
            self._table.check_free(address, nbytes)  # before anything is pinned
            key = self._pin(address, nbytes)
            remote = RemoteRegion(self._endpoint, address, nbytes, key)
            region = MemoryRegion(address, nbytes, remote)
            self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        with self._lock, self._current():
            self._table.remove(region)
            unpin_late = self._unpin(region)
            if unpin_late is not None or released is not None:
                free = partial(_call_each, (unpin_late, released))
                self._deferred.add(region, free, self._is_touched)

    def _current(self) -> AbstractContextManager[None]:
        """What must be in place around native calls that concern the registered memory."""
        return contextlib.nullcontext()

    @abstractmethod
    def _pin(self, address: int, nbytes: int) -> str:
        """Register memory with the library; returns the key for peers. Holds the lock.

        Raises:
            RegionError: the library refuses it; nothing is registered.
        """

    @abstractmethod
    def _unpin(self, region: MemoryRegion) -> Callable[[], None] | None:
        """Take a registration back; or return what does, to be called once nothing touches it.

        Holds the lock.
        """

    @abstractmethod
    def _is_touched(self, region: MemoryRegion) -> bool:
        """Whether a call that is not over may read or fill a byte of the region. Holds the lock."""

    def _starts(self, address: int, nbytes: int) -> list[int]:
        """Where the steps begin in which a local region is registered."""
        return [address, *edges_of(address, nbytes, self._step_nbytes)]

    def _cut(self, batch: WriteBatch, remote_steps: Iterable[tuple[int, int, int]]) -> Pieces:
        """The pieces of a batch, none of which crosses a seam between two registrations.

        Args:
            batch: what is to be written or read.
            remote_steps: (address, nbytes, step) of every published region; step 0 for at once.
        """
        return cut_at_edges(
            merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes),
            local=[edge for span in self._table.spans() for edge in self._starts(*span)],
            remote=[
                edge
                for address, nbytes, step in remote_steps
                for edge in (address, *edges_of(address, nbytes, step))
            ],
        )


def _call_each(calls: Iterable[Callable[[], None] | None]) -> None:
    for call in calls:
        if call is not None:
            call()
