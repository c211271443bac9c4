"""Ops of one link that are adjacent on both sides become one op.

Stacked experts and fused projections that both sides fuse alike travel as one long run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from windlass.planning.plan import CopyMode, OpTable, Reason

__all__ = ["coalesce"]


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
