"""What transports share that copy into memory of their own host: bookkeeping, no hardware."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable

from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    RemoteRegion,
    WriteBatch,
)
from windlass.transports.regions import RegionTable, check_batch


class LocalTransport(OneSidedTransport):
    """Base of transports whose writes are copied by the calling process.

    A write is over when it returns or raises, and ends with its process: unregistered memory is
    released at once, and there is nothing to fence. Derived classes say what they are (`traits`,
    `report`), copy (`_copy`), and call `close` of this class in theirs.

    Args:
        endpoint: of this process.
    """

    def __init__(self, endpoint: PeerEndpoint) -> None:
        self._endpoint = endpoint
        self._table = RegionTable()
        self._lock = threading.Lock()

    def endpoint(self) -> PeerEndpoint:
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        with self._lock:
            remote = RemoteRegion(self._endpoint, address, nbytes, self._key_of(address, nbytes))
            region = MemoryRegion(address, nbytes, remote)
            self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._table.remove(region)
        if released is not None:
            released()

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`; the outcome is never unknown."""
        check_batch(self._table, batch, self._endpoint.transport)
        what = f"{self._endpoint.transport} write to {batch.endpoint.address}"
        self._copy(batch, Deadline.after(deadline_s, what))

    def close(self) -> None:
        with self._lock:
            self._table.clear()

    def _key_of(self, address: int, nbytes: int) -> str:  # noqa: ARG002 - for overrides
        """What peers need beside the address; called under the lock."""
        return ""

    @abstractmethod
    def _copy(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Copy a checked batch; return once it is visible at the peer.

        Raises:
            PeerUnreachable, TransferFailed: see `write`.
        """
