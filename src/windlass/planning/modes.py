"""From boxes to bytes: strides of each op, collapsed, and how its bytes travel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.layout.manifest import MAX_DIMS, Int64Array
from windlass.planning.plan import CopyMode, Reason

__all__ = ["Strided", "choose_modes", "collapse"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Collapsed geometry of n ops, dims left-padded with size 1 and stride 0.

    Attributes:
        sizes: (n, MAX_DIMS) elements.
        src_strides, dst_strides: (n, MAX_DIMS) bytes.
    """

    sizes: Int64Array
    src_strides: Int64Array
    dst_strides: Int64Array


def collapse(sizes: Int64Array, src_strides: Int64Array, dst_strides: Int64Array) -> Strided:
    """Order dims by destination stride and join those that are one dim on both sides."""
    unit = sizes == 1
    key = np.where(unit, np.iinfo(np.int64).max, np.abs(dst_strides))
    if not (key[:, :-1] >= key[:, 1:]).all():
        order = np.argsort(-key, axis=1, kind="stable")
        sizes = np.take_along_axis(sizes, order, axis=1)
        src_strides = np.take_along_axis(src_strides, order, axis=1)
        dst_strides = np.take_along_axis(dst_strides, order, axis=1)
        unit = sizes == 1
    inner = sizes[:, 1:]
    joins = (src_strides[:, :-1] == inner * src_strides[:, 1:]) & (
        dst_strides[:, :-1] == inner * dst_strides[:, 1:]
    )
    joins |= unit[:, :-1]
    num_rows = len(sizes)
    out_sizes = np.ones((num_rows, MAX_DIMS), np.int64)
    out_src = np.zeros((num_rows, MAX_DIMS), np.int64)
    out_dst = np.zeros((num_rows, MAX_DIMS), np.int64)
    rows = np.arange(num_rows)
    column = np.full(num_rows, MAX_DIMS - 1)
    for dim in range(MAX_DIMS - 1, -1, -1):
        if dim < MAX_DIMS - 1:
            column = column - ~joins[:, dim]
        opens = np.ones(num_rows, np.bool_) if dim == MAX_DIMS - 1 else ~joins[:, dim]
        out_sizes[rows, column] *= sizes[:, dim]
        out_src[rows[opens], column[opens]] = src_strides[opens, dim]
        out_dst[rows[opens], column[opens]] = dst_strides[opens, dim]
    flat = out_sizes == 1
    out_src[flat] = 0
    out_dst[flat] = 0
    return Strided(sizes=out_sizes, src_strides=out_src, dst_strides=out_dst)


def _is_row_major(sizes: Int64Array, strides: Int64Array, itemsize: Int64Array) -> BoolArray:
    expected = itemsize
    contiguous = np.ones(len(sizes), np.bool_)
    for dim in range(MAX_DIMS - 1, -1, -1):
        contiguous &= (sizes[:, dim] == 1) | (strides[:, dim] == expected)
        expected = expected * sizes[:, dim]
    return contiguous


def choose_modes(
    geometry: Strided,
    src_itemsize: Int64Array,
    dst_itemsize: Int64Array,
    casts: BoolArray,
    quantizes: BoolArray,
    direct_min_run_bytes: int,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Int64Array]:
    """Pick a mode per op.

    Args:
        geometry: of what travels.
        src_itemsize: (n,) bytes.
        dst_itemsize: (n,) bytes.
        casts: dtypes differ.
        quantizes: the source computes values or scales; counts as a cast.
        direct_min_run_bytes: see `PlanPolicy`.

    Returns:
        (mode, reason, run_nbytes), each (n,).
    """
    sizes = geometry.sizes
    nbytes = sizes.prod(axis=1) * dst_itemsize
    inner = sizes[:, -1]
    src_inner = (inner == 1) | (geometry.src_strides[:, -1] == src_itemsize)
    dst_inner = (inner == 1) | (geometry.dst_strides[:, -1] == dst_itemsize)
    run = np.where(src_inner & dst_inner, inner, 1) * dst_itemsize
    dst_whole = _is_row_major(sizes, geometry.dst_strides, dst_itemsize)
    casts = casts | quantizes
    # First match wins, in this order.
    rules: tuple[tuple[BoolArray, CopyMode, Reason], ...] = (
        (~casts & (run == nbytes), CopyMode.DIRECT, Reason.CONTIGUOUS),
        (~casts & (run >= direct_min_run_bytes), CopyMode.DIRECT, Reason.LONG_RUNS),
        (~dst_whole, CopyMode.SCATTER, Reason.DESTINATION_STRIDED),
        (quantizes, CopyMode.PACKED, Reason.QUANTIZED),
        (casts, CopyMode.PACKED, Reason.CAST),
    )
    masks = [rule[0] for rule in rules]
    mode = np.select(masks, [int(rule[1]) for rule in rules], int(CopyMode.PACKED))
    reason = np.select(masks, [int(rule[2]) for rule in rules], int(Reason.SOURCE_STRIDED))
    run_nbytes = np.where(mode == CopyMode.DIRECT, run, nbytes)
    return mode.astype(np.uint8), reason.astype(np.uint8), run_nbytes
