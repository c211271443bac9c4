"""Registers memory once per allocation instead of once per parameter, because each registration takes time.

SGLang (`register_memory_region_v2`) and AWEX do the same with the segments of torch's caching allocator.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import final

from windlass.memory.ops import MemoryOps
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import MemoryRegion, OneSidedTransport

Span = tuple[int, int]
"""(address, nbytes)"""
Allocation = tuple[Span | None, int]
"""Host allocation of a range (None if it is unknown), and its `ParameterMemory.generation`."""
_log = logging.getLogger(__name__)


def stretches(
    spans: Iterable[Span], allocation: Callable[[int], Span | None] | None = None
) -> list[Span]:
    """Join parameters into the (address, nbytes) ranges to register, in address order.

    Overlapping parameters always share a range. If `allocation` is given, the parameters in one allocation share a
    range, which also covers the bytes between them. Adjacent parameters whose allocation is unknown share a range too.

    Args:
        spans: (address, nbytes) of the parameters.
        allocation: function that returns the (address, nbytes) of the allocation that contains an address, or None if
            it is unknown.
    """
    joined: list[Span] = []
    # End of the last range, and end of the allocation that contains its first byte (-1: unknown).
    end = room = 0
    for begin, nbytes in sorted(spans):
        if joined and (begin < end or begin + nbytes <= room or (begin == end and room < 0)):
            first = joined[-1][0]
            end = max(end, begin + nbytes)
            joined[-1] = first, end - first
            continue
        joined.append((begin, nbytes))
        end = begin + nbytes
        if allocation is not None:
            around = allocation(begin)
            room = -1 if around is None else sum(around)
    return joined


@final
class RegisteredMemory:
    """Registrations of the parameters that a transport reads in place, one per allocation.

    An allocation is freed as a whole, so it stays registered while it contains a parameter. Parameters may move within
    the allocation.

    Args:
        worker: name of the rank, for the log.
        transport: transport that registers.
        memory: memory of the parameters, which finds the allocations on a GPU. In host memory,
            `ParameterMemory.storage` is the allocation.
        by_owner: regions that the caller has registered already. Parameters inside them are not registered again.
    """

    def __init__(
        self,
        worker: str,
        transport: OneSidedTransport,
        memory: MemoryOps,
        by_owner: Sequence[MemoryRegion],
    ) -> None:
        self._worker, self._transport, self._memory = worker, transport, memory
        self._by_owner = sorted((region.address, region.nbytes) for region in by_owner)
        self._registered: dict[MemoryRegion, Allocation] = {}
        self._covered: tuple[ParameterMemory, ...] | None = ()
        """Parameters of the last successful `cover`; None after an error in `cover`."""

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Regions that this object has registered."""
        return tuple(self._registered)

    def cover(self, memories: Iterable[ParameterMemory]) -> float:
        """Register the memory of these parameters. Unregister earlier regions that do not fit these parameters.

        Returns:
            Duration in seconds; 0 if no parameter has moved since the last call.

        Raises:
            RegionError: memory cannot be registered.
        """
        now = tuple(memories)
        if now == self._covered:
            return 0.0
        began = time.perf_counter()
        self._covered = None
        wanted = self._wanted(now)
        ordered = list(wanted)
        for region, allocation in list(self._registered.items()):
            there = region.address, region.nbytes
            met = _met_by(there, ordered)
            if met and all(
                wanted[s] == allocation and _serves(there, allocation[0], s) for s in met
            ):
                for span in met:
                    del wanted[span]
            else:
                del self._registered[region]
                self._transport.unregister(region)
        if wanted:
            regions = self._transport.register_all(list(wanted))
            self._registered |= dict(zip(regions, wanted.values(), strict=True))
        self._covered = now
        seconds = time.perf_counter() - began
        if wanted:
            nbytes = sum(region.nbytes for region in self._registered)
            what = self._worker, len(now), len(self._registered), nbytes, seconds
            _log.info("%s: registered %d parameters in %d regions (%d bytes) in %.3f s", *what)
        return seconds

    def _wanted(self, memories: Sequence[ParameterMemory]) -> dict[Span, Allocation]:
        """Return the ranges to register, in address order: (address, nbytes) -> the allocation that contains the range."""
        storages: dict[int, Allocation] = {}
        spans: dict[int, set[Span]] = {}
        for memory in memories:
            before = bisect_right(self._by_owner, memory.address, key=itemgetter(0))
            span = memory.address, memory.nbytes
            if memory.nbytes and not (before and _holds(self._by_owner[before - 1], span)):
                storages[memory.address] = memory.storage, memory.generation
                # `_by_owner` contains regions that their owner has registered already. Do not merge parameters on both
                # sides of such a region into one range, because the range would contain the region.
                spans.setdefault(before, set()).add(span)

        def allocation(address: int) -> Span | None:
            return self._memory.allocation(address) or storages[address][0]

        found = (stretches(near, allocation) for _, near in sorted(spans.items()))
        return {
            span: (allocation(span[0]), storages[span[0]][1])
            for span in itertools.chain.from_iterable(found)
        }


def _holds(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and sum(inner) <= sum(outer)


def _met_by(span: Span, ordered: Sequence[Span]) -> Sequence[Span]:
    """Return the spans in `ordered` that overlap `span`. `ordered` is sorted by address, without overlaps."""
    first = bisect_right(ordered, span[0], key=sum)
    return ordered[first : bisect_left(ordered, sum(span), key=itemgetter(0))]


def _serves(registered: Span, around: Span | None, wanted: Span) -> bool:
    """Return whether the existing registration makes a new registration of `wanted` unnecessary.

    It does if both ranges are equal. It also does if `registered` contains `wanted` and both are in one allocation
    (`around`), because an allocation is freed as a whole.
    """
    within = around is not None and _holds(around, registered)
    return registered == wanted or (within and _holds(registered, wanted))
