"""Refuse parameters whose values are not the values that the model computes with, or that it saves.

A PEFT layer adds an adapter to its base, `modules_to_save` replaces the base by a trained copy, a parametrisation computes
the weight from other parameters, and hooks of `state_dict` change what a checkpoint contains. If only the parameter itself is
published, engines would serve another model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from windlass.errors import PlanError, UnsupportedLayout
from windlass.transfer.saved_names import local_part, without_marks

_log = logging.getLogger(__name__)
_DICTS = (torch.nn.ModuleDict, torch.nn.ParameterDict)


def refuse_unmerged(modules: Sequence[torch.nn.Module], published: Collection[str]) -> None:
    """Raise if a published base weight lacks what its PEFT layer adds, because the adapter is neither merged nor published.

    Args:
        modules: the trainer's modules.
        published: names of the parameters that engines get, without the marks of wrappers.

    Raises:
        PlanError: an active adapter is left out. LoRA adapters that add nothing (`lora_B` is 0) may be left out.
    """
    if "peft" not in sys.modules:
        return
    for top in modules:
        for path, layer in top.named_modules():
            if any("adapter_layer_names" in vars(kind) for kind in type(layer).__mro__):
                _refuse_layer(f"{path}." if path else "", layer, published)


def _refuse_layer(prefix: str, layer: Any, published: Collection[str]) -> None:
    children = layer._modules
    kind = next((kind for kind in ("base_layer", "original_module") if kind in children), "")
    if not kind or children[kind] is None or layer.disable_adapters:
        return
    names = (
        without_marks(f"{prefix}{kind}.{name}") for name, _ in children[kind].named_parameters()
    )
    base = next((name for name in names if name in published), None)
    if base is None:
        return
    merged = vars(layer).get("merged_adapters", ())
    for adapter in layer.active_adapters:
        if adapter in merged:
            continue
        own = dict(_parameters_of(layer, adapter))
        if (
            not own
            or _adds_nothing(own)
            or any(without_marks(prefix + n) in published for n in own)
        ):
            continue
        if kind == "original_module":
            raise PlanError(
                f"parameter {base!r}: must be left out by `name_map`, because the model uses the trained copy "
                f"{without_marks(prefix + next(iter(own)))!r} instead; map the copy to the name of the checkpoint"
            )
        raise PlanError(
            f"parameter {base!r}: must contain its active adapters, got adapter {adapter!r}, which is neither merged nor "
            "published; call `merge_adapter()` before `publish` and `unmerge_adapter()` after it, publish the adapter "
            "(`name_map=adapter_names()`), or call `disable_adapter_layers()`"
        )


def _parameters_of(layer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of one adapter in a PEFT layer, by name in the layer."""
    for container in dict.fromkeys(layer.adapter_layer_names):
        held = layer._modules.get(container)
        if not isinstance(held, _DICTS) or adapter not in held:
            continue
        one = held[adapter]
        if isinstance(one, torch.nn.Module):
            yield from ((f"{container}.{adapter}.{n}", p) for n, p in one.named_parameters())
        else:
            yield f"{container}.{adapter}", one


def _adds_nothing(own: Mapping[str, torch.Tensor]) -> bool:
    factors = [p for n, p in own.items() if n.startswith(("lora_B.", "lora_embedding_B."))]
    is_dora = any(name.startswith("lora_magnitude_vector.") for name in own)
    return bool(factors) and not is_dora and not any(bool(local_part(p).any()) for p in factors)


def refuse_originals(
    module: torch.nn.Module, published: Mapping[str, tuple[str, torch.Tensor]]
) -> None:
    """Raise if a parameter is published under the name of a tensor that the model computes from it, such as by weight norm.

    Args:
        module: the trainer's module.
        published: name in the module -> name in the checkpoint and tensor.

    Raises:
        UnsupportedLayout: `name_map` gives an original the name of the computed tensor. The message names both.
    """
    originals = dict(_originals(module))
    owners = {
        id(tensor): child
        for child in module.modules()
        for tensor in child._parameters.values()
        if tensor is not None
    }
    for name, (tensor_name, tensor) in published.items():
        own, wanted = name.rpartition(".")[2], tensor_name.rpartition(".")[2]
        if own == wanted or id(tensor) not in owners:
            continue
        computed = originals.get(id(tensor)) or (
            wanted if _computes(owners[id(tensor)], wanted, tensor) else ""
        )
        # Checkpoints of older models call the originals of weight norm `weight_g` and `weight_v`.
        if computed and wanted not in {f"{computed}_{part}" for part in ("g", "v", "orig")}:
            raise UnsupportedLayout(
                f"parameter {name!r}: must not be published as {tensor_name!r}, because the module computes {computed!r} from "
                "it; remove the parametrisation, weight norm or pruning before you connect (torch.nn.utils.parametrize."
                "remove_parametrizations, remove_weight_norm, prune.remove), or leave the parameter out with `name_map`"
            )


def _originals(module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the id of each parameter inside a parametrisation or norm of torch, and the name of the computed attribute."""
    for child in module.modules():
        chains = child._modules.get("parametrizations")
        if isinstance(chains, torch.nn.ModuleDict):
            for attribute, chain in chains.items():
                yield from ((id(tensor), attribute) for tensor in chain.parameters())
        # Pruning and the older weight_norm and spectral_norm are hooks. Before the first step, `weight` may share its
        # original's memory.
        for hook in child._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                attribute = vars(hook).get("name") or vars(hook).get("_tensor_name")
                for name, tensor in child._parameters.items():
                    if tensor is not None and name.startswith(f"{attribute}_"):
                        yield id(tensor), attribute


def _computes(owner: torch.nn.Module, attribute: str, original: torch.Tensor) -> bool:
    """Return whether an attribute that is no parameter, buffer or module is a tensor with memory of its own."""
    if any(attribute in held for held in (owner._parameters, owner._buffers, owner._modules)):
        return False
    value = vars(owner).get(attribute)
    if value is None and isinstance(getattr(type(owner), attribute, None), property):
        with torch.no_grad(), suppress(Exception):  # the property of any class
            value = getattr(owner, attribute)
    return isinstance(value, torch.Tensor) and _apart(value, original)


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_part(one), local_part(other)
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def refuse_rewritten(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if `state_dict` of the module gives other values than the published tensors.

    Calls `state_dict` only if a hook or a module class that is not torch's may change its values.

    Args:
        module: the trainer's module.
        tensors: published tensors by name in the module.

    Raises:
        UnsupportedLayout: a hook changes the values of a published tensor. The message names the tensor.
    """
    children = [*module.modules()]
    if not any(map(_rewrites, children)) or any(
        isinstance(child, FullyShardedDataParallel) for child in children
    ):
        return
    try:
        saved = module.state_dict()
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        NotImplementedError,
    ) as error:
        _log.warning("values of `state_dict` are not compared with parameters: %s", error)
        return
    for name, tensor in tensors.items():
        if isinstance(other := saved.get(name), torch.Tensor) and _differs(tensor, other):
            raise UnsupportedLayout(
                f"parameter {name!r}: must have the values that `state_dict` saves, got other values from a hook or an "
                "override of `state_dict`; publish a module whose parameters have the saved values, or leave the "
                "parameter out with `name_map`"
            )


def _rewrites(module: torch.nn.Module) -> bool:
    methods = type(module).state_dict, type(module)._save_to_state_dict
    return any(
        str(function.__module__).partition(".")[0] != "torch"
        for function in (*methods, *module._state_dict_hooks.values())
    )


def _differs(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    one, other = local_part(tensor), local_part(saved)
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return one.shape != other.shape
    if one.numel() == 0 or not _apart(one, other):
        return False
    return not torch.equal(one.to(other.device, other.dtype), other)
