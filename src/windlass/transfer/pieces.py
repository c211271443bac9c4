"""Pieces of a link: what goes into one transport call, and ops cut to fit an arena."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from windlass.errors import PlanError
from windlass.layout.quantization import BLOCK, scale_shape
from windlass.memory.digest import hash_strided, new_digest
from windlass.memory.packing import copy_strided, row_major_blocks
from windlass.memory.quantize import pack_quantized
from windlass.planning.plan import Transform
from windlass.transfer.arena import ALIGNMENT, aligned
from windlass.transfer.bind import BoundOp, DirectRuns, LinkProgram

__all__ = [
    "Pieces",
    "batches",
    "direct_pieces",
    "hash_link",
    "least_half",
    "pack_op",
    "packed_capacity",
    "split_op",
]

SCRATCH_NBYTES = 1 << 20
"""For casting before hashing: small enough to stay in cache in between."""
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


def least_half(program: LinkProgram) -> int:
    """Bytes of half a ring that holds any part which `split_op` cannot cut."""
    rows_of_blocks = (
        min(op.nbytes, _row_of_blocks(op))
        for op in program.ops
        if op.transform is not Transform.NONE
    )
    return max((ALIGNMENT, *rows_of_blocks))


def _row_of_blocks(op: BoundOp) -> int:
    """Bytes of payload, which are not cut."""
    return op.packed_strides[0] * (1 if op.transform is Transform.FP8_BLOCK_SCALES else BLOCK)


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


def pack_op(op: BoundOp, src_parameter: int, address: int) -> None:
    """Gather, cast or quantise an op's payload.

    Args:
        op: a whole op or a part from `split_op`.
        src_parameter: where the source parameter lies.
        address: of the payload, `op.nbytes` of host memory.
    """
    if op.transform is not Transform.NONE:
        pack_quantized(
            transform=op.transform,
            sizes=op.src_sizes,
            src_address=src_parameter + op.src_offset,
            src_strides=op.src_strides,
            src_dtype=op.src_dtype,
            dst_address=address,
            tensor=op.tensor,
        )
        return
    copy_strided(
        sizes=op.sizes,
        src_address=src_parameter + op.src_offset,
        src_strides=op.src_strides,
        src_dtype=op.src_dtype,
        dst_address=address,
        dst_strides=op.packed_strides,
        dst_dtype=op.dst_dtype,
        tensor=op.tensor,
    )


def hash_link(program: LinkProgram, sources: UInt64Array) -> str:
    """Digest what a link is to deliver, from host memory as it is; nothing is packed. From any thread.

    Args:
        program: of the link.
        sources: where the parameters lie, in manifest order.
    """
    digest = new_digest()
    limit = max(SCRATCH_NBYTES, least_half(program))
    scratch: npt.NDArray[np.uint8] = np.empty(limit, np.uint8)
    for op in program.ops:
        parameter = int(sources[op.src_parameter])
        if op.transform is Transform.NONE and op.src_dtype is op.dst_dtype:
            hash_strided(
                digest,
                address=parameter + op.src_offset,
                sizes=op.sizes,
                strides_bytes=op.src_strides,
                dtype=op.src_dtype,
            )
            continue
        for part in split_op(op, limit):
            pack_op(part, parameter, int(scratch.ctypes.data))
            digest.update(scratch[: part.nbytes].data)
    return digest.hexdigest()


def split_op(op: BoundOp, limit: int) -> Iterator[BoundOp]:
    """Cut an op whose payload is one run at the destination into parts of at most `limit` bytes.

    PACKED and landing ops are such by construction, so a part's bytes follow those of the part
    before.
    """
    if op.nbytes <= limit:
        yield op
        return
    if op.transform is not Transform.NONE:
        yield from _split_blocks(op, limit)
        return
    itemsize = op.dst_dtype.itemsize
    packed = op.packed_strides
    for start, sizes in row_major_blocks(op.sizes, limit // itemsize):
        offset = _dot(start, packed)
        yield replace(
            op,
            sizes=sizes,
            src_sizes=sizes,
            src_offset=op.src_offset + _dot(start, op.src_strides),
            dst_offset=op.dst_offset + _dot(start, op.dst_strides),
            nbytes=math.prod(sizes) * itemsize,
            landing_offset=op.landing_offset + offset if op.lands else op.landing_offset,
        )


def _split_blocks(op: BoundOp, limit: int) -> Iterator[BoundOp]:
    """Rows of blocks; a payload of values or of scales is cut between them."""
    scales = op.transform is Transform.FP8_BLOCK_SCALES
    step = _row_of_blocks(op)
    if step > limit:
        raise PlanError(
            f"arena_nbytes: half of it must hold one row of blocks, {step} bytes, got {limit}"
        )
    num_steps = limit // step
    rows, columns = op.src_sizes
    for first in range(0, rows, num_steps * BLOCK):
        src_sizes = min(num_steps * BLOCK, rows - first), columns
        sizes = scale_shape(src_sizes) if scales else src_sizes
        start = first // BLOCK if scales else first
        offset = start * op.packed_strides[0]
        yield replace(
            op,
            sizes=sizes,
            src_sizes=src_sizes,
            src_offset=op.src_offset + first * op.src_strides[0],
            dst_offset=op.dst_offset + start * op.dst_strides[0],
            nbytes=sizes[0] * op.packed_strides[0],
            landing_offset=op.landing_offset + offset if op.lands else op.landing_offset,
        )


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))
