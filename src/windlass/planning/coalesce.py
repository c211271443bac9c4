"""Op tables: made in one piece, and joined where neighbours are one copy.

Ops of one link that are adjacent on both sides join: stacked experts and fused projections that both sides fuse alike become one long run.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from windlass.layout.manifest import MAX_DIMS
from windlass.planning.plan import CopyMode, OpTable, Reason

__all__ = ["coalesce", "empty_ops", "fill_ops"]


_NARROW = {
    "src": np.int32,
    "dst": np.int32,
    "tensor": np.int32,
    "src_parameter": np.int32,
    "dst_parameter": np.int32,
    "mode": np.uint8,
    "reason": np.uint8,
    "src_dtype": np.uint8,
    "dst_dtype": np.uint8,
    "transform": np.uint8,
}
_WIDE = {"sizes", "src_strides", "dst_strides"}


def empty_ops(num_ops: int) -> OpTable:
    """Uninitialised columns, to be filled chunk by chunk: half the memory of joining chunks."""
    columns = {
        f.name: np.empty(
            (num_ops, MAX_DIMS) if f.name in _WIDE else num_ops, _NARROW.get(f.name, np.int64)
        )
        for f in fields(OpTable)
    }
    return OpTable(**columns)


def fill_ops(ops: OpTable, first: int, part: OpTable) -> None:
    """Copy `part` into rows `first` and on of `ops`."""
    for field in fields(OpTable):
        getattr(ops, field.name)[first : first + len(part)] = getattr(part, field.name)


def coalesce(ops: OpTable) -> OpTable:
    """Join contiguous direct ops that follow each other on both sides.

    Args:
        ops: sorted by (src, dst, src_parameter, dst_parameter, dst_offset).

    Returns:
        The same bytes in at most as many ops; a joined op keeps its first tensor's name.
    """
    if len(ops) < 2:
        return ops
    simple = (ops.mode == CopyMode.DIRECT) & (ops.reason == Reason.CONTIGUOUS)
    joins = simple[1:] & simple[:-1]
    for column in (ops.src, ops.dst, ops.src_parameter, ops.dst_parameter, ops.dst_dtype):
        joins &= column[1:] == column[:-1]
    joins &= ops.src_offset[1:] == ops.src_offset[:-1] + ops.nbytes[:-1]
    joins &= ops.dst_offset[1:] == ops.dst_offset[:-1] + ops.nbytes[:-1]
    if not joins.any():
        return ops
    first = np.flatnonzero(np.r_[True, ~joins])
    nbytes = np.add.reduceat(ops.nbytes, first)
    joined = ops.select(first)
    grown = nbytes != joined.nbytes
    itemsize = joined.nbytes // joined.sizes.prod(axis=1)
    sizes, run_nbytes = joined.sizes.copy(), joined.run_nbytes.copy()
    src_strides, dst_strides = joined.src_strides.copy(), joined.dst_strides.copy()
    sizes[grown, -1] = nbytes[grown] // itemsize[grown]
    src_strides[grown, -1] = dst_strides[grown, -1] = itemsize[grown]
    run_nbytes[grown] = nbytes[grown]
    return replace(
        joined,
        sizes=sizes,
        nbytes=nbytes,
        run_nbytes=run_nbytes,
        src_strides=src_strides,
        dst_strides=dst_strides,
    )
