"""Describes the part of a torch module that this rank has, as boxes of checkpoint tensors. No communication.

The input is a module with plain parameters or DTensors; the output is a `ShardManifest`. It serves trainers with FSDP2,
tensor parallelism or both, and tensor-parallel engines.

FSDP2 over tensor parallelism needs care. The mesh is (fsdp, tp) and the placements are `(_StridedShard(0), Shard(0))`:
tp cuts the tensor first, and then fsdp cuts each part. This module repeats the cuts in this order, which gives one
contiguous range per dim, even for uneven sizes. Reading the placements from left to right would give a wrong range
without an error.

Along a mesh axis, the number of a rank's part is its rank in the process group of this axis, not its position in the
mesh: FSDP2, tensor parallelism and `full_tensor` use the group rank. torch sorts the ranks of a group, so the two
numbers differ if the ranks of the mesh do not ascend.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast, final

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from windlass.errors import (
    ConfigError,
    ManifestError,
    PlanError,
    UnsupportedLayout,
    WindlassError,
)
from windlass.layout.box import Box, chunk
from windlass.layout.columns import Int64Array
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.layout.naming.place import PlacedShard
from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS, StackedRule
from windlass.memory.torch_dtypes import dtype_of
from windlass.transfer.base import ParameterMemory
from windlass.transfer.saved_names import (
    HeldPart,
    local_part,
    names_in,
    saved_parts,
    transformers_model,
    unstack,
    without_marks,
)
from windlass.transfer.what_acts import refuse_unmerged

_log = logging.getLogger(__name__)
_FLAT_PARAMETER = "_flat_param"
"""Name of the parameter in which FSDP1 stores all parameters of a module."""


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as a plain tensor without gradient: the local part of a DTensor, or the tensor."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def local_shard(name: str, parameter: torch.Tensor, *, by_fsdp: bool = False) -> HeldPart:
    """Describe this rank's part of a parameter; the part is empty if the rank is not in the mesh. Not collective.

    Args:
        name: name for the description and for errors.
        parameter: plain tensor or DTensor.
        by_fsdp: whether FSDP2 cut the parameter. FSDP2 and other parts of torch cut uneven strided shards differently.

    Raises:
        UnsupportedLayout: a placement is neither shard nor replica; no order of the cuts gives the split factor of a
            strided shard; or torch distributes the parameter in one way and would gather it in another way.
        ManifestError: the described part and the local tensor differ in shape.
    """
    local = local_tensor(parameter)
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        box = Box.full(shape)
    elif _is_off_mesh(parameter):
        box = Box((0,) * len(shape), (0,) * len(shape))
    else:
        box = _box_of(name, parameter, by_fsdp=by_fsdp)
    # Do not compare an empty part, because torch gives it another shape than the box.
    if box.sizes != tuple(local.shape) and (box.numel or local.numel()):
        raise ManifestError(
            f"parameter {name!r}: the local shard must be {box} of {shape}, got shape "
            f"{tuple(local.shape)}"
        )
    # torch drops the dims of an empty part, so its strides cannot be used.
    strides = local.stride() if box.numel else (0,) * len(shape)
    return HeldPart(name, shape, parameter.dtype, box, strides)


def _is_off_mesh(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a DTensor on a mesh that lacks this rank."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


def _box_of(name: str, tensor: DTensor, *, by_fsdp: bool) -> Box:
    """Return this rank's box of a DTensor: begin with the whole tensor, and cut it along one mesh axis after another.

    Raises:
        UnsupportedLayout: see `local_shard`.
    """
    mesh = tensor.device_mesh
    cuts = _cut_order(name, tensor)
    # If FSDP2 makes the only cut, the order of ranks along other axes has no effect on this part.
    alone = by_fsdp and sum(map(len, cuts.values())) == 1
    if mesh.ndim > 1 and cuts and not alone and not _is_in_order(mesh):
        raise UnsupportedLayout(
            f"parameter {name!r}: the ranks of its mesh must have the same order in all lines along an axis "
            f"(otherwise torch distributes one part and gathers another), got {mesh.mesh.tolist()}"
        )
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    places = mesh.get_coordinate() or ()
    for dim, axes in cuts.items():
        for axis in axes:
            rank, parts = mesh.get_local_rank(axis), mesh.size(axis)
            # torch selects a rank's part by the rank in the process group. But for the next cut, torch uses the size of the
            # part that it selects by the rank's position in the mesh. If the cut is even, both parts have the same size.
            is_by_fsdp = by_fsdp and axis == axes[-1]
            is_turned = rank != places[axis]
            if len(axes) > 1 and not is_by_fsdp and is_turned and sizes[dim] % parts:
                raise UnsupportedLayout(
                    f"parameter {name!r}: mesh axis {axis} must cut dim {dim} evenly, got {sizes[dim]} elements "
                    f"for {parts} ranks of {mesh.mesh.tolist()}: other axes cut this dim too and the ranks along "
                    "the axis do not ascend"
                )
            start, sizes[dim] = chunk(sizes[dim], parts, rank)
            offsets[dim] += start
        if not by_fsdp and any(isinstance(tensor.placements[axis], _StridedShard) for axis in axes):
            read = _read_in_turn(tensor, dim, sorted(axes))
            # torch drops the dims of an empty part.
            held = (*tensor._local_tensor.shape, *([0] * tensor.dim()))[dim]
            if held == len(read) and not np.array_equal(read, np.arange(sizes[dim]) + offsets[dim]):
                raise UnsupportedLayout(
                    f"parameter {name!r}: dim {dim} must be cut evenly, got {tensor.shape[dim]} elements and "
                    f"placements {tensor.placements}: torch distributes and gathers uneven strided shards "
                    "differently"
                )
    return Box(tuple(offsets), tuple(sizes))


@functools.lru_cache(maxsize=16)
def _is_in_order(mesh: DeviceMesh) -> bool:
    """Return whether a rank's position along each mesh axis determines its rank in the process group of this axis."""
    for axis in range(mesh.ndim):
        numbers = mesh.mesh.argsort(dim=axis).argsort(dim=axis).transpose(0, axis).flatten(1)
        if (numbers != numbers[:, :1]).any():
            return False
    return True


def _cut_order(name: str, tensor: DTensor) -> dict[int, list[int]]:
    """Return tensor dim -> mesh axes that cut the dim, in the order of the cuts.

    The split factor of a strided shard is the number of parts into which earlier cuts have divided the dim. The axes of
    the earlier cuts are to the right of the shard's axis. So the split factor determines the cut's place in the order.

    Raises:
        UnsupportedLayout: a placement is neither shard nor replica, or no order of the cuts gives the split factor of a
            strided shard.
    """
    orders: dict[int, list[int]] = {}
    strided = any(isinstance(placement, _StridedShard) for placement in tensor.placements)
    # Read placements from right to left, because a split factor is the number of parts from axes to its right.
    for axis, placement in reversed([*enumerate(tensor.placements)]):
        if isinstance(placement, (Shard, _StridedShard)):
            factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
            order, parts, position = orders.setdefault(placement.dim % tensor.dim(), []), 1, 0
            while parts != factor and position < len(order):
                parts *= tensor.device_mesh.size(order[position])
                position += 1
            if parts != factor:
                raise UnsupportedLayout(
                    f"parameter {name!r}: split factor of {placement} must be the number of parts into which earlier "
                    f"cuts (along other mesh axes) divide the dim, got placements {tensor.placements}"
                )
            order.insert(position, axis)
        elif not placement.is_replicate():
            raise UnsupportedLayout(
                f"parameter {name!r}: placements must be shards or replicas, got {placement}, which "
                "holds no plain part of the tensor"
            )
    if not strided:
        for entry in tensor._spec.shard_order:
            orders[entry.tensor_dim] = list(entry.mesh_dims)
    return orders


def _read_in_turn(tensor: DTensor, dim: int, axes: Sequence[int]) -> Int64Array:
    """Return the (n,) indices along `dim` that `distribute_tensor` of torch gives to this rank.

    `distribute_tensor` applies placements from left to right. For a strided shard, it divides the indices into
    `split_factor` parts and gives each rank a share of every part.
    """
    held = np.arange(tensor.shape[dim])
    for axis in axes:
        placement, mesh = tensor.placements[axis], tensor.device_mesh
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        parts = []
        for index in range(factor):
            start, size = chunk(len(held), factor, index)
            part = held[start : start + size]
            start, size = chunk(len(part), mesh.size(axis), mesh.get_local_rank(axis))
            parts.append(part[start : start + size])
        held = np.concatenate(parts)
    return held


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or persistent buffer of a module.

    Attributes:
        name: name in the module, with the parts that wrappers insert.
        tensor_name: name without the parts that wrappers insert, or the result of `name_map` for it.
        tensor: the parameter or buffer; a DTensor if it is sharded.
        by_fsdp: whether it is in a module that FSDP2 shards.
        is_buffer: whether it is a buffer.
    """

    name: str
    tensor_name: str
    tensor: torch.Tensor
    by_fsdp: bool
    is_buffer: bool = False


NameMap = Callable[[str], str | None]
"""Function from a name in the module without wrappers to the name in the checkpoint. It returns None to leave the
tensor out."""


def held_tensors(
    module: torch.nn.Module, name_map: NameMap | None = None, *, role: Role | None = None
) -> list[HeldTensor]:
    """Return the tensors of `module` on this rank that a checkpoint would contain: parameters and persistent buffers.

    A tensor with several names has one entry per name. Parameters whose mesh does not contain this rank are left out.
    If FSDP2 has gathered a parameter for a forward pass, its entry has the shard, because the optimizer steps the shard
    and not the gathered copy.

    Args:
        module: the module.
        name_map: see `NameMap`; None keeps all names. The function gets names without the parts that `torch.compile`,
            activation checkpointing, FSDP1 and `DistributedDataParallel` insert.
        role: with a role, the tensors are checked, and FSDP2 modules are resharded (locally, without communication).
            TRAINER also leaves out buffers that cannot be sent (complex, sparse, without memory). If an engine needs such
            a buffer, it reports the buffer as missing. None is for tensors that were described before. This function
            then only reads the modules, so another thread may run a forward pass at the same time.

    Raises:
        ConfigError: `module` is not a module, or `name_map` returned something other than a name or None.
        UnsupportedLayout: see `check_memory`; or FSDP1 has cut the parameters of a module.
        PlanError: with a role, if a gathered copy of a parameter was changed in place.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if name_map is not None and not callable(name_map):
        raise ConfigError(f"name_map must be a function of a name, got {type(name_map).__name__}")
    found: list[HeldTensor] = []
    sharded: set[str] = set()
    parallel: list[str] = []
    parameters = _named_shards(module, reshards=role is not None)
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, FullyShardedDataParallel) and role is not None:
            _refuse_cut_by_fsdp1(path, child)
        if isinstance(child, FSDPModule) or path.rpartition(".")[0] in sharded:
            sharded.add(path)
        if isinstance(child, DistributedDataParallel):
            parallel.append(f"{path}.module." if path else "module.")
    tensors = [*parameters, *_persistent_buffers(module)]
    parallel.sort(key=len, reverse=True)
    for index, (name, tensor) in enumerate(tensors):
        bare = _bare(name, parallel)
        mapped = bare if name_map is None else name_map(bare)
        is_flat = bare.rpartition(".")[2] == _FLAT_PARAMETER
        if mapped is not None and not is_flat and not _is_off_mesh(tensor):
            if not isinstance(mapped, str):
                raise ConfigError(f"name_map must give a name or None for {bare!r}, got {mapped!r}")
            held = HeldTensor(
                name, mapped, tensor, name.rpartition(".")[0] in sharded, index >= len(parameters)
            )
            if role is None or _can_be_sent(held, role):
                found.append(held)
    return found


def _named_shards(module: torch.nn.Module, *, reshards: bool) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) for every name of every parameter of a module.

    If FSDP2 has gathered a parameter, return its shard, not the gathered copy.

    Args:
        module: the module.
        reshards: True to reshard FSDP2 modules. False to find the shards without changing the modules.

    Raises:
        PlanError: with `reshards`, if a gathered copy was changed in place.
    """
    gathering: dict[tuple[int, str], FSDPParam] = {}
    for child in module.modules():
        if isinstance(child, FSDPModule) and reshards:
            _reshard(child)
        elif isinstance(child, FSDPModule):
            gathering |= _places_of(child)
    found = []
    for name, tensor in module.named_parameters(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        holder = module.get_submodule(path) if gathering else module
        found.append((name, _shard_of(gathering, holder, key, tensor)))
    return found


def _refuse_cut_by_fsdp1(path: str, wrapper: FullyShardedDataParallel) -> None:
    """Raise for an FSDP1 module, unless its parameters are whole at this time, as inside `summon_full_params`.

    `path` is the path of the module, for the error.

    Raises:
        UnsupportedLayout: the parameters are ranges of a flat parameter; torch does not record the ranges.
    """
    handle = wrapper._handle
    if handle is None or handle._training_state is HandleTrainingState.SUMMON_FULL_PARAMS:
        return
    held, shapes = handle.flat_param._params, handle.flat_param._shapes
    if held is not None and all(p.shape == s for p, s in zip(held, shapes, strict=True)):
        return
    raise UnsupportedLayout(
        f"module {path!r}: parameters must be whole or DTensors, got ranges of the flat parameter of a "
        "FullyShardedDataParallel (FSDP1); shard with FSDP2 (`fully_shard`), or connect and publish inside "
        "`FSDP.summon_full_params`"
    )


def _can_be_sent(held: HeldTensor, role: Role) -> bool:
    """Return whether a tensor can be sent. False only for buffers of a trainer.

    Raises:
        UnsupportedLayout: a tensor that is not a trainer's buffer cannot be sent; see `check_memory` and `dtype_of`.
    """
    try:
        check_memory(held.name, held.tensor)
        dtype_of(held.name, held.tensor)
    except UnsupportedLayout as error:
        if not held.is_buffer or role is not Role.TRAINER:
            raise
        _log.info("left out a buffer that cannot be sent: %s", error)
        return False
    return True


def _bare(name: str, parallel: Sequence[str]) -> str:
    """Return a name without the parts that wrappers insert.

    `parallel`: prefixes of the modules inside `DistributedDataParallel` modules, the longest first.
    """
    for prefix in parallel:
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    return without_marks(name)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise if the memory of a tensor does not contain its elements. `name`: name of the tensor, for the error.

    Raises:
        UnsupportedLayout: the tensor is lazy, on the meta device, sparse, a placeholder of DeepSpeed ZeRO-3, or of a
            subclass without its own memory; or it has torch's negative or conjugate bit, so that its memory contains
            other values.
    """
    if is_lazy(tensor):
        raise UnsupportedLayout(
            f"parameter {name!r}: must have a shape, got a parameter of a lazy module; run a forward pass before connecting"
        )
    by_zero = vars(tensor)
    if "ds_id" in by_zero and tuple(tensor.shape) != tuple(by_zero["ds_shape"]):
        raise UnsupportedLayout(
            f"parameter {name!r}: must have its values, got a placeholder of DeepSpeed ZeRO-3 (`ds_id`); connect and "
            "publish inside `deepspeed.zero.GatheredParameters(list(model.parameters()))`, or shard with FSDP2 "
            "(`fully_shard`)"
        )
    lacks = "one on the meta device" if tensor.is_meta else ""
    if not lacks and tensor.layout is not torch.strided:
        lacks = f"one with {tensor.layout}"
    if not lacks and not _has_memory(local := local_tensor(tensor)):
        lacks = f"a {type(local).__name__} without memory of its own"
    if lacks:
        raise UnsupportedLayout(
            f"parameter {name!r}: must be a tensor with memory and strides, got {lacks}"
        )
    if local.is_neg() or local.is_conj():
        bit, remedy = ("negative", "neg") if local.is_neg() else ("conjugate", "conj")
        raise UnsupportedLayout(
            f"parameter {name!r}: memory must contain the tensor's values, got a tensor with torch's {bit} bit; publish "
            f"`tensor.resolve_{remedy}()`"
        )


def refuse_freed(name: str, local: torch.Tensor) -> None:
    """Raise `PlanError` if the memory of a local tensor was freed, for example by offloading."""
    if _is_freed(local):
        raise PlanError(
            f"parameter {name!r}: must have memory, but its storage is freed; load it back before publishing"
        )


def _is_freed(local: torch.Tensor) -> bool:
    reach = local.storage_offset() * local.element_size() + _reach(local)
    return bool(local.numel()) and local.untyped_storage().nbytes() < reach


def _has_memory(local: torch.Tensor) -> bool:
    try:
        return bool(local.data_ptr()) or not local.numel()
    except RuntimeError:
        # torch raises this for a tensor without storage.
        return False


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and buffer for each persistent buffer, once per name of the buffer."""
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def describe_module(
    module: torch.nn.Module,
    worker: str,
    role: Role,
    *,
    name_map: NameMap | None = None,
    stacked: Sequence[StackedRule] | None = None,
) -> ShardManifest:
    """Return the manifest of a module's parameters and persistent buffers on this rank. Not collective.

    A tensor with several names (tied weights) is described under the first of them, and the other names become aliases.
    Without `stacked`, a transformers model is described in the form that transformers saves: with other names, and with
    separate tensors instead of fused ones (`saved_parts`). `name_map` is applied before this conversion. With
    `name_map`, a tensor is converted only if its mapped name exists in the transformers model. So `name_map` may remove the
    prefixes of a PEFT model or of the caller's own wrapper, and the conversion still works.

    Args:
        module: any module, with or without wrappers; its parameters may be DTensors.
        worker: worker name of this rank.
        role: trainer or engine.
        name_map: see `NameMap`; None keeps all names.
        stacked: rules for parameters that contain several checkpoint tensors, by mapped name; None for the conversion
            of transformers and `TRANSFORMERS_EXPERTS`.

    Raises:
        PlanError: see `held_tensors`.
        ConfigError: see `held_tensors`; or two different parameters get the same name.
        UnsupportedLayout, ManifestError: see `held_tensors`, `local_shard`, `saved_parts` and `unstack`.
    """
    builder = ManifestBuilder(worker, role)
    held_here = held_tensors(module, name_map, role=role)
    parts = [
        replace(local_shard(held.name, held.tensor, by_fsdp=held.by_fsdp), name=held.tensor_name)
        for held in held_here
    ]
    first: dict[int, int] = {}
    owner = [first.setdefault(id(held.tensor), index) for index, held in enumerate(held_here)]
    if name_map is not None:
        _refuse_one_name([(parts[i].name, held_here[i].name) for i in dict.fromkeys(owner)])
    converted = (
        _converted(module, parts, owner, by_name=name_map is not None) if stacked is None else {}
    )
    rules = TRANSFORMERS_EXPERTS if stacked is None else stacked
    boxes = [
        converted[index] if index in converted else unstack(rules, part)
        for index, part in enumerate(parts)
    ]
    owners: dict[str, int] = {}
    for index, held in enumerate(held_here):
        if owner[index] != index:
            for other, one in zip(boxes[index], boxes[owner[index]], strict=True):
                if other.tensor != one.tensor:
                    builder.add_alias(other.tensor, one.tensor)
            continue
        dtype, nbytes = dtype_of(held.name, held.tensor), _reach(local_tensor(held.tensor))
        gaps = max(nbytes - parts[index].box.numel * dtype.itemsize, 0)
        builder.add_parameter(held.name, nbytes=nbytes, dtype=dtype, padding_nbytes=gaps)
        for placed in boxes[index]:
            # Two parameters may be parts of the same tensor only if transformers has converted both.
            first_of = owners.setdefault(placed.tensor, index)
            if first_of != index and not {first_of, index} <= converted.keys():
                _refuse_one_name((placed.tensor, held_here[i].name) for i in (first_of, index))
            builder.add_shard(
                placed.tensor,
                placed.global_shape,
                placed.box,
                held.name,
                offset_bytes=placed.offset * dtype.itemsize,
                strides_bytes=tuple(step * dtype.itemsize for step in placed.strides),
            )
    return builder.build()


def _converted(
    module: torch.nn.Module, parts: Sequence[HeldPart], owner: Sequence[int], *, by_name: bool
) -> dict[int, list[PlacedShard]]:
    """Convert the parts of a transformers model to the form that transformers saves; see `saved_parts`.

    Args:
        module: module that may contain a transformers model.
        parts: all parts of the module.
        owner: for each part, the index of the first part of the same parameter.
        by_name: True to convert only parts that have the name of a tensor of the transformers model. `name_map` has
            already given the other parts their checkpoint names.

    Returns:
        Index of a converted part -> its boxes; empty without a transformers model.
    """
    model = transformers_model(module, inside=by_name)
    if model is None:
        return {}
    known = names_in(model) if by_name else None
    chosen = [i for i, part in enumerate(parts) if known is None or part.name in known]
    at = {index: place for place, index in enumerate(chosen)}
    # If `name_map` has renamed only the first of a tied weight's names, the part with this name (the owner) is not in
    # `chosen`. Each other part of the weight is then its own owner.
    owners = [at.get(owner[index], place) for place, index in enumerate(chosen)]
    return dict(zip(chosen, saved_parts(model, [parts[i] for i in chosen], owners), strict=True))


def _refuse_one_name(names: Iterable[tuple[str, str]]) -> None:
    """Raise `ConfigError` if two parameters have the same tensor name, because the planner would treat them as copies.

    `names`: pairs of tensor name and parameter name.
    """
    first: dict[str, str] = {}
    for tensor, parameter in names:
        if first.setdefault(tensor, parameter) != parameter:
            raise ConfigError(
                f"name_map: must give each parameter its own name, got {tensor!r} for both "
                f"{first[tensor]!r} and {parameter!r}"
            )


def parameter_addresses(
    module: torch.nn.Module, name_map: NameMap | None = None
) -> tuple[int, ...]:
    """Return the current addresses of an engine's parameters, in the order of the manifest from `describe_module`."""
    held = own_tensors(module, name_map, role=Role.ENGINE)
    return tuple(local_tensor(one.tensor).data_ptr() for one in held)


def own_tensors(
    module: torch.nn.Module, name_map: NameMap | None = None, *, role: Role | None = None
) -> list[HeldTensor]:
    """Return each tensor of `module` once, under the first of its names, in the order of the manifest's parameters.

    Arguments and errors are those of `held_tensors`, which has an entry for every name.
    """
    own: dict[int, HeldTensor] = {}
    for held in held_tensors(module, name_map, role=role):
        own.setdefault(id(held.tensor), held)
    return list(own.values())


@dataclass(frozen=True, slots=True)
class _State:
    """State of tensors at one time, to detect changes.

    Attributes:
        tensors: per tensor, its address and the number of writes that torch has counted; (0, 0) for tensors that
            engines do not get.
        merged: for each PEFT layer with merged adapters: (`id` of the layer, names of these adapters) -> path of the
            layer.
    """

    tensors: Sequence[tuple[int, int]] = ()
    merged: Mapping[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)


def _merged(
    modules: Sequence[torch.nn.Module],
) -> Iterator[tuple[tuple[int, tuple[str, ...]], str]]:
    """Yield the items of `_State.merged`.

    The write counters of torch do not show a merge, because PEFT writes to `Tensor.data`.
    """
    if "peft" not in sys.modules:
        return
    for top in modules:
        for path, module in top.named_modules():
            if merged := vars(module).get("merged_adapters"):
                yield (id(module), tuple(merged)), path


@final
class LiveTensors:
    """Tensors of modules that were described in a manifest.

    Every update looks up the tensors again, and compares them with the description. A parameter may move, become another
    tensor object, or change its place in the module. If engines get a parameter (`read`), its name, dtype, shape,
    strides and this rank's part must not change. A lookup costs some microseconds per module and less per tensor,
    unless a module has changed. This object stores no reference to a tensor. Thread-safe. Only `watch` changes the
    modules, so that an agent's thread may look up tensors while the trainer runs a forward pass.

    Args:
        modules: the modules.
        walk: function that returns all tensors of the modules, each once.
        held: the described tensors, in manifest order. None if they are the current result of `walk`.

    Raises:
        UnsupportedLayout, ManifestError: see `local_shard`.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        walk: Callable[[], Sequence[HeldTensor]],
        held: Sequence[HeldTensor] | None = None,
    ) -> None:
        self._modules, self._walk = tuple(modules), walk
        held = walk() if held is None else held
        # Use names without wrappers, because a module may get or lose a wrapper such as `torch.compile` later.
        self._parts = {
            _bare(one.name, ()): local_shard(one.name, one.tensor, by_fsdp=one.by_fsdp)
            for one in held
        }
        self._names = tuple(self._parts)
        self._nbytes = [_reach(local_tensor(one.tensor)) for one in held]
        self._signatures = [_signature(one.tensor) for one in held]
        self._by_fsdp = [one.by_fsdp for one in held]
        self._is_read = [True] * len(held)
        self._addresses = [-1] * len(held)
        self._located: tuple[ParameterMemory, ...] = ()
        self._allocations = _HostAllocations()
        self._registered: tuple[list[str], list[int]] = [], []
        self._positions: list[int] = []
        self._watched = _State()
        self._refusal = ""
        # A trainer's thread calls `watch` while an agent's thread calls `locate`.
        self._lock = threading.Lock()

    def read(self, indices: Collection[int]) -> None:
        """Set which tensors engines get, by manifest index. All other tensors may change, move or disappear."""
        with self._lock:
            new = [index for index in indices if not self._is_read[index]]
            self._is_read = [index in indices for index in range(len(self._names))]
            if new and self._watched.tensors:
                now, watched = self._state(self._find()).tensors, [*self._watched.tensors]
                for index in new:
                    watched[index] = now[index]
                self._watched = replace(self._watched, tensors=watched)

    def locate(self) -> tuple[ParameterMemory, ...]:
        """Return the memory of each tensor, in manifest order.

        If no tensor has moved and no memory was freed, return the same tuple object as the last call.

        Also record the state of the tensors. Later calls of `changed` compare with this state.

        Raises:
            PlanError: a tensor that engines get is missing, has another layout or has no memory; or the modules have a
                new parameter; or the last `watch` found a gathered copy that was changed in place.
            UnsupportedLayout: see `check_memory`.
        """
        with self._lock:
            if self._refusal:
                raise PlanError(self._refusal)
            tensors = self._find()
            locals_here: list[torch.Tensor | None] = []
            for index, tensor in enumerate(tensors):
                local = self._as_described(index, tensor)
                address = 0 if local is None else local.data_ptr()
                if local is not None and address != self._addresses[index]:
                    refuse_freed(self._names[index], local)
                if address != self._addresses[index]:
                    self._addresses[index] = address
                    # Look up all storages again, because a tensor with its old address may have a new storage.
                    self._located = ()
                locals_here.append(local)
            if not self._located or self._allocations.have_ended():
                generations = self._allocations.generations_of(locals_here)
                self._located = tuple(map(_memory_of, locals_here, self._nbytes, generations))
            self._watched = self._state(tensors)
            return self._located

    def _as_described(self, index: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Check that a tensor has the same layout as at connect time, and return its local part.

        A tensor that engines do not get may change. If it was removed or freed, or its layout has changed, return None.

        Raises:
            UnsupportedLayout, PlanError: engines get the tensor, and its layout has changed.
        """
        is_same = tensor is not None and _signature(tensor) == self._signatures[index]
        if self._is_read[index] and tensor is not None:
            if not is_same:
                self._compare(index, tensor)
            return local_part(tensor)
        if tensor is None or not is_same or _is_freed(local_part(tensor)):
            return None
        return local_part(tensor)

    def watch(self) -> None:
        """Reshard FSDP2 modules, and record the state of the tensors. Later calls of `changed` compare with this state.

        Call this in the thread that runs the forward passes. If a gathered copy was changed in place, this method does
        not raise, but the next `locate` does. All ranks call `locate` in the same phase, so they refuse the version
        together. In contrast to `locate`, this method does not check the layout of tensors.

        Raises:
            PlanError: see `refuse_unmerged`.
        """
        with self._lock:
            self._watched, self._refusal = _State(), ""
            try:
                for top in self._modules:
                    for module in top.modules():
                        if isinstance(module, FSDPModule):
                            _reshard(module)
            except PlanError as error:
                self._refusal = str(error)
            with suppress(WindlassError, RuntimeError):
                self._watched = self._state(self._find())
            names = zip(self._names, self._is_read, strict=True)
            refuse_unmerged(self._modules, {name for name, is_read in names if is_read})

    def changed(self) -> str:
        """Return the name of the first tensor that has changed since the last `locate` or `watch`, or an empty text.

        A tensor has changed if it has moved or if torch has counted a write to it. torch counts only writes of its
        operators. It does not count writes through `Tensor.data`, numpy or other libraries. Of the
        uncounted writes, this method detects only merging and unmerging of PEFT adapters.
        """
        with self._lock:
            if not self._watched.tensors:
                return ""
            now = self._state(self._find())
            both = zip(self._parts, self._is_read, now.tensors, self._watched.tensors, strict=False)
            written = next((name for name, read, has, was in both if read and has != was), "")
            differing = now.merged.keys() ^ self._watched.merged.keys()
            if written or not differing:
                return written
            layers = {**self._watched.merged, **now.merged}
            return self._name_in(next(path for key, path in layers.items() if key in differing))

    def _state(self, tensors: Sequence[torch.Tensor | None]) -> _State:
        counts = [
            (local_part(tensor).data_ptr(), _num_writes(tensor))
            if read and tensor is not None
            else (0, 0)
            for tensor, read in zip(tensors, self._is_read, strict=True)
        ]
        return _State(counts, dict(_merged(self._modules)))

    def _name_in(self, path: str) -> str:
        """Return the name of the first described tensor in the layer at `path`. Return `path` if there is none."""
        bare = _bare(f"{path}.", ())
        return next((name for name in self._parts if name.startswith(bare)), path)

    def _find(self) -> list[torch.Tensor | None]:
        """Return the tensors in manifest order; None for a removed tensor that engines do not get.

        Do not store the tensors: a reference, even a weak one, would make torch refuse to move a module's tensors
        (`Module.to`, `torch.utils.swap_tensors`).

        Raises:
            PlanError: a tensor that engines get is missing, or the modules have a new parameter.
        """
        keys, tensors = _registered(self._modules)
        identities = [id(tensor) for tensor in tensors]
        if self._positions and self._registered == (keys, identities):
            return _at(self._positions, tensors)
        walked = self._walk()
        held = {_bare(one.name, ()): one.tensor for one in walked}
        is_read = zip(self._names, self._is_read, strict=True)
        gone = [name for name, read in is_read if read and name not in held]
        new = [
            one.name
            for one in walked
            if not one.is_buffer and _bare(one.name, ()) not in self._parts
        ]
        if gone or new:
            self._refuse_fsdp1()
            raise PlanError(
                f"parameters must be the same as when this rank connected, got {len(gone)} missing "
                f"{gone[:3]} and {len(new)} new {new[:3]}: connect again"
            )
        ordered = [held.get(name) for name in self._parts]
        keys, tensors = _registered(self._modules)
        identities = [id(tensor) for tensor in tensors]
        at = {identity: position for position, identity in enumerate(identities)}
        known = all(tensor is None or id(tensor) in at for tensor in ordered)
        self._positions = [at.get(id(tensor), -1) for tensor in ordered] if known else []
        self._registered = keys, identities
        return ordered

    def _refuse_fsdp1(self) -> None:
        for module in self._modules:
            for path, child in module.named_modules():
                if isinstance(child, FullyShardedDataParallel):
                    _refuse_cut_by_fsdp1(path, child)

    def _compare(self, index: int, tensor: torch.Tensor) -> None:
        """Compare a tensor with its description. If the layout is the same, store the tensor's present signature.

        Raises:
            UnsupportedLayout, PlanError: the layout of the tensor has changed.
        """
        name = self._names[index]
        check_memory(name, tensor)
        if tuple(tensor.shape) != self._parts[name].shape:
            self._refuse_fsdp1()
        then, now = self._parts[name], local_shard(name, tensor, by_fsdp=self._by_fsdp[index])
        for part in fields(HeldPart):
            was, has = getattr(then, part.name), getattr(now, part.name)
            if was != has:
                raise PlanError(
                    f"parameter {name!r}: {part.name} must be {was}, as when this rank connected, got "
                    f"{has}: connect again"
                )
        self._signatures[index] = _signature(tensor)


def _signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a summary of a tensor's layout that is cheap to compare.

    Strided tensors with equal signatures have equal layouts. For other tensors, the signature has no local shape or dtype.
    """
    local = local_part(tensor)
    spec = tensor._spec if isinstance(tensor, DTensor) else None
    if local.layout is not torch.strided:
        return type(local), local.layout, spec
    bits = local.is_neg(), local.is_conj()
    kind = type(local), local.device.type, local.dtype
    return kind, local.shape, local.stride(), bits, spec


def _at(positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the tensors at these positions; None at -1."""
    return [None if position < 0 else tensors[position] for position in positions]


def _memory_of(local: torch.Tensor | None, nbytes: int, generation: int) -> ParameterMemory:
    if local is None:
        return ParameterMemory(0, nbytes)
    storage = local.untyped_storage()
    around = storage.data_ptr(), storage.nbytes()
    return ParameterMemory(local.data_ptr(), nbytes, around, generation)


@final
class _HostAllocations:
    """Numbers the storages of tensors in host memory, to notice that a storage was freed.

    Addresses are not enough for this, because a later storage may have the same addresses. The weak references keep no
    memory allocated, and torch can still move the module's tensors.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._last = 0

    def have_ended(self) -> bool:
        """Return whether a storage has been freed since the last call of `generations_of`."""
        return any(storage.expired() for storage, _ in self._known.values())  # type: ignore[no-untyped-call]

    def generations_of(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Return one number per tensor: the number of its storage, or 0 for None and for a tensor outside of host memory."""
        before, self._known, found = self._known, {}, list[int]()
        for tensor in tensors:
            if tensor is None or tensor.device.type != "cpu":
                found.append(0)
                continue
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            # A weak reference keeps torch's `StorageImpl`, also after its memory is freed. So no later storage gets the
            # same `cdata`.
            if (known := self._known.get(storage.cdata) or before.get(storage.cdata)) is None:
                self._last += 1
                known = storage, self._last
            self._known[storage.cdata] = known
            found.append(known[1])
        return found


def _num_writes(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes that torch has counted for a tensor.

    torch counts optimizer steps in the version of a DTensor, and other writes in the version of its local tensor.
    """
    local = local_part(tensor)
    found = 0 if local.is_inference() else local._version
    return found if local is tensor or tensor.is_inference() else found + tensor._version


def _registered(
    modules: Sequence[torch.nn.Module],
) -> tuple[list[str], list[torch.Tensor]]:
    """Return the names of all tensors and child modules, and all tensors, in an order that depends only on the modules.

    For a parameter that FSDP2 has gathered, return its shard.
    """
    keys: list[str] = []
    tensors: list[torch.Tensor] = []
    left, seen = [*modules], set[int]()
    gathering: dict[tuple[int, str], FSDPParam] = {}
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, FSDPModule):
            gathering |= _places_of(module)
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    keys.append(key)
                    tensors.append(_shard_of(gathering, module, key, tensor))
        if module._modules:
            keys.extend(module._modules)
            left.extend(child for child in module._modules.values() if child is not None)
    return keys, tensors


def _places_of(module: FSDPModule) -> dict[tuple[int, str], FSDPParam]:
    """Return the places at which the parameters of an FSDP2 module are registered.

    Returns:
        (`id` of a submodule, name of the parameter in this submodule) -> FSDP2's object for the parameter.
    """
    found: dict[tuple[int, str], FSDPParam] = {}
    for group in _groups_of(module):
        for one in group.fsdp_params:
            place = one._module_info
            shared = zip(place.shared_modules, place.shared_param_names, strict=True)
            for holder, name in ((place.module, place.param_name), *shared):
                found[id(holder), name] = one
    return found


def _shard_of(
    gathering: Mapping[tuple[int, str], FSDPParam],
    holder: torch.nn.Module,
    name: str,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """Return the sharded parameter if `tensor` is a parameter that FSDP2 has gathered; otherwise return `tensor`.

    FSDP2 may gather and reshard the parameter in another thread at the same time.
    """
    one = gathering.get((id(holder), name))
    if one is None or tensor is one.sharded_param:
        return tensor
    if tensor is vars(one).get("_unsharded_param"):
        return one.sharded_param
    # With `reshard_after_forward=N`, a forward pass leaves parameters sharded on a smaller mesh.
    smaller = one.post_forward_mesh_info
    if smaller is None or smaller is one.mesh_info or not isinstance(tensor, DTensor):
        return tensor
    return one.sharded_param if tensor.device_mesh == smaller.mesh else tensor


def _groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return the parameter groups of an FSDP2 module: any number since torch 2.12, at most one in older releases."""
    state = vars(module._get_fsdp_state())
    one = state.get("_fsdp_param_group")
    return state.get("_fsdp_param_groups") or ([] if one is None else [one])


def _reshard(module: FSDPModule) -> None:
    """Replace gathered parameters by their shards. Call this only in the thread that runs the forward passes.

    Raises:
        PlanError: code has changed a gathered copy in place, and its shard does not have the change.
    """
    for group in _groups_of(module):
        for one in group.fsdp_params:
            if one.sharded_state is ShardedState.UNSHARDED:
                _refuse_changed(module, one)
    module.reshard()


def _refuse_changed(module: FSDPModule, parameter: FSDPParam) -> None:
    """Raise `PlanError` if the gathered copy of a parameter was changed in place and differs from the shard."""
    if not _num_writes(parameter._unsharded_param):
        return
    place = parameter._module_info
    children = cast("torch.nn.Module", module).named_modules()
    path = next((path for path, child in children if child is place.module), "")
    name = parameter._param_fqn or f"{path}.{place.param_name}".lstrip(".")
    whole, shard = parameter._unsharded_param.detach(), parameter.sharded_param
    if type(whole) is torch.Tensor and whole.shape == shard.shape:
        box = local_shard(name, shard, by_fsdp=True).box
        ranges = zip(box.offsets, box.sizes, strict=True)
        part = whole[tuple(slice(start, start + size) for start, size in ranges)]
        # Compare the values, because the counter of writes includes changes that a later gathering has overwritten.
        if not part.numel() or torch.equal(part, local_tensor(shard).to(part.device, part.dtype)):
            return
    raise PlanError(
        f"parameter {name!r}: must be changed while it is sharded, got a change of the copy that FSDP2 has "
        "gathered, which is not published; change the shard, or drop the change by `model.reshard()`"
    )


def _reach(local: torch.Tensor) -> int:
    """Return the number of bytes from the start of the first element to the end of the last element."""
    if not local.numel():
        return 0
    steps = zip(local.shape, local.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * local.element_size()
