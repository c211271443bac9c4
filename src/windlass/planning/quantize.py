"""Quantised destinations in the planner: scales are planned in the coordinates of their weight.

A destination's scales have no tensor at the source; the source computes them from the weight. Their
boxes are widened to the elements that they scale, so that intersection, coverage and routing handle
them like boxes of the weight. Every op is checked to consist of whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from windlass.errors import UnsupportedLayout
from windlass.layout.columns import Int32Array, Int64Array, UInt8Array
from windlass.layout.dtypes import CAST_RULE, DType, cast_refusal
from windlass.layout.quantization import BLOCK, CAPABILITIES, Scheme
from windlass.planning.plan import DTYPES, Transform
from windlass.planning.rows import RowTable, TensorNames

_FLOAT8 = np.array([d in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2) for d in DTYPES], np.bool_)
_SOURCES = next(c.source_dtypes for c in CAPABILITIES if c.scheme is Scheme.FP8_BLOCK)
_IS_CAST = np.array([[not cast_refusal(have, want) for want in DTYPES] for have in DTYPES])
"""Table [source, destination]: True if the dtypes are equal or can be cast."""
_QUANTIZABLE = np.array([dtype in _SOURCES for dtype in DTYPES], np.bool_)


def widen_scales(dst: RowTable, names: TensorNames) -> RowTable:
    """Return `dst` with a new box for each row of scales: the box of the weight elements to which the scales apply.

    One scale applies to a block of `BLOCK` x `BLOCK` elements; blocks at the ends of the weight may be smaller.
    """
    rows = np.flatnonzero(dst.transform == Transform.FP8_BLOCK_SCALES)
    if not len(rows):
        return dst
    offsets, sizes = dst.offsets.copy(), dst.sizes.copy()
    shapes = np.array([names.shapes[index] for index in dst.tensor[rows].tolist()], np.int64)
    begin = offsets[rows, -2:] * BLOCK
    end = np.minimum((offsets[rows, -2:] + sizes[rows, -2:]) * BLOCK, shapes)
    offsets[rows, -2:] = begin
    sizes[rows, -2:] = end - begin
    return replace(dst, offsets=offsets, sizes=sizes)


def payload_sizes(sizes: Int64Array, transform: UInt8Array) -> Int64Array:
    """Return the sizes of each op's payload: the number of scales per dim if the op computes scales, otherwise `sizes`."""
    scales = transform == Transform.FP8_BLOCK_SCALES
    if not scales.any():
        return sizes
    found = sizes.copy()
    found[scales, -2:] = -(-found[scales, -2:] // BLOCK)
    return found


def split_units(units: Int64Array, transform: UInt8Array) -> Int64Array:
    """Return the number of slices into which each op may be cut along one dim.

    `units` is the number of elements along this dim. The cuts of an op that quantises must be between blocks.
    """
    return np.where(transform != Transform.NONE, -(-units // BLOCK), units)


def refuse_casts(
    src: RowTable, dst: RowTable, src_row: Int64Array, dst_row: Int64Array, names: TensorNames
) -> None:
    """Check that the source of each op can cast or quantise to the destination's dtype.

    Args:
        src: rows of all sources.
        dst: rows of all destinations.
        src_row: (n,) row of each op in `src`.
        dst_row: (n,) row of each op in `dst`.
        names: tensor names, for the message.

    Raises:
        UnsupportedLayout: an op needs a cast or a quantisation that does not exist, or a float8 destination declares
            no scales. The message names the tensor and both dtypes.
    """
    have, want, transform = src.dtype[src_row], dst.dtype[dst_row], dst.transform[dst_row]
    plain = transform == Transform.NONE
    for bad, rule in (
        (
            plain & (have != want) & _FLOAT8[want],
            "a float8 destination must be declared quantised, with its scales",
        ),
        (
            ~plain & ~_QUANTIZABLE[have],
            f"a source that is quantised must be {' or '.join(_SOURCES)}",
        ),
        (plain & ~_IS_CAST[have, want], CAST_RULE),
    ):
        if bad.any():
            op = int(bad.argmax())
            raise UnsupportedLayout(
                f"tensor {names.names[int(dst.name[dst_row[op]])]!r}: {rule}, got "
                f"{DTYPES[int(have[op])]} at the source and {DTYPES[int(want[op])]} at the destination"
            )


def refuse_cut_blocks(
    offsets: Int64Array,
    sizes: Int64Array,
    dst: RowTable,
    dst_row: Int64Array,
    src_rank: Int32Array,
    names: TensorNames,
    sources: Sequence[str],
) -> None:
    """Check that every quantising op consists of whole blocks, because a block has one scale.

    Args:
        offsets: (n, MAX_DIMS) first index of each op's box in the weight.
        sizes: (n, MAX_DIMS) sizes of each op's box.
        dst: rows of all destinations.
        dst_row: (n,) row of each op in `dst`.
        src_rank: (n,) source rank of each op.
        names: tensor names, for the message.
        sources: worker names of the source ranks.

    Raises:
        UnsupportedLayout: an op contains only a part of a block. The message names tensor, source and box.
    """
    ops = np.flatnonzero(dst.transform[dst_row] != Transform.NONE)
    if not len(ops):
        return
    shapes = np.array(
        [names.shapes[index] for index in dst.tensor[dst_row[ops]].tolist()], np.int64
    )
    begin, end = offsets[ops, -2:], offsets[ops, -2:] + sizes[ops, -2:]
    cut = ((begin % BLOCK != 0) | ((end % BLOCK != 0) & (end != shapes))).any(axis=1)
    if cut.any():
        at = int(cut.argmax())
        rows, columns = zip(begin[at].tolist(), end[at].tolist(), strict=True)
        raise UnsupportedLayout(
            f"tensor {names.names[int(dst.tensor[dst_row[ops[at]]])]!r}: blocks of {BLOCK} x {BLOCK} "
            f"must each be on one source and one destination, but {sources[int(src_rank[ops[at]])]} "
            f"would send [{rows[0]}:{rows[1]}, {columns[0]}:{columns[1]}] of shape {tuple(shapes[at].tolist())}"
        )
