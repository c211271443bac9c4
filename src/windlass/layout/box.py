"""Boxes: axis-aligned index ranges of a tensor, and the algebra that the planner needs.

A `Box` selects elements of a global (checkpoint) tensor. It does not describe memory. The
vocabulary follows `torch.distributed.checkpoint` (`ChunkStorageMetadata(offsets, sizes)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.errors import ManifestError


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` of a tensor.

    Args:
        offsets: first index per tensor dim, each >= 0.
        sizes: extent per tensor dim, each >= 0. A zero extent makes the box empty.

    Raises:
        ManifestError: lengths differ, or a value is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ManifestError(
                f"Box: offsets and sizes must have the same length, got {self.offsets} and {self.sizes}"
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise ManifestError(
                f"Box: offsets and sizes must be >= 0, got {self.offsets} and {self.sizes}"
            )

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_dims(self) -> int:
        """Number of tensor dims."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Index after the last element, per tensor dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the common elements; None if there are none.

        Raises:
            ManifestError: the boxes differ in the number of dims.
        """
        if self.num_dims != other.num_dims:
            raise ManifestError(
                f"Box.intersect: both boxes must have the same number of dims, got {self} and {other}"
            )
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        sizes = tuple(e - o for o, e in zip(offsets, ends, strict=True))
        if any(size <= 0 for size in sizes):
            return None
        return Box(offsets, sizes)

    def contains(self, other: Box) -> bool:
        """Return whether this box contains every element of `other`.

        Raises:
            ManifestError: see `intersect`.
        """
        return other.numel == 0 or self.intersect(other) == other

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Return the elements of this box that `other` lacks, as disjoint boxes (at most two per dim).

        Raises:
            ManifestError: see `intersect`.
        """
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        pieces: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim in range(self.num_dims):
            before = common.offsets[dim] - offsets[dim]
            after = offsets[dim] + sizes[dim] - common.ends[dim]
            if before > 0:
                pieces.append(Box(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :])))
            if after > 0:
                start = (*offsets[:dim], common.ends[dim], *offsets[dim + 1 :])
                pieces.append(Box(start, (*sizes[:dim], after, *sizes[dim + 1 :])))
            offsets[dim], sizes[dim] = common.offsets[dim], common.sizes[dim]
        return tuple(pieces)

    def __str__(self) -> str:
        return (
            "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True)) + "]"
        )


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Divide `size` elements into `parts` parts; return (offset, size) of the part with this index.

    The parts are the same as those of `torch.chunk` and FSDP2. The last parts may be empty.
    """
    step = -(-size // parts)
    offset = min(index * step, size)
    return offset, min(step, size - offset)
