"""Coverage: every destination byte has exactly one source, or there is no plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from windlass.errors import IncompleteCoverage
from windlass.layout.box import Box
from windlass.layout.manifest import MAX_DIMS, Int64Array
from windlass.planning.intersect import Atoms, box_of
from windlass.planning.plan import CopyMode, Reason

__all__ = ["CoverageReport", "find_hole", "refuse_hole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageReport:
    """What a plan covers, in bytes of the destinations.

    Attributes:
        needed: bytes that the destinations declare, padding not counted.
        covered: bytes that the plan writes; equal to `needed` in every plan that exists.
        by_mode: bytes per mode.
        by_reason: bytes per reason.
        unused_tensors: names that sources hold and no destination wants.
    """

    needed: int
    covered: int
    by_mode: Mapping[CopyMode, int]
    by_reason: Mapping[Reason, int]
    unused_tensors: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """`covered / needed`, 1.0 when nothing is needed."""
        return self.covered / self.needed if self.needed else 1.0


def find_hole(atoms: Atoms, box: Box) -> tuple[Box, ...]:
    """The parts of `box` that no atom covers, as disjoint boxes."""
    left: tuple[Box, ...] = (box,)
    for index in range(len(atoms)):
        atom = box_of(atoms.offsets[index], atoms.sizes[index])
        left = tuple(piece for part in left for piece in part.subtract(atom))
        if not left:
            break
    return left


def refuse_hole(
    *,
    tensor: str,
    num_dims: int,
    worker: str,
    atoms: Atoms,
    offsets: Int64Array,
    sizes: Int64Array,
    itemsize: int,
) -> None:
    """Raise for a destination box with a hole.

    Raises:
        IncompleteCoverage: always; names tensor, destination, the first hole and all bytes.
    """
    holes = find_hole(atoms, box_of(offsets, sizes))
    lead = MAX_DIMS - num_dims
    first = Box(holes[0].offsets[lead:], holes[0].sizes[lead:])
    missing = sum(hole.numel for hole in holes) * itemsize
    total = int(np.prod(sizes)) * itemsize
    raise IncompleteCoverage(
        f"tensor {tensor!r} of {worker}: box {first} has no source; {missing} of {total} bytes "
        f"are uncovered in {len(holes)} hole(s)"
    )
