"""What a manifest must not contradict: itself, its shapes, and the memory that it describes.

Run whenever a `ShardManifest` is made, by an adapter or from the bytes of a peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from windlass.errors import ManifestError, UnsupportedLayout
from windlass.layout.quantization import scale_shape

if TYPE_CHECKING:
    from windlass.layout.manifest import ShardManifest

__all__ = ["check_manifest"]


def check_manifest(manifest: ShardManifest, *, complete: bool) -> None:
    """Check indices, boxes against shapes, bytes against parameters.

    Args:
        manifest: not yet trusted.
        complete: whether shards and padding must make up every byte of every parameter.

    Raises:
        ManifestError: names the worker, the tensor or parameter, and what it should be.
        UnsupportedLayout: a tensor with more dims than the table has columns.
    """
    table, worker = manifest.table, manifest.worker
    lengths = {
        "tensor": len(table.tensor),
        "parameter": len(table.parameter),
        "offsets": len(table.offsets),
        "sizes": len(table.sizes),
        "offset_bytes": len(table.offset_bytes),
        "strides_bytes": len(table.strides_bytes),
    }
    if len(set(lengths.values())) > 1:
        raise ManifestError(
            f"{worker}: columns of the manifest must be equally long, got {lengths}"
        )
    for alias, tensor in manifest.aliases.items():
        if all(spec.name != tensor for spec in manifest.tensors):
            raise ManifestError(f"{worker}: alias {alias!r} names unknown tensor {tensor!r}")
    _check_quantized(manifest)
    if len(table.tensor) == 0:
        return
    _check_index(f"{worker}: tensor", table.tensor, len(manifest.tensors))
    _check_index(f"{worker}: parameter", table.parameter, len(manifest.parameters))
    _check_boxes(manifest)
    described = _check_bytes(manifest)
    if complete:
        _check_complete(manifest, described)


def _check_index(what: str, column: npt.NDArray[np.int32], count: int) -> None:
    wrong = column[(column < 0) | (column >= count)]
    if len(wrong):
        raise ManifestError(f"{what} index of a shard must be in [0, {count}), got {int(wrong[0])}")


def _check_boxes(manifest: ShardManifest) -> None:
    """Every box lies inside its tensor's shape."""
    table, worker = manifest.table, manifest.worker
    max_dims = table.offsets.shape[1]
    shapes = np.ones((len(manifest.tensors), max_dims), np.int64)
    for index, tensor_spec in enumerate(manifest.tensors):
        if len(tensor_spec.shape) > max_dims:
            raise UnsupportedLayout(
                f"{worker}: tensor {tensor_spec.name!r} must have at most {max_dims} dims, "
                f"got {len(tensor_spec.shape)}"
            )
        shapes[index, max_dims - len(tensor_spec.shape) :] = tensor_spec.shape
    outside = (
        (table.offsets < 0)
        | (table.sizes < 1)
        | (table.offsets + table.sizes > shapes[table.tensor])
    ).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        spec = manifest.tensors[int(table.tensor[row])]
        raise ManifestError(
            f"{worker}: tensor {spec.name!r}: box offsets {table.offsets[row].tolist()} sizes "
            f"{table.sizes[row].tolist()} must lie inside shape {spec.shape}"
        )


def _check_quantized(manifest: ShardManifest) -> None:
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    for declared in manifest.quantized:
        weight, scale = shapes.get(declared.weight), shapes.get(declared.scale)
        if weight is None or len(weight) != 2 or scale != scale_shape(weight):
            raise ManifestError(
                f"{manifest.worker}: quantised tensor {declared.weight!r} must be a matrix with scales "
                f"{declared.scale!r} per block, got shapes {weight} and {scale}"
            )


def _check_bytes(manifest: ShardManifest) -> npt.NDArray[np.int64]:
    """Bytes that shards describe, per parameter."""
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
            f"{worker}: shard of {manifest.tensors[int(table.tensor[row])].name!r} reaches bytes "
            f"[{int(low[row])}, {int(high[row])}) of parameter {parameter.name!r}, which has "
            f"{parameter.nbytes}"
        )
    described = np.zeros(len(manifest.parameters), np.int64)
    np.add.at(described, table.parameter, table.sizes.prod(axis=1) * itemsizes[table.parameter])
    return described


def _check_complete(manifest: ShardManifest, described: npt.NDArray[np.int64]) -> None:
    for index, parameter in enumerate(manifest.parameters):
        total = int(described[index]) + parameter.padding_nbytes
        if total != parameter.nbytes:
            raise ManifestError(
                f"{manifest.worker}: parameter {parameter.name!r} has {parameter.nbytes} bytes, but its "
                f"shards and padding describe {total}"
            )
