"""ShardManifest: the boxes of checkpoint tensors that a rank holds, and their places in its parameters.

Trainers and engines describe their weights with this type, and the coordinator collects the
manifests for the planner. Because both sides use the same type, any manifest can be the source or
the destination of a plan.

A manifest is columnar: one row per shard in a `ShardTable` of numpy arrays, because a rank of a
trillion-parameter model holds tens of thousands of shards and a fleet holds a million. Boxes are
padded on the left to `MAX_DIMS` dims with offset 0, size 1 and stride 0, so padding does not change
the meaning of a row.

A shard may have any strides, so a manifest can describe transposed shards. It cannot describe a layout
that is not a box with strides, such as a block-wise shuffle. For such a layout, code that builds a
manifest raises `UnsupportedLayout`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import msgspec
import numpy as np
import xxhash

from windlass.errors import DECODE_ERRORS, ManifestError, ProtocolError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.columns import (
    Columns,
    Int32Array,
    Int64Array,
    column,
    decode_tables,
    encode_tables,
)
from windlass.layout.dtypes import DType
from windlass.layout.quantization import BLOCK, QuantizedTensor, scale_shape

MANIFEST_SCHEMA_VERSION = 4
MAX_DIMS = 5
"""Maximum number of dims of a tensor."""


class Role(StrEnum):
    """Side of a transfer that a manifest describes."""

    TRAINER = "trainer"
    ENGINE = "engine"


class TensorSpec(msgspec.Struct, frozen=True):
    """A global tensor under its checkpoint name.

    Attributes:
        name: the Hugging Face checkpoint name.
        shape: the global shape, without any padding that a framework adds.
    """

    name: str
    shape: tuple[int, ...]


class ParameterSpec(msgspec.Struct, frozen=True):
    """A local parameter: memory that contains shards.

    Attributes:
        name: the framework's own name, used in messages.
        nbytes: size of the memory; all bytes of its shards must be inside.
        dtype: element type in memory.
        padding_nbytes: bytes that belong to no tensor (a padded vocabulary); never written.
    """

    name: str
    nbytes: int
    dtype: DType
    padding_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One row of a manifest, in readable form.

    Attributes:
        tensor: checkpoint name.
        box: elements of the global tensor.
        parameter: name of the local parameter that contains the elements.
        offset_bytes: byte offset of the box's first element from the parameter's start.
        strides_bytes: byte stride per tensor dim.
    """

    tensor: str
    box: Box
    parameter: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable(Columns):
    """Columns of `num_shards` rows.

    Attributes:
        tensor: (n,) index into `ShardManifest.tensors`.
        parameter: (n,) index into `ShardManifest.parameters`.
        offsets: (n, MAX_DIMS) box offsets in elements, left-padded with 0.
        sizes: (n, MAX_DIMS) box sizes in elements, left-padded with 1.
        offset_bytes: (n,) offset of the box's first element from the parameter's start.
        strides_bytes: (n, MAX_DIMS), left-padded with 0.
    """

    tensor: Int32Array = column("<i4")
    parameter: Int32Array = column("<i4")
    offsets: Int64Array = column("<i8", MAX_DIMS)
    sizes: Int64Array = column("<i8", MAX_DIMS)
    offset_bytes: Int64Array = column("<i8")
    strides_bytes: Int64Array = column("<i8", MAX_DIMS)


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Complete description of one rank's weights.

    Attributes:
        worker: identity of the rank, unique in the fleet (`trainer/3`, `engine-a/0`).
        role: side that the rank is on.
        tensors: the global tensors that rows refer to.
        parameters: the local parameters that rows refer to.
        table: the shards.
        aliases: checkpoint name -> the tensor in `tensors` that shares its bytes (tied weights).
        quantized: weights that are held quantised, with their scales.
        schema_version: version of the wire form; every encoded manifest contains it.
    """

    worker: str
    role: Role
    tensors: tuple[TensorSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    table: ShardTable
    aliases: Mapping[str, str]
    quantized: tuple[QuantizedTensor, ...] = ()
    schema_version: int

    @property
    def nbytes(self) -> int:
        """Size of all shards in bytes, without padding."""
        itemsizes = np.array([p.dtype.itemsize for p in self.parameters], dtype=np.int64)
        numel = self.table.sizes.prod(axis=1)
        return int((numel * itemsizes[self.table.parameter]).sum()) if len(self.table) else 0

    def shards(self) -> Iterator[Shard]:
        """Yield each row of the table as a `Shard`. The planner uses the columns of the table instead, which is faster."""
        table = self.table
        for row in range(len(table)):
            spec = self.tensors[int(table.tensor[row])]
            lead = MAX_DIMS - len(spec.shape)
            yield Shard(
                tensor=spec.name,
                box=Box(
                    tuple(int(v) for v in table.offsets[row, lead:]),
                    tuple(int(v) for v in table.sizes[row, lead:]),
                ),
                parameter=self.parameters[int(table.parameter[row])].name,
                offset_bytes=int(table.offset_bytes[row]),
                strides_bytes=tuple(int(v) for v in table.strides_bytes[row, lead:]),
            )

    def rows(self) -> Iterator[tuple[str, int]]:
        """Yield, for each row of the table, the name of its checkpoint tensor and the index of its parameter."""
        table = self.table
        for tensor, parameter in zip(table.tensor.tolist(), table.parameter.tolist(), strict=True):
            yield self.tensors[tensor].name, parameter

    def encode(self) -> bytes:
        """Return the wire form (msgpack)."""
        return encode_tables(self)

    @classmethod
    def decode(cls, data: bytes) -> ShardManifest:
        """Decode a manifest, and check it like `ManifestBuilder.build`.

        Raises:
            ProtocolError: `data` is not a manifest, or has another schema version.
            ManifestError: the manifest contradicts itself.
            UnsupportedLayout: a tensor has more than `MAX_DIMS` dims.
        """
        try:
            manifest = decode_tables(data, cls)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"manifest: cannot be decoded: {error}") from error
        if manifest.schema_version != MANIFEST_SCHEMA_VERSION:
            raise ProtocolError(
                f"manifest of {manifest.worker}: schema_version must be {MANIFEST_SCHEMA_VERSION}, "
                f"got {manifest.schema_version}"
            )
        _check(manifest)
        return manifest

    def digest(self) -> str:
        """Return a hex digest of the wire form. Two manifests with the same digest are equal."""
        return self._digest

    def without(self, names: Collection[str]) -> ShardManifest:
        """Return the manifest without the shards and aliases of the tensors `names`.

        The attribute `tensors` still lists these tensors, so that the indices in `table` stay valid.
        """
        if not names:
            return self
        gone = [index for index, spec in enumerate(self.tensors) if spec.name in names]
        rows = np.flatnonzero(~np.isin(self.table.tensor, gone))
        aliases = {alias: name for alias, name in self.aliases.items() if name not in names}
        return replace(self, table=self.table.select(rows), aliases=aliases)

    @cached_property
    def layout_digest(self) -> str:
        """Digest of the manifest without `worker`: two ranks with the same layout have the same digest."""
        return replace(self, worker="").digest()

    @cached_property
    def _digest(self) -> str:
        """Digest of the wire form; cached, because every plan needs the digest of every rank."""
        return xxhash.xxh3_128_hexdigest(self.encode())


class ManifestBuilder:
    """Builder that collects shards one by one and checks them as a whole.

    Example:
        >>> builder = ManifestBuilder("engine-a/0", Role.ENGINE)
        >>> builder.add_parameter("w", nbytes=32, dtype=DType.FLOAT32)
        >>> builder.add_shard("w", (4, 4), Box((0, 0), (2, 4)), "w")
        >>> len(builder.build().table)
        1
    """

    def __init__(self, worker: str, role: Role) -> None:
        self._worker = worker
        self._role = role
        self._tensors: dict[str, tuple[int, TensorSpec]] = {}
        self._parameters: dict[str, tuple[int, ParameterSpec]] = {}
        self._aliases: dict[str, str] = {}
        self._quantized: list[QuantizedTensor] = []
        self._rows: list[tuple[int, int, Box, int, tuple[int, ...]]] = []

    def add_parameter(
        self, name: str, *, nbytes: int, dtype: DType, padding_nbytes: int = 0
    ) -> None:
        """Declare a local parameter; see `ParameterSpec`.

        Raises:
            ManifestError: the parameter is declared already.
        """
        if name in self._parameters:
            raise ManifestError(f"{self._worker}: parameter {name!r} is declared twice")
        spec = ParameterSpec(name, nbytes, dtype, padding_nbytes)
        self._parameters[name] = (len(self._parameters), spec)

    def add_alias(self, name: str, tensor: str) -> None:
        """Declare that checkpoint name `name` shares the bytes of `tensor` (tied weights)."""
        self._aliases[name] = tensor

    def add_quantized(self, quantized: QuantizedTensor) -> None:
        """Declare a quantised weight. The caller adds the shards of the weight and of its scales by `add_shard`."""
        self._quantized.append(quantized)

    def add_shard(
        self,
        tensor: str,
        global_shape: tuple[int, ...],
        box: Box,
        parameter: str,
        *,
        offset_bytes: int = 0,
        strides_bytes: tuple[int, ...] | None = None,
    ) -> None:
        """Declare that `parameter` contains `box` of `tensor`.

        Args:
            tensor: checkpoint name.
            global_shape: the tensor's global shape, at most `MAX_DIMS` dims.
            box: elements of the tensor. An empty box adds no shard.
            parameter: name of a parameter from `add_parameter`.
            offset_bytes: byte offset of the box's first element from the parameter's start.
            strides_bytes: byte stride per tensor dim; by default the box is contiguous and row-major.

        Raises:
            ManifestError: the parameter is not declared, the tensor has another shape in an earlier shard, or the
                arguments differ in the number of dims.
            UnsupportedLayout: the tensor has more than `MAX_DIMS` dims.
        """
        if len(global_shape) > MAX_DIMS:
            raise UnsupportedLayout(
                f"{self._worker}: tensor {tensor!r} must have at most {MAX_DIMS} dims, got {global_shape}"
            )
        if parameter not in self._parameters:
            raise ManifestError(
                f"{self._worker}: tensor {tensor!r} refers to undeclared parameter {parameter!r}"
            )
        index, known = self._tensors.setdefault(
            tensor, (len(self._tensors), TensorSpec(tensor, tuple(global_shape)))
        )
        if known.shape != tuple(global_shape):
            raise ManifestError(
                f"{self._worker}: tensor {tensor!r} has shape {known.shape} in one shard and "
                f"{tuple(global_shape)} in another"
            )
        if box.numel == 0:
            return
        parameter_index, spec = self._parameters[parameter]
        strides = (
            contiguous_strides(box.sizes, spec.dtype.itemsize)
            if strides_bytes is None
            else strides_bytes
        )
        if len(strides) != box.num_dims or box.num_dims != len(global_shape):
            raise ManifestError(
                f"{self._worker}: tensor {tensor!r}: box {box}, strides {strides} and shape "
                f"{tuple(global_shape)} must have the same number of dims"
            )
        self._rows.append((index, parameter_index, box, offset_bytes, tuple(strides)))

    def build(self) -> ShardManifest:
        """Check the declared parameters and shards as a whole, and return the manifest.

        Raises:
            ManifestError: a box is outside its tensor, a shard reaches outside its parameter, an
                alias names an unknown tensor, or a quantised weight is not a matrix or has no matching
                scales. The manifest of an engine must meet two more rules: the shards and padding of a
                parameter add up to its size, and no elements of one shard share bytes.
        """
        rows = self._rows
        manifest = ShardManifest(
            worker=self._worker,
            role=self._role,
            tensors=tuple(spec for _, spec in self._tensors.values()),
            parameters=tuple(spec for _, spec in self._parameters.values()),
            table=ShardTable(
                tensor=np.array([tensor for tensor, *_ in rows], np.int32),
                parameter=np.array([parameter for _, parameter, *_ in rows], np.int32),
                offsets=_padded([box.offsets for _, _, box, *_ in rows], 0),
                sizes=_padded([box.sizes for _, _, box, *_ in rows], 1),
                offset_bytes=np.array([offset for *_, offset, _ in rows], np.int64),
                strides_bytes=_padded([strides for *_, strides in rows], 0),
            ),
            aliases=dict(self._aliases),
            quantized=tuple(self._quantized),
            schema_version=MANIFEST_SCHEMA_VERSION,
        )
        _check(manifest)
        return manifest


def _padded(rows: Sequence[tuple[int, ...]], fill: int) -> Int64Array:
    """Return `rows` as (n, MAX_DIMS) values, with `fill` on the left."""
    wide = [(fill,) * (MAX_DIMS - len(row)) + row for row in rows]
    return np.array(wide, np.int64).reshape(-1, MAX_DIMS)


def contiguous_strides(sizes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return row-major byte strides of an array of `sizes`."""
    strides: list[int] = []
    step = itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _check(manifest: ShardManifest) -> None:
    """Check that a manifest does not contradict itself. For the errors, see `ManifestBuilder.build`."""
    table, worker = manifest.table, manifest.worker
    for alias, tensor in manifest.aliases.items():
        if all(spec.name != tensor for spec in manifest.tensors):
            raise ManifestError(f"{worker}: alias {alias!r} names unknown tensor {tensor!r}")
    _check_quantized(manifest)
    if len(table.tensor) == 0:
        return
    _check_index(f"{worker}: tensor", table.tensor, len(manifest.tensors))
    _check_index(f"{worker}: parameter", table.parameter, len(manifest.parameters))
    _check_boxes(manifest)
    if manifest.role is Role.ENGINE:
        _refuse_folded(manifest)
    described = _check_bytes(manifest)
    for index, parameter in enumerate(manifest.parameters if manifest.role is Role.ENGINE else ()):
        total = int(described[index]) + parameter.padding_nbytes
        if total != parameter.nbytes:
            raise ManifestError(
                f"{worker}: parameter {parameter.name!r} has {parameter.nbytes} bytes, but its "
                f"shards and padding describe {total}"
            )


def _check_index(what: str, column: Int32Array, count: int) -> None:
    """Raise ManifestError if an index is not in [0, count). `what` is the beginning of the error's text."""
    wrong = column[(column < 0) | (column >= count)]
    if len(wrong):
        raise ManifestError(f"{what} index of a shard must be in [0, {count}), got {int(wrong[0])}")


def _check_boxes(manifest: ShardManifest) -> None:
    """Raise ManifestError if a box is empty or reaches outside its tensor, and UnsupportedLayout for too many dims."""
    table, worker = manifest.table, manifest.worker
    for tensor_spec in manifest.tensors:
        if len(tensor_spec.shape) > MAX_DIMS:
            raise UnsupportedLayout(
                f"{worker}: tensor {tensor_spec.name!r} must have at most {MAX_DIMS} dims, "
                f"got {len(tensor_spec.shape)}"
            )
    shapes = _padded([tensor_spec.shape for tensor_spec in manifest.tensors], 1)
    outside = (
        (table.offsets < 0)
        | (table.sizes < 1)
        | (table.offsets + table.sizes > shapes[table.tensor])
    ).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        spec = manifest.tensors[int(table.tensor[row])]
        raise ManifestError(
            f"{worker}: tensor {spec.name!r}: the box with offsets {table.offsets[row].tolist()} and sizes "
            f"{table.sizes[row].tolist()} must not be empty and must be inside shape {spec.shape}"
        )


_MOST_ELEMENTS = 1 << 20
"""Maximum number of elements of a shard whose addresses are compared one by one."""


def _refuse_folded(manifest: ShardManifest) -> None:
    """Raise ManifestError if two elements of one shard share bytes, as in an expanded tensor (stride 0).

    In a shard with more than `_MOST_ELEMENTS` elements, find only strides of 0: the addresses of so many elements are
    not compared one by one.
    """
    table = manifest.table
    itemsizes = np.array([p.dtype.itemsize for p in manifest.parameters], np.int64)[table.parameter]
    strides = np.where(table.sizes == 1, 0, np.abs(table.strides_bytes))
    order = np.argsort(strides, axis=1)
    sizes, steps = (np.take_along_axis(each, order, 1) for each in (table.sizes, strides))
    # Elements along a dim share no bytes if the dim's stride is at least the number of bytes that the dims with smaller
    # strides span together.
    extents = itemsizes[:, None] + np.cumsum((sizes - 1) * steps, axis=1)
    inner = np.concatenate((itemsizes[:, None], extents[:, :-1]), axis=1)
    for row in np.flatnonzero(((sizes > 1) & (steps < inner)).any(axis=1)).tolist():
        numel = int(table.sizes[row].prod())
        is_expanded = bool(((sizes[row] > 1) & (steps[row] == 0)).any())
        if is_expanded or (numel <= _MOST_ELEMENTS and _is_folded(manifest, row)):
            parameter = manifest.parameters[int(table.parameter[row])]
            tensor = manifest.tensors[int(table.tensor[row])]
            raise ManifestError(
                f"{manifest.worker}: parameter {parameter.name!r}: elements of tensor {tensor.name!r} must not share "
                f"bytes, got sizes {table.sizes[row].tolist()} with strides {table.strides_bytes[row].tolist()} in bytes; "
                "make an expanded tensor contiguous, or declare the tensor that it expands"
            )


def _is_folded(manifest: ShardManifest, row: int) -> bool:
    """Return whether two elements of the shard in row `row` share bytes. Compute the address of every byte."""
    table = manifest.table
    itemsize = manifest.parameters[int(table.parameter[row])].dtype.itemsize
    found = np.arange(itemsize, dtype=np.int64)
    for size, stride in zip(table.sizes[row], table.strides_bytes[row], strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return len(np.unique(found)) < len(found)


def _check_quantized(manifest: ShardManifest) -> None:
    """Raise ManifestError if a quantised tensor is not a matrix, or its scales are missing or have a wrong shape."""
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    for declared in manifest.quantized:
        weight, scale = shapes.get(declared.weight), shapes.get(declared.scale)
        if weight is None or len(weight) != 2 or scale != scale_shape(weight):
            raise ManifestError(
                f"{manifest.worker}: quantised tensor {declared.weight!r} must be a matrix, and {declared.scale!r} must have "
                f"one scale per block of {BLOCK} x {BLOCK} elements, got shapes {weight} and {scale}"
            )


def _check_bytes(manifest: ShardManifest) -> Int64Array:
    """Return the total size in bytes of each parameter's shards.

    Raises:
        ManifestError: a shard reaches outside its parameter.
    """
    table, worker = manifest.table, manifest.worker
    itemsizes = np.array([p.dtype.itemsize for p in manifest.parameters], np.int64)
    extents = np.array([p.nbytes for p in manifest.parameters], np.int64)
    reach = (table.sizes - 1) * table.strides_bytes
    low = table.offset_bytes + np.minimum(reach, 0).sum(axis=1)
    high = table.offset_bytes + np.maximum(reach, 0).sum(axis=1) + itemsizes[table.parameter]
    bad = (low < 0) | (high > extents[table.parameter])
    if bad.any():
        row = int(bad.argmax())
        parameter = manifest.parameters[int(table.parameter[row])]
        raise ManifestError(
            f"{worker}: shard of {manifest.tensors[int(table.tensor[row])].name!r} occupies bytes "
            f"[{int(low[row])}, {int(high[row])}) of parameter {parameter.name!r}, which has only "
            f"{parameter.nbytes} bytes"
        )
    described = np.zeros(len(manifest.parameters), np.int64)
    np.add.at(described, table.parameter, table.sizes.prod(axis=1) * itemsizes[table.parameter])
    return described
