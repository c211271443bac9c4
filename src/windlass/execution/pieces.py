"""Pieces of a link: what goes into one transport call, and ops cut to fit an arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from windlass.execution.bind import BoundOp, DirectRuns, LinkProgram
from windlass.memory.packing import row_major_blocks

__all__ = [
    "ALIGNMENT",
    "Pieces",
    "aligned",
    "batches",
    "direct_pieces",
    "packed_capacity",
    "split_op",
]

ALIGNMENT = 64
"""Of packed payloads in an arena, bytes."""
WRITE_PIECES = 4096
"""Pieces per transport call: bounds a call, not its bytes."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Writes of one link: (n,) local address, remote address, bytes."""

    local: UInt64Array
    remote: UInt64Array
    nbytes: UInt64Array


def aligned(nbytes: int) -> int:
    """Bytes that a payload takes up in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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


def split_op(op: BoundOp, limit: int) -> Iterator[BoundOp]:
    """Cut an op whose payload is one run at the destination into parts of at most `limit` bytes.

    PACKED and landing ops are such by construction, so a part's bytes follow those of the part
    before.
    """
    if op.nbytes <= limit:
        yield op
        return
    itemsize = op.dst_dtype.itemsize
    packed = op.packed_strides
    for start, sizes in row_major_blocks(op.sizes, limit // itemsize):
        numel = 1
        for size in sizes:
            numel *= size
        offset = _dot(start, packed)
        yield replace(
            op,
            sizes=sizes,
            src_offset=op.src_offset + _dot(start, op.src_strides),
            dst_offset=op.dst_offset + _dot(start, op.dst_strides),
            nbytes=numel * itemsize,
            landing_offset=op.landing_offset + offset if op.lands else op.landing_offset,
        )


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))
