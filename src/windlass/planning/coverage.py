"""Coverage: every destination byte has exactly one source, or there is no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from windlass.errors import IncompleteCoverage
from windlass.layout.box import Box
from windlass.layout.manifest import MAX_DIMS, ShardManifest
from windlass.planning.intersect import Atoms, box_of
from windlass.planning.plan import ITEMSIZES, CopyMode, Reason
from windlass.planning.rows import RowTable, TensorNames

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
    row: int,
    dst: RowTable,
    names: TensorNames,
    destinations: Sequence[ShardManifest],
    atoms: Atoms,
) -> NoReturn:
    """Raise for a row of `dst` whose box the `atoms` of its tensor do not cover.

    Raises:
        IncompleteCoverage: always; names tensor, destination, the first hole and all bytes.
    """
    name, itemsize = int(dst.name[row]), int(ITEMSIZES[dst.dtype[row]])
    box = box_of(dst.offsets[row], dst.sizes[row])
    holes = find_hole(atoms, box)
    lead = MAX_DIMS - len(names.shapes[name])
    first = Box(holes[0].offsets[lead:], holes[0].sizes[lead:])
    missing = sum(hole.numel for hole in holes) * itemsize
    raise IncompleteCoverage(
        f"tensor {names.names[name]!r} of {destinations[int(dst.rank[row])].worker}: box {first} "
        f"has no source; {missing} of {box.numel * itemsize} bytes are uncovered in "
        f"{len(holes)} hole(s)"
    )
