"""Writes of a link through the two halves of an arena: one half is packed while the other is written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from windlass.transports.base import WriteBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWrite:
    """Result of the writes of one link.

    Attributes:
        wire_s: seconds of writing.
        pack_s: seconds of packing.
        error: error that ended packing or writing; None after success.
        write_error: error of the last write that began, if it failed.
    """

    wire_s: float
    pack_s: float
    error: Exception | None = None
    write_error: BaseException | None = None


def write_ring(
    ring: Iterator[WriteBatch], begin: Callable[[WriteBatch], Future[float]]
) -> RingWrite:
    """Write the batches of `Packer.ring`: each batch is packed while the previous one is written. Wait for the last write.

    Args:
        ring: batches; the next batch is packed when it is requested.
        begin: function that begins to write a batch; its future returns the seconds of writing.
    """
    in_flight: Future[float] | None = None
    began, waited, wire_s = time.perf_counter(), 0.0, 0.0
    failed: Exception | None = None
    try:
        for batch in itertools.chain(ring, (None,)):
            if in_flight is not None:
                paused = time.perf_counter()
                wire_s += in_flight.result()
                waited += time.perf_counter() - paused
            if batch is not None:
                in_flight = begin(batch)
    # Return every error, because the outcomes of the other links must still be reported.
    except Exception as error:  # noqa: BLE001
        failed = error
    finally:
        if in_flight is not None:
            wait((in_flight,))
    return RingWrite(
        wire_s=wire_s,
        pack_s=time.perf_counter() - began - waited,
        error=failed,
        write_error=None if failed is None or in_flight is None else in_flight.exception(),
    )
