"""Table of registered regions, and the checks of a batch against local and published regions.

Some mechanisms check nothing: `process_vm_writev` writes to any address, and Mooncake's TCP reads
from any address. So every write of every transport is checked here first.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from windlass.errors import RegionError
from windlass.layout.columns import UInt64Array
from windlass.transports.base import MemoryRegion, WriteBatch

MAX_ADDRESS = 1 << 63
"""Address below which each region must end."""
_ADDRESS = attrgetter("address")


class RegionTable:
    """Registered local regions, disjoint and sorted by address.

    Only a thread with the transport's lock changes the table; any thread may read it.
    """

    def __init__(self) -> None:
        self._regions: list[MemoryRegion] = []

    def check_free(self, spans: Iterable[tuple[int, int]]) -> None:
        """Check that all ranges (address, nbytes) can be registered.

        Raises:
            RegionError: a range is empty, starts at address 0, exceeds the address space, or
                overlaps a registered region or another range.
        """
        ordered = sorted(spans)
        for start, nbytes in ordered:
            if nbytes < 1:
                raise RegionError(f"register: nbytes must be >= 1, got {nbytes}")
            if start < 1 or start + nbytes > MAX_ADDRESS:
                raise RegionError(
                    f"register: address must be in [1, 2^63 - nbytes], got {start:#x}"
                )
            slot = bisect.bisect_right(self._regions, start, key=_ADDRESS)
            for other in self._regions[max(slot - 1, 0) : slot + 1]:
                _check_apart((start, nbytes), (other.address, other.nbytes), "registered ")
        for before, span in itertools.pairwise(ordered):
            _check_apart(span, before, "")

    def add(self, *regions: MemoryRegion) -> None:
        """Add regions.

        Raises:
            RegionError: see `check_free`. In this case, no region is added.
        """
        self.check_free((region.address, region.nbytes) for region in regions)
        for region in regions:
            bisect.insort(self._regions, region, key=_ADDRESS)

    def remove(self, region: MemoryRegion) -> None:
        """Remove a region.

        Raises:
            RegionError: the region is not registered.
        """
        slot = bisect.bisect_left(self._regions, region.address, key=_ADDRESS)
        if self._regions[slot : slot + 1] != [region]:
            raise RegionError(
                f"unregister: region at {region.address:#x} with {region.nbytes} bytes is not "
                "registered"
            )
        del self._regions[slot]

    def clear(self) -> None:
        """Remove all regions."""
        self._regions = []

    def spans(self) -> list[tuple[int, int]]:
        """Return (address, nbytes) of every region, sorted by address."""
        # Another thread may change the list during the iteration.
        return [(r.address, r.nbytes) for r in self._regions.copy()]


def _check_apart(span: tuple[int, int], other: tuple[int, int], what: str) -> None:
    """Raise RegionError if two ranges (address, nbytes) overlap. `what` describes `other` in the error."""
    (start, nbytes), (other_start, other_nbytes) = span, other
    if start < other_start + other_nbytes and other_start < start + nbytes:
        raise RegionError(
            f"register: [{start:#x}, {start + nbytes:#x}) overlaps {what}"
            f"[{other_start:#x}, {other_start + other_nbytes:#x})"
        )


def check_batch(table: RegionTable, batch: WriteBatch, transport: str) -> None:
    """Check a batch before its first byte is sent.

    Raises:
        RegionError: the columns differ in length, or a region belongs to another endpoint or transport.
        RegionError: a piece is empty, outside local registered memory, or outside the published regions.
    """
    if batch.endpoint.transport != transport:
        raise RegionError(
            f"write: the endpoint's transport must be {transport!r}, got {batch.endpoint.transport!r}"
        )
    num_pieces = len(batch.nbytes)
    if len(batch.local_addresses) != num_pieces or len(batch.remote_addresses) != num_pieces:
        raise RegionError(
            f"write: local_addresses, remote_addresses and nbytes must have the same length, got {len(batch.local_addresses)}, "
            f"{len(batch.remote_addresses)} and {num_pieces}"
        )
    for region in batch.regions:
        if region.endpoint != batch.endpoint:
            raise RegionError(
                f"write: all regions must belong to {batch.endpoint.address} incarnation "
                f"{batch.endpoint.incarnation}, got a region of {region.endpoint.address} "
                f"incarnation {region.endpoint.incarnation}"
            )
    check_inside(batch.local_addresses, batch.nbytes, table.spans(), "local registered memory")
    check_inside(
        batch.remote_addresses,
        batch.nbytes,
        [(r.address, r.nbytes) for r in batch.regions],
        f"published regions of {batch.endpoint.address}",
    )


def check_inside(
    addresses: UInt64Array,
    nbytes: UInt64Array,
    spans: Iterable[tuple[int, int]],
    where: str,
) -> None:
    """Check that each piece is inside one of `spans`.

    Raises:
        RegionError: a piece is empty or outside all `spans`; the message names the first such piece.
    """
    if len(nbytes) == 0:
        return
    if bool((nbytes == 0).any()):
        raise RegionError(f"write: piece {int((nbytes == 0).argmax())} has zero length")
    ordered = sorted(spans)
    starts = np.array([s for s, _ in ordered], np.uint64)
    ends = np.array([s + n for s, n in ordered], np.uint64)
    slot = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside = slot >= 0
    if len(ordered):
        piece_ends = addresses + nbytes
        inside &= (piece_ends <= ends[slot]) & (piece_ends > addresses)
    if not inside.all():
        row = int((~inside).argmax())
        raise RegionError(
            f"write: piece {row} at {int(addresses[row]):#x} with {int(nbytes[row])} bytes must be "
            f"inside {where}"
        )


def overlaps(region: MemoryRegion, addresses: UInt64Array, nbytes: UInt64Array) -> bool:
    """Return whether any byte of the pieces is in the region."""
    start, stop = region.address, region.address + region.nbytes
    return bool(((addresses < stop) & (addresses + nbytes > start)).any())
