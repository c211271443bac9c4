"""What all transports share that keep a table of their regions: checks, deadlines, memory that is freed late."""

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
"""What frees memory that may be touched for ever: kept until the process ends, never called again."""


class RegionTransport(OneSidedTransport):
    """Base of transports: registers and writes nothing itself, and checks what is registered and written.

    Derived classes say what they are (`traits`, `report`), write (`_write`), and call `close` of this
    class in theirs. Where the calling process copies and a write ends with it, that is all. A library
    that must know memory is told by `_register_all` and `_unregister`, and `_is_touched` says which memory its writes
    still use. Everything private is guarded by `_lock`.
    """

    def __init__(self, endpoint: PeerEndpoint) -> None:
        self._endpoint = endpoint
        # Who frees an allocation of the transport itself, in `released`, takes the lock again.
        self._lock = threading.RLock()
        self._table = RegionTable()
        self._deferred: list[tuple[MemoryRegion, Callable[[], None]]] = []
        """Unregistered, and what frees it once no call that is not over touches it."""

    def endpoint(self) -> PeerEndpoint:
        return self._endpoint

    def register_all(self, spans: Sequence[tuple[int, int]]) -> tuple[MemoryRegion, ...]:
        with self._lock, self._current():
            self._table.check_free(spans)  # before a library has them
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
                    "%s: a write that is not over may still touch %d bytes at %#x: not freed yet",
                    self._endpoint.transport,
                    region.nbytes,
                    region.address,
                )

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Write a batch that passes every check; then free what waited for the end of a call."""
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
        """Free what nothing touches any more. Holds the lock.

        `keep`: the transport ends, and nobody will ever tell of the rest: it stays until the process ends.
        """
        waiting, self._deferred = self._deferred, []
        for region, released in waiting:
            if self._is_touched(region):
                self._deferred.append((region, released))
                continue
            try:
                released()
            # Of a GPU that has failed, or of nobody knows what: the others must be freed all the same,
            # and whoever writes or closes at this moment has no part in it.
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
        """Return what peers need beside the address, where no library must know memory. Holds the lock.

        Raises:
            RegionError: it is refused.
        """
        return ""

    def _register_all(self, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Make ranges known to a library; the key of each. Holds the lock.

        Raises:
            RegionError: one is refused; none is registered.
        """
        return [self._register(*span) for span in spans]

    def _unregister(self, region: MemoryRegion) -> Callable[[], None] | None:  # noqa: ARG002
        """Take a registration back; or return what does, to be called once nothing touches the memory.

        Holds the lock.
        """
        return None

    def _is_touched(self, region: MemoryRegion) -> bool:  # noqa: ARG002
        """Return whether a call that is not over may read or fill a byte of the region. Holds the lock."""
        return False

    def _current(self) -> AbstractContextManager[None]:
        """Return what must be in place around native calls that concern the registered memory."""
        return contextlib.nullcontext()


def _call_each(calls: Iterable[Callable[[], None]]) -> None:
    """Take a registration back before its memory is freed: what stays registered stays."""
    for call in calls:
        call()
