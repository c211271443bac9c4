"""TransferPlan: which bytes go where, symbolically. The hand-off from planning to execution.

A plan names ranks, parameters, byte offsets and strides, never an address, so it has a
digest that every rank can confirm before any memory is touched. It is columnar (numpy),
sorted by (source, destination), so that one rank's work is one slice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from windlass.errors import DECODE_ERRORS, ProtocolError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import MAX_DIMS

__all__ = [
    "DTYPES",
    "ITEMSIZES",
    "PLAN_SCHEMA_VERSION",
    "CopyMode",
    "Link",
    "OpTable",
    "Reason",
    "TransferPlan",
    "Transform",
]

PLAN_SCHEMA_VERSION = 3

DTYPES = tuple(DType)
"""`OpTable.src_dtype` and `dst_dtype` are indices into this tuple."""
ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], np.int64)
"""Bytes per element, by the same indices."""


class CopyMode(IntEnum):
    """How the bytes of one op travel.

    DIRECT: straight from the source parameter to the destination parameter, in
    `num_runs` contiguous runs (one when both sides are contiguous); zero copy.
    PACKED: the source packs (gathers, casts) into its arena; one contiguous write.
    SCATTER: packed where needed, written into the destination's landing region, unpacked there.
    A payload in a landing region is row-major over `sizes`.
    """

    DIRECT = 0
    PACKED = 1
    SCATTER = 2


class Reason(IntEnum):
    """Why an op has its mode."""

    CONTIGUOUS = 0
    LONG_RUNS = 1
    SOURCE_STRIDED = 2
    CAST = 3
    DESTINATION_STRIDED = 4
    QUANTIZED = 5


class Transform(IntEnum):
    """What the source computes while it packs; see `layout.quantization`.

    Ops that transform have two dims of source elements, made of whole blocks, never collapsed.
    """

    NONE = 0
    FP8_BLOCK_VALUES = 1
    FP8_BLOCK_SCALES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Columns of `num_ops` rows, sorted by (src, dst).

    The element with multi-index i of the op's `sizes` is read at
    `src_offset + sum(i * src_strides)` of the source parameter and written at
    `dst_offset + sum(i * dst_strides)` of the destination parameter. Dims are collapsed
    (no size-1 dim, no two dims that are one on both sides) and left-padded with size 1.
    Dims are ordered so that, where possible, the destination is row-major.

    Attributes:
        src: (n,) index into `TransferPlan.sources`.
        dst: (n,) index into `TransferPlan.destinations`.
        tensor: (n,) index into `TransferPlan.tensors`, the destination's name; the first one
            where adjacent copies were joined.
        src_parameter: (n,) index into the source manifest's parameters.
        dst_parameter: (n,) index into the destination manifest's parameters.
        mode: (n,) `CopyMode`.
        reason: (n,) `Reason`.
        src_dtype: (n,) index into `DTYPES`.
        dst_dtype: (n,) index into `DTYPES`; differs from `src_dtype` when the op casts.
        transform: (n,) `Transform`.
        sizes: (n, MAX_DIMS) elements; of the source, where scales are computed from them.
        src_offset: (n,) bytes. src_strides: (n, MAX_DIMS) bytes.
        dst_offset: (n,) bytes. dst_strides: (n, MAX_DIMS) bytes.
        run_nbytes: (n,) destination bytes of one contiguous run on both sides (DIRECT), else `nbytes`.
        nbytes: (n,) bytes that travel: numel * destination itemsize, or the bytes of the scales.
        landing_offset: (n,) byte offset in the destination's landing region, -1 without one.
    """

    src: npt.NDArray[np.int32]
    dst: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    src_parameter: npt.NDArray[np.int32]
    dst_parameter: npt.NDArray[np.int32]
    mode: npt.NDArray[np.uint8]
    reason: npt.NDArray[np.uint8]
    src_dtype: npt.NDArray[np.uint8]
    dst_dtype: npt.NDArray[np.uint8]
    transform: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int64]
    src_offset: npt.NDArray[np.int64]
    src_strides: npt.NDArray[np.int64]
    dst_offset: npt.NDArray[np.int64]
    dst_strides: npt.NDArray[np.int64]
    run_nbytes: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    landing_offset: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def empty(cls, num_ops: int) -> OpTable:
        """Uninitialised columns, to be filled part by part: half the memory of joining parts."""
        columns = {
            f.name: np.empty(
                (num_ops, MAX_DIMS) if f.name in _WIDE_COLUMNS else num_ops,
                _DTYPE_OF_COLUMN.get(f.name, "<i8"),
            )
            for f in fields(cls)
        }
        return cls(**columns)

    def fill(self, first: int, part: OpTable) -> None:
        """Copy `part` into the rows from `first` on."""
        for field in fields(self):
            getattr(self, field.name)[first : first + len(part)] = getattr(part, field.name)

    def select(self, rows: slice | npt.NDArray[np.intp]) -> OpTable:
        """The given rows (a view for a slice)."""
        return OpTable(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """All ops from one source to one destination: rows [start, stop) of the plan."""

    src: int
    dst: int
    start: int
    stop: int


class _Payload(msgspec.Struct, frozen=True):
    schema_version: int
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    tensors: tuple[str, ...]
    source_digests: tuple[str, ...]
    destination_digests: tuple[str, ...]
    landing_nbytes: tuple[int, ...]
    num_ops: int
    columns: dict[str, bytes]


_DTYPE_OF_COLUMN = {
    "src": "<i4",
    "dst": "<i4",
    "tensor": "<i4",
    "src_parameter": "<i4",
    "dst_parameter": "<i4",
    "mode": "u1",
    "reason": "u1",
    "src_dtype": "u1",
    "dst_dtype": "u1",
    "transform": "u1",
}
_WIDE_COLUMNS = {"sizes", "src_strides", "dst_strides"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The compiled plan.

    Attributes:
        sources: worker names of the source ranks.
        destinations: worker names of the destination ranks.
        tensors: checkpoint names that ops refer to.
        source_digests: manifest digest per source; a changed layout invalidates the plan.
        destination_digests: manifest digest per destination.
        landing_nbytes: size of the landing region each destination must provide (0 for none).
        ops: the copy ops.
    """

    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    tensors: tuple[str, ...]
    source_digests: tuple[str, ...]
    destination_digests: tuple[str, ...]
    landing_nbytes: tuple[int, ...]
    ops: OpTable

    @property
    def nbytes(self) -> int:
        """Bytes that travel in one update, over all links."""
        return int(self.ops.nbytes.sum())

    @property
    def quantizes(self) -> bool:
        """Whether sources compute what they send; a backend that only copies must refuse."""
        return bool((self.ops.transform != Transform.NONE).any())

    def num_writes(self) -> int:
        """Contiguous one-sided writes in one update, before chunking by the transport."""
        return int((self.ops.nbytes // np.maximum(self.ops.run_nbytes, 1)).sum())

    def links(self) -> tuple[Link, ...]:
        """Every (source, destination) pair that exchanges bytes, in plan order."""
        if len(self.ops) == 0:
            return ()
        key = self.ops.src.astype(np.int64) * len(self.destinations) + self.ops.dst
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        stops = np.r_[starts[1:], len(key)]
        return tuple(
            Link(src=int(self.ops.src[a]), dst=int(self.ops.dst[a]), start=int(a), stop=int(b))
            for a, b in zip(starts, stops, strict=True)
        )

    def for_source(self, worker: str) -> TransferPlan:
        """The part of the plan that `worker` sends; same name tables, fewer rows."""
        return self._filtered(self.ops.src == self.sources.index(worker))

    def for_destination(self, worker: str) -> TransferPlan:
        """The part of the plan that `worker` receives; same name tables, fewer rows."""
        return self._filtered(self.ops.dst == self.destinations.index(worker))

    def for_destinations(self, workers: Collection[str]) -> TransferPlan:
        """The part of the plan that all of `workers` receive; same name tables, fewer rows."""
        wanted = [index for index, name in enumerate(self.destinations) if name in workers]
        return self._filtered(np.isin(self.ops.dst, wanted))

    def without_landing(self, links: Collection[tuple[str, str]]) -> TransferPlan:
        """The plan with every op of `links`, (source, destination), stored where it belongs.

        For links whose source stores with strides: nothing of them lands packed. A destination keeps
        its landing region for the other links, if there are any.
        """
        stored = np.zeros(len(self.ops), np.bool_)
        for link in self.links():
            if (self.sources[link.src], self.destinations[link.dst]) in links:
                stored[link.start : link.stop] = True
        offsets = np.where(stored, -1, self.ops.landing_offset)
        lands = set(self.ops.dst[offsets >= 0].tolist())
        landing_nbytes = tuple(
            nbytes if index in lands else 0 for index, nbytes in enumerate(self.landing_nbytes)
        )
        ops = replace(self.ops, landing_offset=offsets.astype(self.ops.landing_offset.dtype))
        return replace(self, landing_nbytes=landing_nbytes, ops=ops)

    def _filtered(self, mask: npt.NDArray[np.bool_]) -> TransferPlan:
        return TransferPlan(
            sources=self.sources,
            destinations=self.destinations,
            tensors=self.tensors,
            source_digests=self.source_digests,
            destination_digests=self.destination_digests,
            landing_nbytes=self.landing_nbytes,
            ops=self.ops.select(np.flatnonzero(mask)),
        )

    def encode(self) -> bytes:
        """The wire form (msgpack)."""
        columns = {
            f.name: np.ascontiguousarray(getattr(self.ops, f.name))
            .astype(_DTYPE_OF_COLUMN.get(f.name, "<i8"))
            .tobytes()
            for f in fields(OpTable)
        }
        return msgspec.msgpack.encode(
            _Payload(
                schema_version=PLAN_SCHEMA_VERSION,
                sources=self.sources,
                destinations=self.destinations,
                tensors=self.tensors,
                source_digests=self.source_digests,
                destination_digests=self.destination_digests,
                landing_nbytes=self.landing_nbytes,
                num_ops=len(self.ops),
                columns=columns,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> TransferPlan:
        """The inverse of `encode`.

        Raises:
            ProtocolError: not a plan, or of another schema version.
        """
        try:
            payload = msgspec.msgpack.decode(data, type=_Payload)
            columns: dict[str, npt.NDArray[np.generic]] = {}
            for field in fields(OpTable):
                column: npt.NDArray[np.generic] = np.frombuffer(
                    payload.columns[field.name], _DTYPE_OF_COLUMN.get(field.name, "<i8")
                )
                if field.name in _WIDE_COLUMNS:
                    column = column.reshape(-1, MAX_DIMS)
                if len(column) != payload.num_ops:
                    raise ProtocolError(f"plan: column {field.name} has {len(column)} rows")
                columns[field.name] = column
        except (*DECODE_ERRORS, KeyError, ValueError) as error:
            raise ProtocolError(f"plan: cannot be decoded: {error}") from error
        if payload.schema_version != PLAN_SCHEMA_VERSION:
            raise ProtocolError(
                f"plan: schema_version must be {PLAN_SCHEMA_VERSION}, got {payload.schema_version}"
            )
        return cls(
            sources=payload.sources,
            destinations=payload.destinations,
            tensors=payload.tensors,
            source_digests=payload.source_digests,
            destination_digests=payload.destination_digests,
            landing_nbytes=payload.landing_nbytes,
            ops=OpTable(**columns),  # type: ignore[arg-type]
        )

    def digest(self) -> str:
        """A hex digest that every rank confirms before memory is registered."""
        return xxhash.xxh3_128_hexdigest(self.encode())
