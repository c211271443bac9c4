"""What a torch parameter holds locally, in checkpoint coordinates, with no communication.

Used by trainers (FSDP2, tensor parallel, both) and by tensor-parallel engines alike.

The case where others corrupt silently is FSDP2 over tensor parallelism: the mesh is
(fsdp, tp), the placements `(_StridedShard(0), Shard(0))`, and the tensor was cut by tp
first and by fsdp inside that. Replaying the cuts in the order in which they were made gives
one contiguous range per dim, uneven sizes included; reading the placements from left
to right does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from windlass.errors import ManifestError, UnsupportedLayout
from windlass.frameworks.dtypes import dtype_of
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest

__all__ = [
    "LocalShard",
    "describe_module",
    "local_shard",
    "local_tensor",
    "parameter_addresses",
]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What this rank holds of a parameter.

    Attributes:
        global_shape: of the whole tensor.
        box: the elements held here; empty when this rank holds none.
        strides_bytes: byte strides of the local memory.
        nbytes: bytes from the first to the last element held.
    """

    global_shape: tuple[int, ...]
    box: Box
    strides_bytes: tuple[int, ...]
    nbytes: int


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The memory this rank holds: the local part of a DTensor, or the tensor itself."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def local_shard(parameter: torch.Tensor) -> LocalShard:
    """Describe this rank's part of `parameter`. Not collective.

    Raises:
        UnsupportedLayout: a placement that holds no plain part of the tensor (Partial), or a
            strided shard whose split factor no other mesh axis explains.
        ManifestError: the described part and the local memory differ in shape.
    """
    local = local_tensor(parameter)
    shape = tuple(parameter.shape)
    box = _box_of(parameter) if isinstance(parameter, DTensor) else Box.full(shape)
    if box.sizes != tuple(local.shape) and box.numel != local.numel():
        raise ManifestError(
            f"a shard of shape {tuple(local.shape)} was found where {box} of {shape} was expected"
        )
    itemsize = local.element_size()
    strides = tuple(step * itemsize for step in local.stride())
    reach = sum((size - 1) * step for size, step in zip(local.shape, strides, strict=True))
    return LocalShard(shape, box, strides, reach + itemsize if local.numel() else 0)


def _box_of(tensor: DTensor) -> Box:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedLayout("this rank is not part of the tensor's mesh")
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis in _cut_order(tensor.placements, tensor.device_mesh.shape):
        placement = tensor.placements[axis]
        dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
        start, stop = _chunk(sizes[dim], tensor.device_mesh.size(axis), coordinate[axis])
        offsets[dim] += start
        sizes[dim] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def _chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """The range that `torch.chunk` gives to `index`; empty past the end."""
    step = -(-size // num_chunks)
    return min(index * step, size), min((index + 1) * step, size)


def _cut_order(placements: Iterable[Placement], mesh_shape: tuple[int, ...]) -> list[int]:
    """Mesh axes in the order in which they cut the tensor."""
    plain: list[int] = []
    strided: list[int] = []
    listed = list(placements)
    for axis, placement in enumerate(listed):
        if isinstance(placement, _StridedShard):
            strided.append(axis)
        elif isinstance(placement, Shard):
            plain.append(axis)
        elif not placement.is_replicate():
            raise UnsupportedLayout(f"placement {placement} holds no plain part of the tensor")
    for axis in strided:
        placement = listed[axis]
        expected_factor = 1
        for other in range(axis + 1, len(listed)):
            inner = listed[other]
            if isinstance(inner, (Shard, _StridedShard)) and inner.dim == placement.dim:  # type: ignore[attr-defined]
                expected_factor *= mesh_shape[other]
        if placement.split_factor != expected_factor:  # type: ignore[attr-defined]
            raise UnsupportedLayout(
                f"placement {placement}: split factor must be {expected_factor}, the product of the "
                "later mesh axes that cut the same dim"
            )
    # A strided shard was cut after the axes to its right; of several, the rightmost came first.
    return plain + strided[::-1]


def describe_module(
    module: torch.nn.Module,
    worker: str,
    role: Role,
    *,
    name_map: Callable[[str], str] | None = None,
) -> ShardManifest:
    """The manifest of a module's parameters on this rank. Not collective.

    Parameters that are one object under several names (tied weights) are described under
    the first name; the others become aliases.

    Args:
        module: any module; its parameters may be DTensors.
        worker: identity of this rank.
        role: trainer or engine.
        name_map: from parameter name to checkpoint name; identity when omitted.
    """
    builder = ManifestBuilder(worker, role)
    first_name: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor_name = name_map(name) if name_map is not None else name
        if id(parameter) in first_name:
            builder.add_alias(tensor_name, first_name[id(parameter)])
            continue
        first_name[id(parameter)] = tensor_name
        shard = local_shard(parameter)
        builder.add_parameter(name, nbytes=shard.nbytes, dtype=dtype_of(parameter))
        builder.add_shard(
            tensor_name,
            shard.global_shape,
            shard.box,
            name,
            strides_bytes=shard.strides_bytes,
        )
    return builder.build()


def parameter_addresses(module: torch.nn.Module) -> tuple[int, ...]:
    """Where the parameters lie now, in the order of `describe_module`'s parameters.

    Read them anew for every update: offloading and some optimisers rebind storage.
    """
    return tuple(local_tensor(parameter).data_ptr() for parameter in module.parameters())
