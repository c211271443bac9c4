"""Base class of transports: table of regions, checks, deadlines, and memory that must be freed later."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.regions import RegionTable, check_batch

_log = logging.getLogger(__name__)
NEVER_FREED: list[Callable[[], None]] = []
"""Functions that would free memory which unfinished calls may use. They are kept, never called, so
that the memory stays allocated until the process ends."""


class RegionTransport(OneSidedTransport):
    """Base class that checks registrations and writes; a derived class performs them.

    A derived class defines `traits`, `report` and `_write`, and its `close` calls `close` of this
    class. No other method is needed if the writing process copies the bytes itself, because its writes
    end when it ends. If a library must register the memory, the derived class also overrides
    `_register_all` (or `_register`), `_unregister` and `_is_touched`. `_lock` guards all private state.
    """

    def __init__(self, endpoint: PeerEndpoint) -> None:
        self._endpoint = endpoint
        # Reentrant, because `released` may free an allocation of this transport, and freeing takes the lock.
        self._lock = threading.RLock()
        self.table = RegionTable()
        """Registered regions."""
        self._deferred: list[tuple[MemoryRegion, Callable[[], None]]] = []
        """Unregistered regions that unfinished calls use, each with the function that frees it later."""

    def endpoint(self) -> PeerEndpoint:
        """Address of this process for peers."""
        return self._endpoint

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        """Register all spans, or none of them. For the errors, see `OneSidedTransport.register_all`."""
        with self._lock, self._current():
            # Check before the library registers anything.
            self.table.check_free(spans)
            keys = self._register_all(spans)
            regions = tuple(map(self._region, spans, keys))
            self.table.add(*regions)
        return regions

    def _region(self, span: tuple[int, int], key: str) -> MemoryRegion:
        """Return the description of a registered range (address, nbytes) and of the right to write it."""
        return MemoryRegion(*span, RemoteRegion(self._endpoint, *span, key))

    def unregister(self, region: MemoryRegion, released: Callable[[], None] | None = None) -> None:
        """See `OneSidedTransport.unregister`. If an unfinished call uses the region, a later `write` calls `released`."""
        with self._lock, self._current():
            self.table.remove(region)
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
        """See `OneSidedTransport.write`. Then call the deferred `released` functions of regions that no running call uses."""
        name = self._endpoint.transport
        check_batch(self.table, batch, name)
        deadline = Deadline.after(deadline_s, f"{name} write to {batch.endpoint.address}")
        with self._current():
            try:
                self._write(batch, deadline)
            finally:
                if self._deferred:
                    with self._lock:
                        self._free_untouched()

    def close(self) -> None:
        """Forget all regions."""
        with self._lock:
            self.table.clear()

    def _free_untouched(self, *, keep: bool = False) -> None:
        """Free the unregistered regions that no unfinished call uses any more. The caller holds the lock.

        Args:
            keep: whether to abandon the regions that an unfinished call may still use: they stay allocated until
                the process ends. True when the transport closes, because a closed transport does not learn when these
                calls end.
        """
        waiting, self._deferred = self._deferred, []
        for region, released in waiting:
            if self._is_touched(region):
                self._deferred.append((region, released))
                continue
            try:
                released()
            # After an error of a GPU or of `released`, other regions must still be freed, and the
            # running `write` or `close` must not fail.
            except Exception:  # noqa: BLE001
                _log.exception("%s: memory cannot be freed", self._endpoint.transport)
                NEVER_FREED.append(released)
        if keep:
            NEVER_FREED.extend(released for _, released in self._deferred)
            self._deferred = []

    @abstractmethod
    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Write a checked batch; return once all bytes are visible in the peer's memory.

        Raises:
            PeerUnreachable, TransferFailed, TransferOutcomeUnknown: see `OneSidedTransport.write`.
        """

    def _register(self, address: int, nbytes: int) -> str:  # noqa: ARG002 - for overrides
        """Register one range, and return the `key` of its `RemoteRegion`. The caller holds the lock.

        Override this, and not `_register_all`, if ranges are registered one at a time.

        Raises:
            RegionError: the range is refused.
        """
        return ""

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Register ranges; return the `key` of the `RemoteRegion` of each range. The caller holds the lock.

        Raises:
            RegionError: a range is refused. In this case, no range is registered.
        """
        return [self._register(*span) for span in spans]

    def _unregister(self, region: MemoryRegion) -> Callable[[], None] | None:  # noqa: ARG002
        """End a registration, or return a function that ends it later. The caller holds the lock.

        The caller calls the function once no unfinished call uses the memory.
        """
        return None

    def _is_touched(self, region: MemoryRegion) -> bool:  # noqa: ARG002
        """Return whether an unfinished call may still use the region. The caller holds the lock."""
        return False

    def _current(self) -> AbstractContextManager[None]:
        """Return a context manager in which native calls run, for example one that sets the CUDA context."""
        return contextlib.nullcontext()


def _call_each(calls: Iterable[Callable[[], None]]) -> None:
    """Call each function in order. If a function raises, the later functions do not run."""
    for call in calls:
        call()
