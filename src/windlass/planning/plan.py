"""TransferPlan: the symbolic result of planning, with the source and the destination of all bytes.

A plan contains ranks, parameters, byte offsets and strides, but no addresses, so it can be compiled before any rank
allocates memory. The plan is columnar (numpy) and sorted by (source, destination), so that one source's ops are one slice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import xxhash

from windlass.errors import DECODE_ERRORS, ProtocolError
from windlass.layout.columns import (
    Columns,
    Int32Array,
    Int64Array,
    UInt8Array,
    column,
    decode_tables,
    encode_tables,
)
from windlass.layout.dtypes import DType
from windlass.layout.manifest import MAX_DIMS, ShardManifest

PLAN_SCHEMA_VERSION = 5

DTYPES = tuple(DType)
"""`OpTable.src_dtype` and `dst_dtype` are indices into this tuple."""
ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], np.int64)
"""Bytes per element of each dtype in `DTYPES`."""


class CopyMode(IntEnum):
    """Way in which the bytes of one op are sent.

    DIRECT: straight from the source parameter to the destination parameter, in
    contiguous runs (one run if both sides are contiguous); zero copy.

    PACKED: the source packs (gathers, casts) into its arena; one contiguous write.

    SCATTER: packed if needed, written into the destination's staging memory, unpacked there.

    A payload in staging memory is row-major over `sizes`.
    """

    DIRECT = 0
    PACKED = 1
    SCATTER = 2


class Reason(IntEnum):
    """Reason why the planner chose the mode of an op."""

    CONTIGUOUS = 0
    LONG_RUNS = 1
    SOURCE_STRIDED = 2
    CAST = 3
    DESTINATION_STRIDED = 4
    QUANTIZED = 5


class Transform(IntEnum):
    """Computation that the source makes while it packs an op; see `layout.quantization`.

    The sizes of an op with a transform are the rows and columns of a matrix of source elements that
    consists of whole blocks. The planner never joins these two dims.
    """

    NONE = 0
    FP8_BLOCK_VALUES = 1
    FP8_BLOCK_SCALES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable(Columns):
    """Columns of `num_ops` rows, sorted by (src, dst).

    The element with multi-index i of the op's `sizes` is read at
    `src_offset + sum(i * src_strides)` of the source parameter and written at
    `dst_offset + sum(i * dst_strides)` of the destination parameter. Dims are collapsed (no size-1
    dim, no adjacent dims that are contiguous on both sides) and left-padded with size 1. Dims are
    ordered so that, where possible, the destination is row-major.

    Attributes:
        src: (n,) index into `TransferPlan.sources`.
        dst: (n,) index into `TransferPlan.destinations`.
        tensor: (n,) index into `TransferPlan.tensors`, the destination's name; the first name of a
            joined op.
        src_parameter: (n,) index into the source manifest's parameters.
        dst_parameter: (n,) index into the destination manifest's parameters.
        mode: (n,) `CopyMode`.
        reason: (n,) `Reason`.
        src_dtype: (n,) index into `DTYPES`.
        dst_dtype: (n,) index into `DTYPES`; differs from `src_dtype` when the op casts.
        transform: (n,) `Transform`.
        sizes: (n, MAX_DIMS) elements; if the op computes scales, sizes of the elements at the source.
        src_offset: (n,) bytes.
        src_strides: (n, MAX_DIMS) bytes.
        dst_offset: (n,) bytes.
        dst_strides: (n, MAX_DIMS) bytes.
        run_nbytes: (n,) destination bytes of one contiguous run on both sides (DIRECT), else
            `nbytes`.
        nbytes: (n,) bytes sent: numel * destination itemsize, or the bytes of the scales.
        staging_offset: (n,) byte offset in the destination's staging memory, -1 without one.
    """

    src: Int32Array = column("<i4")
    dst: Int32Array = column("<i4")
    tensor: Int32Array = column("<i4")
    src_parameter: Int32Array = column("<i4")
    dst_parameter: Int32Array = column("<i4")
    mode: UInt8Array = column("u1")
    reason: UInt8Array = column("u1")
    src_dtype: UInt8Array = column("u1")
    dst_dtype: UInt8Array = column("u1")
    transform: UInt8Array = column("u1")
    sizes: Int64Array = column("<i8", MAX_DIMS)
    src_offset: Int64Array = column("<i8")
    src_strides: Int64Array = column("<i8", MAX_DIMS)
    dst_offset: Int64Array = column("<i8")
    dst_strides: Int64Array = column("<i8", MAX_DIMS)
    run_nbytes: Int64Array = column("<i8")
    nbytes: Int64Array = column("<i8")
    staging_offset: Int64Array = column("<i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """All ops from one source to one destination: rows [start, stop) of the plan.

    `src` is an index into `TransferPlan.sources`, and `dst` an index into `TransferPlan.destinations`.
    """

    src: int
    dst: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The compiled plan.

    Attributes:
        sources: worker names of the source ranks.
        destinations: worker names of the destination ranks.
        tensors: checkpoint names that ops refer to.
        source_digests: manifest digest per source; a changed layout invalidates the plan.
        destination_digests: manifest digest per destination.
        staging_nbytes: size in bytes of the staging memory that each destination must allocate; 0 for none.
        ops: all ops, in plan order.
        schema_version: version of the wire form; every encoded plan contains it.
    """

    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    tensors: tuple[str, ...]
    source_digests: tuple[str, ...]
    destination_digests: tuple[str, ...]
    staging_nbytes: tuple[int, ...]
    ops: OpTable
    schema_version: int

    @property
    def nbytes(self) -> int:
        """Bytes sent in one update, over all links."""
        return int(self.ops.nbytes.sum())

    @property
    def quantizes(self) -> bool:
        """True if a source must quantise. A backend that only copies must refuse such a plan."""
        return bool((self.ops.transform != Transform.NONE).any())

    def links(self) -> tuple[Link, ...]:
        """Return every (source, destination) pair that exchanges bytes, in plan order."""
        if len(self.ops) == 0:
            return ()
        key = self.ops.src.astype(np.int64) * len(self.destinations) + self.ops.dst
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        stops = np.r_[starts[1:], len(key)]
        return tuple(
            Link(src=int(self.ops.src[a]), dst=int(self.ops.dst[a]), start=int(a), stop=int(b))
            for a, b in zip(starts, stops, strict=True)
        )

    def parts(self, *, sending: bool, all_names: bool) -> dict[str, TransferPlan]:
        """Divide the plan by source rank or by destination rank. A part contains the ops of one rank.

        Args:
            sending: True for one part per source, False for one part per destination.
            all_names: True if every part keeps the names of all ranks and tensors. The size of all parts together
                then grows with the square of the number of ranks. With False, a part has only the names that its
                ops use and the name of its rank.

        Returns:
            Worker name -> part.
        """
        workers = self.sources if sending else self.destinations
        index = self.ops.src if sending else self.ops.dst
        rows = np.argsort(index, kind="stable")
        bounds = np.searchsorted(index[rows], np.arange(len(workers) + 1)).tolist()
        found = {}
        for own, worker in enumerate(workers):
            part = replace(self, ops=self.ops.select(rows[bounds[own] : bounds[own + 1]]))
            found[worker] = part if all_names else part._with_own_names(own, sending=sending)
        return found

    def _with_own_names(self, own: int, *, sending: bool) -> TransferPlan:
        """Return this plan with only the names that its ops use, and the name of rank `own`.

        Call this on the plan part of this rank.
        """
        src, here = _renumbered(self.ops.src, own if sending else None)
        dst, there = _renumbered(self.ops.dst, None if sending else own)
        tensor, named = _renumbered(self.ops.tensor, None)
        return replace(
            self,
            sources=tuple(self.sources[i] for i in here),
            destinations=tuple(self.destinations[i] for i in there),
            tensors=tuple(self.tensors[i] for i in named),
            source_digests=tuple(self.source_digests[i] for i in here),
            destination_digests=tuple(self.destination_digests[i] for i in there),
            staging_nbytes=tuple(self.staging_nbytes[i] for i in there),
            ops=replace(self.ops, src=src, dst=dst, tensor=tensor),
        )

    def without_staging(self, links: Collection[tuple[str, str]]) -> TransferPlan:
        """Return the plan without staging on `links`: their ops write each element directly into the parameter.

        `links` are (source, destination) pairs. Each of these sources must be able to write strided elements (the trait
        `strided_stores`). A destination keeps its staging memory if a link outside `links` needs this memory.
        """
        stored = np.zeros(len(self.ops), np.bool_)
        for link in self.links():
            if (self.sources[link.src], self.destinations[link.dst]) in links:
                stored[link.start : link.stop] = True
        offsets = np.where(stored, -1, self.ops.staging_offset)
        lands = set(self.ops.dst[offsets >= 0].tolist())
        staging_nbytes = tuple(
            nbytes if index in lands else 0 for index, nbytes in enumerate(self.staging_nbytes)
        )
        ops = replace(self.ops, staging_offset=offsets.astype(self.ops.staging_offset.dtype))
        return replace(self, staging_nbytes=staging_nbytes, ops=ops)

    def for_replica(self, leader: str, copy: ShardManifest) -> TransferPlan:
        """Return this plan part of the destination `leader` as the plan part of another rank with the same layout.

        `copy` is the manifest of the other rank.
        """
        index = self.destinations.index(leader)
        return replace(
            self,
            destinations=(copy.worker,),
            destination_digests=(copy.digest(),),
            staging_nbytes=(self.staging_nbytes[index],),
            ops=replace(self.ops, dst=np.zeros(len(self.ops), np.int32)),
        )

    def encode(self) -> bytes:
        """Return the wire form (msgpack)."""
        return encode_tables(self)

    @classmethod
    def decode(cls, data: bytes) -> TransferPlan:
        """Decode a plan from its wire form.

        Raises:
            ProtocolError: `data` is not a plan, or has another schema version.
        """
        try:
            plan = decode_tables(data, cls)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"plan: cannot be decoded: {error}") from error
        if plan.schema_version != PLAN_SCHEMA_VERSION:
            raise ProtocolError(
                f"plan: schema_version must be {PLAN_SCHEMA_VERSION}, got {plan.schema_version}"
            )
        return plan

    def digest(self) -> str:
        """Return a hex digest of the wire form. An engine's answer to the controller names the plan by this digest."""
        return xxhash.xxh3_128_hexdigest(self.encode())


def _renumbered(index: Int32Array, own: int | None) -> tuple[Int32Array, list[int]]:
    """Replace the distinct values of `index` by numbers from 0, in ascending order.

    `own`, if given, also gets a number, even if `index` does not contain it.

    Returns:
        The renumbered `index`, and for each new number the old value.
    """
    used = np.unique(index if own is None else np.append(index, own))
    return np.searchsorted(used, index).astype(np.int32), used.tolist()
