"""Buckets: which bytes of a source's parameters travel in which broadcast, and what is read of them.

A bucket carries raw parameter bytes, each of them once, however many engines need it; every
receiver takes its boxes out with the ops of its own plan part. Bytes that no engine needs
do not travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec
import xxhash

from windlass.errors import PlanError, UnsupportedLayout
from windlass.layout.manifest import ShardManifest
from windlass.memory.ops import aligned
from windlass.planning.program import BoundOp, LinkProgram
from windlass.transfer.bindings import BucketPart, GroupOffer
from windlass.transfer.destination import joined_ranges

__all__ = ["Load", "clip", "cut_buckets", "loads_of", "signature_of_offer"]


@dataclass(frozen=True, slots=True)
class Load:
    """An op, or a part of one, whose source bytes lie in one bucket.

    `base` is where byte 0 of the source parameter would lie, relative to the bucket.
    """

    op: BoundOp
    base: int


def cut_buckets(
    manifest: ShardManifest, programs: Iterable[LinkProgram], capacity_nbytes: int
) -> tuple[tuple[BucketPart, ...], tuple[int, ...]]:
    """The parts in order, and the bytes of every bucket.

    Args:
        manifest: of the source.
        programs: its links.
        capacity_nbytes: of one bucket, a multiple of `ALIGNMENT`.
    """
    parts: list[BucketPart] = []
    sizes: list[int] = []
    used = capacity_nbytes
    for parameter, start, stop in _needed(programs):
        spec = manifest.parameters[parameter]
        at = start
        while at < stop:
            if used >= capacity_nbytes:
                sizes.append(0)
                used = 0
            end = min(stop, at + capacity_nbytes - used)
            parts.append(
                BucketPart(
                    spec.name,
                    spec.dtype.value,
                    spec.nbytes,
                    parameter,
                    at,
                    end,
                    len(sizes) - 1,
                    used,
                )
            )
            sizes[-1] = used + end - at
            used += aligned(end - at)
            at = end
    return tuple(parts), tuple(sizes)


def loads_of(program: LinkProgram, offer: GroupOffer) -> tuple[tuple[Load, ...], ...]:
    """What a receiver takes out of each bucket.

    Raises:
        PlanError: the buckets do not carry every byte that the ops read, in the ops' dtype.
    """
    by_parameter: dict[int, list[BucketPart]] = {}
    for part in offer.parts:
        by_parameter.setdefault(part.parameter, []).append(part)
    loads: list[list[Load]] = [[] for _ in offer.bucket_nbytes]
    for op in program.ops:
        numel = 0
        for part in by_parameter.get(op.src_parameter, ()):
            if part.dtype != op.src_dtype.value:
                raise PlanError(
                    f"group {offer.name}: dtype of {part.name!r} must be {op.src_dtype}, got {part.dtype}"
                )
            for piece in clip(op, part.start, part.stop):
                loads[part.bucket].append(Load(piece, part.offset - part.start))
                numel += math.prod(piece.sizes)
        if numel != math.prod(op.sizes):
            raise PlanError(
                f"group {offer.name}: the buckets carry {numel} of {math.prod(op.sizes)} elements that "
                f"are read of parameter {op.src_parameter} at byte {op.src_offset}"
            )
    return tuple(tuple(of_bucket) for of_bucket in loads)


def clip(op: BoundOp, start: int, stop: int) -> Iterator[BoundOp]:
    """The parts of an op whose source bytes lie in [start, stop) of its parameter.

    Both bounds are multiples of the item size away from every element, so that no element is cut.
    """
    reach = op.src_extent_nbytes
    first, last = op.src_offset, op.src_offset + reach
    if last <= start or first >= stop:
        return
    if start <= first and last <= stop:
        yield op
        return
    dim = max(range(len(op.sizes)), key=lambda d: op.src_strides[d] if op.sizes[d] > 1 else -1)
    size, stride = op.sizes[dim], op.src_strides[dim]
    if size == 1 or stride <= 0:
        raise UnsupportedLayout(
            f"xccl: an element at byte {first} is cut by a bucket at {start} or {stop}"
        )
    inner = reach - (size - 1) * stride
    whole_from = max(-(-(start - first) // stride), 0)
    whole_to = min((stop - inner - first) // stride, size - 1)
    touched_from = max((start - inner - first) // stride + 1, 0)
    touched_to = min(-(-(stop - first) // stride) - 1, size - 1)
    if whole_from <= whole_to:
        yield _narrow(op, dim, whole_from, whole_to - whole_from + 1)
    for index in range(touched_from, touched_to + 1):
        if not whole_from <= index <= whole_to:
            yield from clip(_narrow(op, dim, index, 1), start, stop)


def signature_of_offer(offer: GroupOffer, source_digest: str, plan: str) -> str:
    """What all members of a group must agree on before its first collective.

    Covers members, names, dtypes, sizes, order and cuts; and, from the rank's own plan part
    rather than from the offer, the source's layout and the plan's tables.
    """
    digest = xxhash.xxh3_128(msgspec.msgpack.encode(offer))
    digest.update(f"{source_digest} {plan}".encode())
    return digest.hexdigest()


def _needed(programs: Iterable[LinkProgram]) -> list[tuple[int, int, int]]:
    """(parameter, start, stop) of bytes that some link reads: sorted, disjoint, joined."""
    return joined_ranges(
        (op.src_parameter, op.src_offset, op.src_offset + op.src_extent_nbytes)
        for program in programs
        for op in program.ops
    )


def _narrow(op: BoundOp, dim: int, index: int, count: int) -> BoundOp:
    sizes = (*op.sizes[:dim], count, *op.sizes[dim + 1 :])
    return replace(
        op,
        sizes=sizes,
        src_sizes=sizes,
        src_offset=op.src_offset + index * op.src_strides[dim],
        dst_offset=op.dst_offset + index * op.dst_strides[dim],
        nbytes=math.prod(sizes) * op.dst_dtype.itemsize,
    )
