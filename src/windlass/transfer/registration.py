"""Memory registered by allocation: once for all that lies in it, since registering takes time per region.

So do SGLang (`register_memory_region_v2`) and AWEX, which register the segments of torch's caching allocator.
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
_log = logging.getLogger(__name__)


def stretches(
    spans: Iterable[Span], allocation: Callable[[int], Span | None] | None = None
) -> list[Span]:
    """Return (address, nbytes) of what is registered at once: spans that overlap share a stretch.

    With `allocation` spans of one allocation share a stretch as well, with what lies between them.

    Args:
        spans: (address, nbytes) of parameters.
        allocation: around an address of this process's memory, None where nobody knows it: such spans
            share a stretch where they touch. Without it only what overlaps is joined.
    """
    joined: list[Span] = []
    end = room = 0  # of the last stretch, and of the allocation that it begins in
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
    """What a transport reads in place, registered by allocation for as long as it lies there.

    An allocation stays registered while something in it is wanted: it is mapped and freed as one, so that
    parameters may move within it.

    Args:
        memory: knows the allocations of GPU memory; those of host memory, parameters say.
        by_owner: regions that the owner has registered already; what lies in them is not again.
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
        self._registered: dict[MemoryRegion, Span | None] = {}
        """And the allocation that each is of."""
        self._covered: tuple[ParameterMemory, ...] | None = ()
        """None where covering has failed half way."""

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """What is registered now."""
        return tuple(self._registered)

    def cover(self, memories: Iterable[ParameterMemory]) -> float:
        """Have these registered, and no allocation that none of them lies in.

        Returns:
            Seconds that it took; 0 where everything lay where it was.

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
        for region, around in list(self._registered.items()):
            there = region.address, region.nbytes
            met = _met_by(there, ordered)
            if met and all(wanted[s] == around and _serves(there, around, s) for s in met):
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
            what = self._worker, len(now), nbytes, len(self._registered), seconds
            _log.info("%s: %d parameters in %d bytes of %d regions, registered in %.3f s", *what)
        return seconds

    def _wanted(self, memories: Sequence[ParameterMemory]) -> dict[Span, Span | None]:
        """Return what is to be registered, by address, and the allocation that each is of."""
        storages: dict[int, Span | None] = {}
        spans: dict[int, set[Span]] = {}
        for memory in memories:
            before = bisect_right(self._by_owner, memory.address, key=itemgetter(0))
            span = memory.address, memory.nbytes
            if memory.nbytes and not (before and _holds(self._by_owner[before - 1], span)):
                storages[memory.address] = memory.storage
                spans.setdefault(before, set()).add(span)  # no stretch reaches over an owner's

        def allocation(address: int) -> Span | None:
            return self._memory.allocation(address) or storages[address]

        found = (stretches(near, allocation) for _, near in sorted(spans.items()))
        return {span: allocation(span[0]) for span in itertools.chain.from_iterable(found)}


def _holds(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and sum(inner) <= sum(outer)


def _met_by(span: Span, ordered: Sequence[Span]) -> Sequence[Span]:
    """Return which of disjoint spans, by address, overlap `span`."""
    first = bisect_right(ordered, span[0], key=sum)
    return ordered[first : bisect_left(ordered, sum(span), key=itemgetter(0))]


def _serves(registered: Span, around: Span | None, wanted: Span) -> bool:
    """Whether a region is as good as one for `wanted` alone: what it has beside that stays mapped as well."""
    within = around is not None and _holds(around, registered)
    return registered == wanted or (within and _holds(registered, wanted))
