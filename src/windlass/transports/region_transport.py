"""Base class of transports that keep a table of regions: checks, deadlines, and memory that is freed late."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from windlass.net.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    OneSidedTransport,
    PeerEndpoint,
    RemoteRegion,
    WriteBatch,
)
from windlass.transports.regions import RegionTable, check_batch

_log = logging.getLogger(__name__)
_KEPT: list[Callable[[], None]] = []
"""Functions that free memory which may be in use until the process ends. Kept alive, never
called."""


class RegionTransport(OneSidedTransport):
    """Base class that checks registrations and writes; a derived class carries them out.

    A derived class defines `traits`, `report` and `_write`, and its `close` calls `close` of this
    class. That is enough if the calling process copies and a write ends with that process. If a
    library must know the memory, the derived class also overrides `_register_all`, `_unregister`,
    and `_is_touched`, which returns whether unfinished writes use a region. `_lock` guards all
    private state.
    """

    def __init__(self, endpoint: PeerEndpoint) -> None:
        self._endpoint = endpoint
        # Reentrant: `released` may free an allocation of this transport, which takes the lock
        # again.
        self._lock = threading.RLock()
        self._table = RegionTable()
        self._deferred: list[tuple[MemoryRegion, Callable[[], None]]] = []
        """Unregistered regions, each with the function that frees it once no unfinished call
        touches it."""

    def endpoint(self) -> PeerEndpoint:
        return self._endpoint

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        with self._lock, self._current():
            # Check before the library registers anything.
            self._table.check_free(spans)
            keys = self._register_all(spans)
            regions = tuple(map(self._region, spans, keys))
            self._table.add(*regions)
        return regions

    def _region(self, span: tuple[int, int], key: str) -> MemoryRegion:
        return MemoryRegion(*span, RemoteRegion(self._endpoint, *span, key))

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        with self._lock, self._current():
            self._table.remove(region)
            later = [free for free in (self._unregister(region), released) if free is not None]
            if later:
                self._deferred.append((region, partial(_call_each, later)))
                self._free_untouched()
            if any(waiting is region for waiting, _ in self._deferred):
                _log.warning(
                    "%s: an unfinished write may still touch %d bytes at %#x: not freed yet",
                    self._endpoint.transport,
                    region.nbytes,
                    region.address,
                )

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Check and write a batch, then free regions that waited for the end of a call."""
        name = self._endpoint.transport
        check_batch(self._table, batch, name)
        deadline = Deadline.after(deadline_s, f"{name} write to {batch.endpoint.address}")
        with self._current():
            try:
                self._write(batch, deadline)
            finally:
                if self._deferred:
                    with self._lock:
                        self._free_untouched()

    def close(self) -> None:
        with self._lock:
            self._table.clear()

    def _free_untouched(self, *, keep: bool = False) -> None:
        """Free the deferred regions that no call touches any more. The caller holds the lock.

        Args:
            keep: keep the remaining regions until the process ends, because the transport closes
                and will not learn when their calls end.
        """
        waiting, self._deferred = self._deferred, []
        for region, released in waiting:
            if self._is_touched(region):
                self._deferred.append((region, released))
                continue
            try:
                released()
            # A failed GPU or a fault in `released` must neither keep other regions from being freed
            # nor fail the write or close that is running now.
            except Exception:  # noqa: BLE001
                _log.exception("%s: memory cannot be freed", self._endpoint.transport)
                _KEPT.append(released)
        if keep:
            _KEPT.extend(released for _, released in self._deferred)
            self._deferred = []

    @abstractmethod
    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Write a checked batch; return once it is visible at the peer.

        Raises:
            PeerUnreachable, TransferFailed, TransferOutcomeUnknown: see `OneSidedTransport.write`.
        """

    def _register(self, address: int, nbytes: int) -> str:  # noqa: ARG002 - for overrides
        """Return the key that peers need besides the address. The caller holds the lock.

        For transports without a library that must know the memory.

        Raises:
            RegionError: the range is refused.
        """
        return ""

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Register ranges with the library and return the key of each. The caller holds the lock.

        Raises:
            RegionError: a range is refused; no range is registered.
        """
        return [self._register(*span) for span in spans]

    def _unregister(self, region: MemoryRegion) -> Callable[[], None] | None:  # noqa: ARG002
        """End a registration now, or return a function that ends it once no call touches the memory.

        The caller holds the lock.
        """
        return None

    def _is_touched(self, region: MemoryRegion) -> bool:  # noqa: ARG002
        """Return whether an unfinished call may use a byte of the region. The caller holds the lock."""
        return False

    def _current(self) -> AbstractContextManager[None]:
        """Return a context manager that surrounds native calls on the registered memory."""
        return contextlib.nullcontext()


def _call_each(calls: Iterable[Callable[[], None]]) -> None:
    """Call each function in order. If one raises, the later ones do not run."""
    for call in calls:
        call()
