"""Stage 1: what a torch module holds on this rank, in checkpoint coordinates, with no communication.

Takes a module whose parameters may be DTensors and hands on a `ShardManifest`. Used by trainers
(FSDP2, tensor parallel, both) and by tensor-parallel engines alike.

The case where others corrupt silently is FSDP2 over tensor parallelism: the mesh is
(fsdp, tp), the placements `(_StridedShard(0), Shard(0))`, and the tensor was cut by tp
first and by fsdp inside that. Replaying the cuts in the order in which they were made gives
one contiguous range per dim, uneven sizes included; reading the placements from left
to right does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel

from windlass.errors import ConfigError, ManifestError, UnsupportedLayout
from windlass.frameworks.dtypes import dtype_of
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.layout.mesh import chunk
from windlass.layout.naming.stacked import StackedRule, unstack

__all__ = [
    "HeldTensor",
    "LocalShard",
    "NameMap",
    "describe_module",
    "held_tensors",
    "local_shard",
    "local_tensor",
    "parameter_addresses",
    "parameter_extents",
]

_WRAPPER_MARKS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Of torch.compile and activation checkpointing."""


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


def local_shard(name: str, parameter: torch.Tensor) -> LocalShard:
    """Describe this rank's part of `parameter`; `name` is for messages. Not collective.

    Raises:
        UnsupportedLayout: a placement that holds no plain part of the tensor (Partial), or a
            strided shard whose split factor no other mesh axis explains.
        ManifestError: the described part and the local memory differ in shape.
    """
    local = local_tensor(parameter)
    shape = tuple(parameter.shape)
    box = _box_of(name, parameter) if isinstance(parameter, DTensor) else Box.full(shape)
    if box.sizes != tuple(local.shape) and box.numel != local.numel():
        raise ManifestError(
            f"parameter {name!r}: the local shard must be {box} of {shape}, got shape "
            f"{tuple(local.shape)}"
        )
    itemsize = local.element_size()
    strides = tuple(step * itemsize for step in local.stride())
    return LocalShard(shape, box, strides, _reach(local))


def _box_of(name: str, tensor: DTensor) -> Box:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedLayout(
            f"parameter {name!r}: its mesh must contain this rank, got {tensor.device_mesh}"
        )
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis in _cut_order(name, tensor.placements, tensor.device_mesh.shape):
        placement = tensor.placements[axis]
        dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
        start, size = chunk(sizes[dim], tensor.device_mesh.size(axis), coordinate[axis])
        offsets[dim] += start
        sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def _cut_order(
    name: str, placements: Iterable[Placement], mesh_shape: tuple[int, ...]
) -> list[int]:
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
            raise UnsupportedLayout(
                f"parameter {name!r}: placements must be shards or replicas, got {placement}, which "
                "holds no plain part of the tensor"
            )
    for axis in strided:
        placement = listed[axis]
        expected_factor = 1
        for other in range(axis + 1, len(listed)):
            inner = listed[other]
            if isinstance(inner, (Shard, _StridedShard)) and inner.dim == placement.dim:  # type: ignore[attr-defined]
                expected_factor *= mesh_shape[other]
        factor = placement.split_factor  # type: ignore[attr-defined]
        if factor != expected_factor:
            raise UnsupportedLayout(
                f"parameter {name!r}: split factor of {placement} must be {expected_factor}, the "
                f"product of the later mesh axes that cut the same dim, got {factor}"
            )
    # A strided shard was cut after the axes to its right; of several, the rightmost came first.
    return plain + strided[::-1]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or persistent buffer of a module.

    Attributes:
        name: where it is in the module.
        tensor_name: of the checkpoint tensor.
        tensor: it, sharded.
    """

    name: str
    tensor_name: str
    tensor: torch.Tensor


NameMap = Callable[[str], str | None]
"""From a name in the bare module to the checkpoint's; None leaves it out."""


def held_tensors(module: torch.nn.Module, name_map: NameMap | None = None) -> list[HeldTensor]:
    """What a checkpoint of `module` would hold, several names of one tensor included.

    Names are those of the bare module: the marks of `torch.compile`, activation checkpointing
    and `DistributedDataParallel` are taken out. FSDP2 modules that still hold gathered
    parameters after a forward pass are resharded first (local, no communication), because the
    gathered copy is not what an optimizer steps.

    Raises:
        ConfigError: no module, or a `name_map` that gives something else than names.
        UnsupportedLayout: a tensor without memory (meta) or without strides (sparse).
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if name_map is not None and not callable(name_map):
        raise ConfigError(f"name_map must be a function of a name, got {type(name_map).__name__}")
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    found: list[HeldTensor] = []
    parallel = [
        f"{path}.module." if path else "module."
        for path, child in module.named_modules()
        if isinstance(child, DistributedDataParallel)
    ]
    tensors: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *_persistent_buffers(module),
    ]
    for name, tensor in tensors:
        bare = name
        for prefix in sorted(parallel, key=len, reverse=True):
            if bare.startswith(prefix):
                bare = prefix.removesuffix("module.") + bare.removeprefix(prefix)
        for mark in _WRAPPER_MARKS:
            bare = bare.replace(mark, "")
        mapped = bare if name_map is None else name_map(bare)
        if mapped is not None:
            if not isinstance(mapped, str):
                raise ConfigError(f"name_map must give a name or None for {bare!r}, got {mapped!r}")
            if tensor.is_meta or tensor.layout is not torch.strided:
                kind = "on the meta device" if tensor.is_meta else f"one with {tensor.layout}"
                raise UnsupportedLayout(
                    f"parameter {name!r}: must be a tensor with memory and strides, got {kind}"
                )
            found.append(HeldTensor(name, mapped, tensor))
    return found


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds."""
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def describe_module(
    module: torch.nn.Module,
    worker: str,
    role: Role,
    *,
    name_map: NameMap | None = None,
    stacked: Sequence[StackedRule] = (),
) -> ShardManifest:
    """The manifest of a module's parameters and persistent buffers on this rank. Not collective.

    Tensors that are one object under several names (tied weights) are described under
    the first name; the others become aliases.

    Args:
        module: any module, wrapped or not; its parameters may be DTensors.
        worker: identity of this rank.
        role: trainer or engine.
        name_map: from name to checkpoint name, None for what is left out; identity when omitted.
        stacked: parameters that are several checkpoint tensors, by mapped name.
    """
    builder = ManifestBuilder(worker, role)
    first_name: dict[int, str] = {}
    for held in held_tensors(module, name_map):
        if id(held.tensor) in first_name:
            builder.add_alias(held.tensor_name, first_name[id(held.tensor)])
            continue
        first_name[id(held.tensor)] = held.tensor_name
        shard = local_shard(held.name, held.tensor)
        builder.add_parameter(
            held.name, nbytes=shard.nbytes, dtype=dtype_of(held.name, held.tensor)
        )
        parts = unstack(
            stacked, held.tensor_name, shard.global_shape, shard.box, shard.strides_bytes
        )
        if parts is None:
            builder.add_shard(
                held.tensor_name,
                shard.global_shape,
                shard.box,
                held.name,
                strides_bytes=shard.strides_bytes,
            )
            continue
        for part in parts:
            builder.add_shard(
                part.tensor,
                part.global_shape,
                part.box,
                held.name,
                offset_bytes=part.offset,
                strides_bytes=part.strides,
            )
    return builder.build()


def parameter_addresses(
    module: torch.nn.Module, name_map: NameMap | None = None
) -> tuple[int, ...]:
    """Where they lie now, in the order of `describe_module`'s parameters.

    Read them anew for every update: offloading and some optimisers rebind storage.
    """
    return tuple(local.data_ptr() for local in _locals(module, name_map))


def parameter_extents(
    module: torch.nn.Module, name_map: NameMap | None = None
) -> tuple[tuple[int, int], ...]:
    """As `parameter_addresses`, each with the bytes that it reaches over now."""
    return tuple((local.data_ptr(), _reach(local)) for local in _locals(module, name_map))


def _locals(module: torch.nn.Module, name_map: NameMap | None) -> list[torch.Tensor]:
    unique = {id(held.tensor): held.tensor for held in held_tensors(module, name_map)}
    return [local_tensor(tensor) for tensor in unique.values()]


def _reach(local: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not local.numel():
        return 0
    steps = zip(local.shape, local.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * local.element_size()
