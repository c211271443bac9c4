"""From a symbolic plan to programs: what one rank reads, packs, writes or hashes, link by link.

A `BoundOp` is one row of the plan as plain Python integers. Nothing here knows an
address yet: bases are added when an update runs, because trainers may rebind storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from windlass.layout.dtypes import DType
from windlass.memory.packing import is_contiguous
from windlass.planning.plan import DTYPES, CopyMode, Link, TransferPlan

__all__ = ["BoundOp", "LinkProgram", "bind_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOp:
    """One copy op. Sizes in elements, offsets and strides in bytes, as in `OpTable`.

    Attributes:
        run_offsets: for DIRECT: (n, 2) source and destination offsets of every contiguous run.
        run_nbytes: bytes of one run.
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
    landing_offset: int
    run_nbytes: int
    run_offsets: npt.NDArray[np.int64]

    @property
    def lands(self) -> bool:
        """Whether the payload goes to the landing region instead of the parameter."""
        return self.landing_offset >= 0

    @property
    def is_direct(self) -> bool:
        """Whether source memory goes out as it lies."""
        return self.mode is CopyMode.DIRECT

    @property
    def packed_strides(self) -> tuple[int, ...]:
        """Byte strides of the payload: row-major, destination dtype."""
        strides: list[int] = []
        step = self.dst_dtype.itemsize
        for size in reversed(self.sizes):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProgram:
    """All ops of one link, in plan order.

    Attributes:
        peer: the worker at the other end.
        ops: in plan order, which is the order of the link's digest.
        nbytes: payload. packed_nbytes: the part of it that goes through the arena.
    """

    peer: str
    ops: tuple[BoundOp, ...]
    nbytes: int
    packed_nbytes: int


def bind_links(plan: TransferPlan, *, sending: bool) -> tuple[LinkProgram, ...]:
    """The links of a plan part, as programs.

    Args:
        plan: `TransferPlan.for_source` or `for_destination` of this rank.
        sending: whether this rank is the source of the links.
    """
    programs = []
    for link in plan.links():
        ops = tuple(_bind_op(plan, row) for row in range(link.start, link.stop))
        programs.append(
            LinkProgram(
                peer=_peer(plan, link, sending=sending),
                ops=ops,
                nbytes=sum(op.nbytes for op in ops),
                packed_nbytes=sum(op.nbytes for op in ops if not op.is_direct),
            )
        )
    return tuple(programs)


def _peer(plan: TransferPlan, link: Link, *, sending: bool) -> str:
    return plan.destinations[link.dst] if sending else plan.sources[link.src]


def _bind_op(plan: TransferPlan, row: int) -> BoundOp:
    ops = plan.ops
    sizes = ops.sizes[row]
    keep = np.flatnonzero(sizes != 1)
    keep = keep if len(keep) else np.array([len(sizes) - 1])
    sizes = sizes[keep]
    src_strides, dst_strides = ops.src_strides[row][keep], ops.dst_strides[row][keep]
    mode = CopyMode(int(ops.mode[row]))
    run_nbytes = int(ops.run_nbytes[row])
    nbytes = int(ops.nbytes[row])
    src_offset, dst_offset = int(ops.src_offset[row]), int(ops.dst_offset[row])
    runs = np.zeros((0, 2), np.int64)
    if mode is CopyMode.DIRECT:
        itemsize = DTYPES[int(ops.dst_dtype[row])].itemsize
        runs = _runs(sizes, src_strides, dst_strides, run_nbytes // itemsize)
        runs = runs + np.array([[src_offset, dst_offset]])
    return BoundOp(
        mode=mode,
        src_parameter=int(ops.src_parameter[row]),
        dst_parameter=int(ops.dst_parameter[row]),
        sizes=tuple(int(v) for v in sizes),
        src_offset=src_offset,
        src_strides=tuple(int(v) for v in src_strides),
        src_dtype=DTYPES[int(ops.src_dtype[row])],
        dst_offset=dst_offset,
        dst_strides=tuple(int(v) for v in dst_strides),
        dst_dtype=DTYPES[int(ops.dst_dtype[row])],
        nbytes=nbytes,
        landing_offset=int(ops.landing_offset[row]),
        run_nbytes=run_nbytes,
        run_offsets=runs,
    )


def _runs(
    sizes: npt.NDArray[np.int64],
    src_strides: npt.NDArray[np.int64],
    dst_strides: npt.NDArray[np.int64],
    run_numel: int,
) -> npt.NDArray[np.int64]:
    """Offsets of every run relative to the op's first element, row-major: (n, 2)."""
    inner, num_outer = 1, len(sizes)
    while num_outer and inner < run_numel:
        num_outer -= 1
        inner *= int(sizes[num_outer])
    offsets = np.zeros((1, 2), np.int64)
    for dim in range(num_outer):
        steps = np.arange(sizes[dim])[:, None] * np.array([src_strides[dim], dst_strides[dim]])
        offsets = (offsets[:, None, :] + steps[None, :, :]).reshape(-1, 2)
    return offsets


def payload_is_contiguous(op: BoundOp) -> bool:
    """Whether the destination bytes of an op are one run in payload order."""
    return is_contiguous(op.sizes, op.dst_strides, op.dst_dtype.itemsize)
