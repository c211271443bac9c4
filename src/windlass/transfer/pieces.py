"""Pieces of a link: what goes into one transport call, and ops cut to fit an arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.memory.ops import aligned
from windlass.planning.program import DirectRuns, LinkProgram

__all__ = [
    "Pieces",
    "batches",
    "direct_pieces",
    "packed_capacity",
]

WRITE_PIECES = 4096
"""Pieces per transport call: bounds a call, not its bytes."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Writes of one link: (n,) local address, remote address, bytes."""

    local: UInt64Array
    remote: UInt64Array
    nbytes: UInt64Array


def packed_capacity(programs: Sequence[LinkProgram]) -> int:
    """Bytes of arena that hold every packed payload at once."""
    return sum(aligned(op.nbytes) for p in programs for op in p.ops if not op.is_direct)


def batches(pieces: Pieces) -> Iterator[Pieces]:
    """The same pieces, at most `WRITE_PIECES` at a time."""
    for start in range(0, len(pieces.nbytes), WRITE_PIECES):
        part = slice(start, start + WRITE_PIECES)
        yield Pieces(pieces.local[part], pieces.remote[part], pieces.nbytes[part])


def direct_pieces(runs: DirectRuns, sources: UInt64Array, targets: UInt64Array) -> Pieces:
    """Runs with addresses, given where the parameters of both sides begin."""
    return Pieces(
        sources[runs.src_parameter] + runs.src_offset.astype(np.uint64),
        targets[runs.dst_parameter] + runs.dst_offset.astype(np.uint64),
        runs.nbytes.astype(np.uint64),
    )
