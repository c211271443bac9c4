"""A transport that injects faults into chosen writes."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from windlass.errors import ConfigError, TransferFailed, TransferOutcomeUnknown
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint


class FaultKind(StrEnum):
    """Kind of an injected fault.

    FAIL_BEFORE: nothing is sent, and the write raises `TransferFailed`.
    FAIL_HALFWAY: the first half of the pieces is sent, and the write raises `TransferFailed`.
    DROP_PIECE: the last piece is not sent, and the write returns as after a success.
    FLIP_BYTE: the first byte of the first piece arrives inverted, and the write returns as after a success.
    UNKNOWN: nothing is sent, and the write raises `TransferOutcomeUnknown`.
    UNKNOWN_LANDED: everything is sent, but the write raises `TransferOutcomeUnknown`.
    DELAY: everything is sent after `delay_s`. If the deadline of the write is earlier, nothing is sent, and the write
        raises `TransferOutcomeUnknown`.
    """

    FAIL_BEFORE = "fail_before"
    FAIL_HALFWAY = "fail_halfway"
    DROP_PIECE = "drop_piece"
    FLIP_BYTE = "flip_byte"
    UNKNOWN = "unknown"
    UNKNOWN_LANDED = "unknown_landed"
    DELAY = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault to inject.

    Attributes:
        kind: kind of the fault.
        delay_s: seconds of the delay; 0 for all kinds but DELAY.
        endpoint: endpoint of the peer to which the faulty write must go; None for any peer.
    """

    kind: FaultKind
    delay_s: float = 0.0
    endpoint: PeerEndpoint | None = None

    def __post_init__(self) -> None:
        if self.delay_s < 0 or (self.delay_s > 0) != (self.kind is FaultKind.DELAY):
            raise ConfigError(
                "Fault: delay_s must be > 0 for kind 'delay' and 0 for all other kinds, "
                f"got {self.delay_s} for kind {self.kind.value!r}"
            )


class FaultyTransport(WrappedTransport):
    """Transport that injects faults into chosen writes, and passes all other calls to `inner`. Thread-safe.

    Args:
        inner: transport that does the work; `close` closes it, too.
        faults: number of a write -> fault to inject. Writes are numbered from 0, over all peers.
    """

    def __init__(self, inner: OneSidedTransport, faults: Mapping[int, Fault]) -> None:
        super().__init__(inner)
        self._faults = dict(faults)
        self._lock = threading.Lock()
        self._num_writes = 0
        self._cancelled = threading.Event()

    @property
    def num_writes(self) -> int:
        """Number of writes that have begun."""
        with self._lock:
            return self._num_writes

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """Write like `inner`. If `faults` contains a fault for the number of this write, inject the fault.

        If the fault is for another endpoint, write without a fault. No later write gets this fault.

        Raises:
            TransferFailed, TransferOutcomeUnknown: the fault raises this error (see `FaultKind`), or `inner` raised it.
        """
        with self._lock:
            number = self._num_writes
            self._num_writes += 1
            fault = self._faults.get(number)
        if fault is None or fault.endpoint not in (None, batch.endpoint):
            self.inner.write(batch, deadline_s=deadline_s)
            return
        what = f"write {number}: scripted {fault.kind.value}"
        match fault.kind:
            case FaultKind.FAIL_BEFORE:
                raise TransferFailed(what)
            case FaultKind.FAIL_HALFWAY:
                self.inner.write(_head(batch, len(batch.nbytes) // 2), deadline_s=deadline_s)
                raise TransferFailed(what)
            case FaultKind.DROP_PIECE:
                self.inner.write(_head(batch, len(batch.nbytes) - 1), deadline_s=deadline_s)
            case FaultKind.FLIP_BYTE:
                self.inner.write(batch, deadline_s=deadline_s)
                self._flip_first_byte(batch, deadline_s)
            case FaultKind.UNKNOWN:
                raise TransferOutcomeUnknown(what)
            case FaultKind.UNKNOWN_LANDED:
                self.inner.write(batch, deadline_s=deadline_s)
                raise TransferOutcomeUnknown(what)
            case FaultKind.DELAY:
                self._delay(batch, deadline_s, fault.delay_s, what)

    def close(self) -> None:
        """End all delays at once, and close `inner`."""
        self._cancelled.set()
        super().close()

    def _delay(self, batch: WriteBatch, deadline_s: float, delay_s: float, what: str) -> None:
        start = time.monotonic()
        self._cancelled.wait(min(delay_s, deadline_s))
        left = deadline_s - (time.monotonic() - start)
        if delay_s >= deadline_s or left <= 0:
            raise TransferOutcomeUnknown(what)
        self.inner.write(batch, deadline_s=left)

    def _flip_first_byte(self, batch: WriteBatch, deadline_s: float) -> None:
        if len(batch.nbytes) == 0:
            return
        wrong = np.array([ctypes.c_uint8.from_address(int(batch.local_addresses[0])).value], "u1")
        np.invert(wrong, out=wrong)
        region = self.inner.register(int(wrong.ctypes.data), 1)
        try:
            self.inner.write(
                replace(
                    batch,
                    local_addresses=np.array([wrong.ctypes.data], np.uint64),
                    remote_addresses=batch.remote_addresses[:1],
                    nbytes=np.array([1], np.uint64),
                ),
                deadline_s=deadline_s,
            )
        finally:
            self.inner.unregister(region)


def _head(batch: WriteBatch, count: int) -> WriteBatch:
    count = max(count, 0)
    return replace(
        batch,
        local_addresses=batch.local_addresses[:count],
        remote_addresses=batch.remote_addresses[:count],
        nbytes=batch.nbytes[:count],
    )
