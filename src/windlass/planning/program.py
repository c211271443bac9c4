"""Turn a symbolic plan into programs: per link, the ops that one rank reads, packs, writes or hashes.

A `BoundOp` is one row of the plan as plain Python integers. The contiguous runs of a link's DIRECT
ops are one table, expanded by numpy. Addresses are added when an update runs, because trainers may
rebind storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from windlass.errors import UnsupportedLayout
from windlass.layout.columns import Columns, Int32Array, Int64Array, column
from windlass.layout.dtypes import DType
from windlass.layout.manifest import contiguous_strides
from windlass.layout.quantization import scale_shape
from windlass.planning.plan import (
    DTYPES,
    ITEMSIZES,
    CopyMode,
    Link,
    OpTable,
    TransferPlan,
    Transform,
)


class DigestKind(StrEnum):
    """Algorithm of a link's digest. Both ends of a link must use the same algorithm.

    XXH3: xxh3_128 of the payload, in host memory.

    POSITION: a sum over words that depends on their position, on GPUs (`memory/cuda/put.cu`).
    `tests/support/position_digest.py` is a reference in Python.
    """

    XXH3 = "xxh3_128"
    POSITION = "position"


_MODES, _TRANSFORMS = tuple(CopyMode), tuple(Transform)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOp:
    """One copy op. Sizes are in elements, offsets and strides in bytes, as in `OpTable`.

    `sizes` are the sizes of the payload. `src_sizes` are the sizes that are read; they differ if
    `transform` computes scales. `tensor` is the checkpoint name, for error messages.
    """

    mode: CopyMode
    src_parameter: int
    dst_parameter: int
    sizes: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    src_dtype: DType
    dst_offset: int
    dst_strides: tuple[int, ...]
    dst_dtype: DType
    nbytes: int
    staging_offset: int
    src_sizes: tuple[int, ...]
    transform: Transform = Transform.NONE
    tensor: str = ""

    @property
    def lands(self) -> bool:
        """True if the payload goes to staging memory instead of the parameter."""
        return self.staging_offset >= 0

    @property
    def src_extent_nbytes(self) -> int:
        """Size of the range from the first to the last byte that the op reads in the source parameter."""
        reach = sum((n - 1) * s for n, s in zip(self.src_sizes, self.src_strides, strict=True))
        return reach + self.src_dtype.itemsize

    @property
    def dst_extent_nbytes(self) -> int:
        """Size of the range from the first to the last byte that the op writes in the destination parameter."""
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.dst_strides, strict=True))
        return reach + self.dst_dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """True if the bytes are sent from the source parameter itself, without packing."""
        return self.mode is CopyMode.DIRECT

    @property
    def cast_dtype(self) -> DType:
        """Dtype to which the source casts elements: bfloat16 before quantising, otherwise the destination's dtype."""
        return self.dst_dtype if self.transform is Transform.NONE else DType.BFLOAT16

    @property
    def packed_strides(self) -> tuple[int, ...]:
        """Byte strides of the packed payload, which is row-major in the destination dtype."""
        return contiguous_strides(self.sizes, self.dst_dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectRuns(Columns):
    """Contiguous runs that are sent unpacked; offsets in bytes from the starts of the parameters.

    Attributes:
        src_parameter, src_offset, dst_parameter, dst_offset, nbytes: (n,) each, in plan order.
        op: (n,) index of the run's op in `LinkProgram.ops`.
    """

    src_parameter: Int32Array = column("<i4")
    src_offset: Int64Array = column("<i8")
    dst_parameter: Int32Array = column("<i4")
    dst_offset: Int64Array = column("<i8")
    nbytes: Int64Array = column("<i8")
    op: Int64Array = column("<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProgram:
    """All ops of one link.

    Attributes:
        peer: worker at the other end of the link.
        ops: ops in plan order, which is also the order of the link's digest.
        direct: contiguous runs of the DIRECT ops.
        nbytes: bytes of the payload.
    """

    peer: str
    ops: tuple[BoundOp, ...]
    direct: DirectRuns
    nbytes: int


def bind_links(plan: TransferPlan, *, sending: bool) -> tuple[LinkProgram, ...]:
    """Turn a rank's part of the plan into programs, one per link.

    Args:
        plan: part of the plan, see `TransferPlan.parts`.
        sending: True if this rank is the source of the links, False if it is the destination.

    Raises:
        UnsupportedLayout: a stride is negative or not a multiple of the item size.
    """
    _check_strides(plan)
    return tuple(
        LinkProgram(
            peer=plan.destinations[link.dst] if sending else plan.sources[link.src],
            ops=tuple(_bind_ops(plan, link)),
            direct=_direct_runs(plan.ops, link),
            nbytes=int(plan.ops.nbytes[link.start : link.stop].sum()),
        )
        for link in plan.links()
    )


def _check_strides(plan: TransferPlan) -> None:
    """Raise UnsupportedLayout if a stride is negative or not a multiple of the item size."""
    ops = plan.ops
    for strides, dtype in ((ops.src_strides, ops.src_dtype), (ops.dst_strides, ops.dst_dtype)):
        wrong = ((strides % ITEMSIZES[dtype][:, None] != 0) | (strides < 0)).any(axis=1)
        if wrong.any():
            row = int(wrong.argmax())
            raise UnsupportedLayout(
                f"connect: tensor {plan.tensors[int(ops.tensor[row])]!r}: strides must be multiples "
                f"of the item size and >= 0, got {strides[row].tolist()} bytes"
            )


def _bind_ops(plan: TransferPlan, link: Link) -> Iterator[BoundOp]:
    """Yield the ops of a link.

    First convert whole columns to lists, because reading single values from numpy arrays is slow. A link of a mixture
    of experts has about 10,000 ops.
    """
    ops, rows = plan.ops, slice(link.start, link.stop)
    integers = zip(
        ops.tensor[rows].tolist(),
        ops.mode[rows].tolist(),
        ops.transform[rows].tolist(),
        ops.src_parameter[rows].tolist(),
        ops.dst_parameter[rows].tolist(),
        ops.src_dtype[rows].tolist(),
        ops.dst_dtype[rows].tolist(),
        ops.src_offset[rows].tolist(),
        ops.dst_offset[rows].tolist(),
        ops.nbytes[rows].tolist(),
        ops.staging_offset[rows].tolist(),
        strict=True,
    )
    of_dims = zip(
        ops.sizes[rows].tolist(),
        ops.src_strides[rows].tolist(),
        ops.dst_strides[rows].tolist(),
        strict=True,
    )
    for numbers, (sizes, src_strides, dst_strides) in zip(integers, of_dims, strict=True):
        tensor, mode, kind, src_parameter, dst_parameter, src_dtype, dst_dtype, *rest = numbers
        src_offset, dst_offset, nbytes, staging_offset = rest
        keep = [dim for dim, size in enumerate(sizes) if size != 1] or [len(sizes) - 1]
        transform = _TRANSFORMS[kind]
        if transform is not Transform.NONE:
            keep = [len(sizes) - 2, len(sizes) - 1]
        src_sizes = tuple([sizes[dim] for dim in keep])
        if transform is Transform.FP8_BLOCK_SCALES:
            sizes[-2:] = scale_shape(src_sizes)
        yield BoundOp(
            mode=_MODES[mode],
            src_parameter=src_parameter,
            dst_parameter=dst_parameter,
            sizes=tuple([sizes[dim] for dim in keep]),
            src_offset=src_offset,
            src_strides=tuple([src_strides[dim] for dim in keep]),
            src_dtype=DTYPES[src_dtype],
            dst_offset=dst_offset,
            dst_strides=tuple([dst_strides[dim] for dim in keep]),
            dst_dtype=DTYPES[dst_dtype],
            nbytes=nbytes,
            staging_offset=staging_offset,
            src_sizes=src_sizes,
            transform=transform,
            tensor=plan.tensors[tensor],
        )


def _direct_runs(ops: OpTable, link: Link) -> DirectRuns:
    """Return the contiguous runs of a link's DIRECT ops, in plan order."""
    rows = np.arange(link.start, link.stop)
    rows = rows[ops.mode[rows] == CopyMode.DIRECT]
    single = rows[ops.run_nbytes[rows] == ops.nbytes[rows]]
    tables = [_runs(ops, link, single, np.zeros((1, 2), np.int64))]
    for row in rows[ops.run_nbytes[rows] != ops.nbytes[rows]]:
        itemsize = int(ITEMSIZES[ops.dst_dtype[row]])
        offsets = _run_offsets(
            ops.sizes[row],
            ops.src_strides[row],
            ops.dst_strides[row],
            int(ops.run_nbytes[row]) // itemsize,
        )
        tables.append(_runs(ops, link, np.full(len(offsets), row), offsets))
    runs = DirectRuns.join(tables)
    return runs.select(np.argsort(runs.op, kind="stable"))


def _runs(ops: OpTable, link: Link, rows: Int64Array, offsets: Int64Array) -> DirectRuns:
    """Return one run for each entry of `rows`, which may contain a row of the plan several times.

    `offsets`, (n, 2), has two byte offsets per run, at the source and at the destination, counted from the first element
    of the run's op. If `offsets` has one row, it is for all runs.
    """
    return DirectRuns(
        src_parameter=ops.src_parameter[rows],
        src_offset=ops.src_offset[rows] + offsets[:, 0],
        dst_parameter=ops.dst_parameter[rows],
        dst_offset=ops.dst_offset[rows] + offsets[:, 1],
        nbytes=ops.run_nbytes[rows],
        op=rows - link.start,
    )


def _run_offsets(
    sizes: Int64Array,
    src_strides: Int64Array,
    dst_strides: Int64Array,
    run_numel: int,
) -> Int64Array:
    """Return the byte offsets of all contiguous runs of an op, (num_runs, 2): one at the source, one at the destination.

    Offsets count from the op's first element. A run has `run_numel` elements.
    """
    inner, num_outer = 1, len(sizes)
    while num_outer and inner < run_numel:
        num_outer -= 1
        inner *= int(sizes[num_outer])
    offsets = np.zeros((1, 2), np.int64)
    for dim in range(num_outer):
        steps = np.arange(sizes[dim])[:, None] * np.array([src_strides[dim], dst_strides[dim]])
        offsets = (offsets[:, None, :] + steps[None, :, :]).reshape(-1, 2)
    return offsets
