"""Ops cut into blocks of rows: what a device kernel stores piece by piece, at both ends alike.

Both ends of a link cut the same ops in the same way, so their digests agree. Nothing is packed and
nothing lands beside its place, whatever the op's mode says: a kernel stores strided and casts on
the way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from windlass.errors import UnsupportedLayout
from windlass.execution.bind import BoundOp, LinkProgram
from windlass.layout.dtypes import DType
from windlass.planning.plan import Transform
from windlass.transports.cuda.kernels import PIECE

__all__ = ["block_tables"]

MAX_PIECE_NBYTES = 64 << 10
UInt64Array = npt.NDArray[np.uint64]
Pieces = npt.NDArray[np.void]


def block_tables(
    program: LinkProgram, sources: UInt64Array, targets: UInt64Array
) -> dict[tuple[DType, DType], Pieces]:
    """The pieces of a link by (source dtype, destination dtype).

    Args:
        program: of the link.
        sources: (num_parameters,) where the source's parameters begin; zeros at the destination.
        targets: (num_parameters,) where the destination's begin, as the kernel reaches them.

    Returns:
        `PIECE` arrays. Positions count the link's payload from 0.

    Raises:
        UnsupportedLayout: an op that quantises.
    """
    found: dict[tuple[DType, DType], list[Pieces]] = {}
    position = 0
    for op in program.ops:
        if op.transform is not Transform.NONE:
            raise UnsupportedLayout(f"cuda: no kernel for transform {op.transform.name} yet")
        pieces = _cut(op, position)
        pieces["src"] += sources[op.src_parameter] if len(sources) else np.uint64(0)
        pieces["dst"] += targets[op.dst_parameter]
        found.setdefault((op.src_dtype, op.dst_dtype), []).append(pieces)
        position += op.nbytes
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _cut(op: BoundOp, position: int) -> Pieces:
    """All pieces of one op, relative to the parameters' starts."""
    sizes, src, dst = list(op.sizes), list(op.src_strides), list(op.dst_strides)
    itemsize = op.dst_dtype.itemsize
    run = 1
    while sizes and src[-1] == run * op.src_dtype.itemsize and dst[-1] == run * itemsize:
        run *= sizes.pop()
        src.pop()
        dst.pop()
    rows, src_pitch, dst_pitch = (sizes.pop(), src.pop(), dst.pop()) if sizes else (1, 0, 0)
    run_nbytes = run * itemsize
    rows_at_once = max(MAX_PIECE_NBYTES // run_nbytes, 1)
    elems_at_once = min(run, MAX_PIECE_NBYTES // itemsize)
    row_starts = np.arange(0, rows, rows_at_once)
    col_starts = np.arange(0, run, elems_at_once)
    outer = np.array([(0, 0)], np.int64)
    for size, s, d in zip(sizes, src, dst, strict=True):
        steps = np.arange(size)[:, None] * np.array([s, d])
        outer = (outer[:, None, :] + steps[None, :, :]).reshape(-1, 2)
    shape = (len(outer), len(row_starts), len(col_starts))
    pieces = np.zeros(shape, PIECE)
    row, col = row_starts[None, :, None], col_starts[None, None, :]
    pieces["src"] = (
        op.src_offset + outer[:, 0][:, None, None] + row * src_pitch + col * op.src_dtype.itemsize
    )
    pieces["dst"] = op.dst_offset + outer[:, 1][:, None, None] + row * dst_pitch + col * itemsize
    payload = np.arange(len(outer))[:, None, None] * (rows * run_nbytes)
    pieces["pos"] = position + payload + row * run_nbytes + col * itemsize
    pieces["src_pitch"], pieces["dst_pitch"] = src_pitch, dst_pitch
    pieces["pos_pitch"] = run_nbytes
    pieces["rows"] = np.minimum(rows - row, rows_at_once)
    pieces["row_elems"] = np.minimum(run - col, elems_at_once)
    return pieces.reshape(-1)
