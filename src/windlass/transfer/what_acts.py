"""Refuse parameters whose values are not the values that the model computes with, or that it saves.

A PEFT layer adds an adapter to its base, `modules_to_save` replaces the base by a trained copy, a parametrisation computes
the weight from other parameters, and hooks of `state_dict` change what a checkpoint contains. If only the parameter itself is
published, engines would serve another model.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from windlass.errors import PlanError, UnsupportedLayout
from windlass.transfer.saved_names import local_part, without_marks, without_peft

_log = logging.getLogger(__name__)
_DICTS = (torch.nn.ModuleDict, torch.nn.ParameterDict)


def refuse_unmerged(modules: Sequence[torch.nn.Module], published: Collection[str]) -> None:
    """Raise if engines would lack what a PEFT layer adds to its base.

    Args:
        modules: the trainer's modules.
        published: names of the parameters that engines get, without the marks of wrappers.

    Raises:
        PlanError: a published base lacks an active adapter that is neither merged nor published; an adapter is published
            and another active or merged adapter is not; or the scale of a published adapter is not that of its
            configuration; or an adapter is merged into a base that the model also uses without the adapter. LoRA adapters that add nothing (`lora_B` is 0) may be left out.
    """
    if "peft" not in sys.modules:
        return
    layers = [layer for top in modules for layer in _peft_layers(top)]
    is_adapter_served = any(
        layer.adapters_in(published) and not layer.base_in(published) for layer in layers
    )
    merged = {name: layer.merged_parameters() for layer in layers for name in layer.own_bases()}
    for layer in layers:
        if base := layer.base_in(published):
            _refuse_base(layer, base, published)
            _refuse_tied(layer, base, merged)
        elif is_adapter_served:
            _refuse_others(layer, published)


def refuse_kept(module: torch.nn.Module, published: Collection[str], keep: Sequence[str]) -> None:
    """Raise if engines keep the base of a PEFT layer that is trained.

    Args:
        module: the trainer's module.
        published: names of the parameters that engines get, without the marks of wrappers.
        keep: patterns (`fnmatch`) of the engine tensors that keep their values.

    Raises:
        PlanError: a pattern matches a base whose adapter is trained, and neither of them is published.
    """
    if "peft" not in sys.modules or not keep:
        return
    for layer in _peft_layers(module):
        if layer.base_in(published) or layer.adapters_in(published) or not layer.is_trained():
            continue
        for name in layer.names_without_peft():
            if pattern := next((p for p in keep if fnmatchcase(name, p)), None):
                raise PlanError(
                    f"keep: must not match {name!r}, which a trained adapter changes, got {pattern!r}; publish the merged "
                    "base (a `name_map` that gives it this name, and `merge_adapter()` before `publish`)"
                )


@dataclass(frozen=True, slots=True)
class _PeftLayer:
    """A layer with adapters.

    Attributes:
        prefix: path of the layer, with a dot at its end unless it is empty.
        layer: the layer.
        kind: name of the child that has the base.
        bases: all names of the base's parameters, without the marks of wrappers.
    """

    prefix: str
    layer: Any
    kind: str
    bases: tuple[str, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that act in a forward pass or are merged."""
        active = () if self.layer.disable_adapters else self.layer.active_adapters
        return tuple(dict.fromkeys((*active, *self.merged)))

    @property
    def merged(self) -> tuple[str, ...]:
        """Names of the merged adapters."""
        return tuple(vars(self.layer).get("merged_adapters", ()))

    def base_in(self, published: Collection[str]) -> str | None:
        """Return the first published name of the base; None if it is not published."""
        return next((name for name in self.bases if name in published), None)

    def own(self, adapter: str) -> dict[str, torch.Tensor]:
        """Return the parameters of an adapter, by name without the marks of wrappers."""
        found = _parameters_of(self.layer, adapter)
        return {without_marks(self.prefix + name): parameter for name, parameter in found}

    def adapters_in(self, published: Collection[str]) -> list[str]:
        """Return the names of the adapters that are published."""
        return [a for a in self.adapters if any(name in published for name in self.own(a))]

    def adds_nothing(self, adapter: str) -> bool:
        """Return whether the layer's values are the same without the adapter."""
        own = dict(_parameters_of(self.layer, adapter))
        before = self.layer._modules.get("trainable_tokens_original")
        if before is not None and adapter in before:
            return all(
                torch.equal(local_part(p), local_part(before[adapter])) for p in own.values()
            )
        return not own or _adds_nothing(own)

    def is_trained(self) -> bool:
        """Return whether an adapter that acts has a parameter that is trained."""
        return any(p.requires_grad for adapter in self.adapters for p in self.own(adapter).values())

    def own_bases(self) -> list[str]:
        """Return the names of the base's parameters in this layer."""
        return [
            name for name in self.bases if name.startswith(without_marks(self.prefix + self.kind))
        ]

    def merged_parameters(self) -> set[int]:
        """Return the `id` of each parameter of merged adapters that change the base."""
        found = (self.own(a).values() for a in self.merged if not self.adds_nothing(a))
        return {id(parameter) for parameters in found for parameter in parameters}

    def names_without_peft(self) -> set[str]:
        """Return the names that the base's parameters have in the model without PEFT."""
        names = (without_peft(name) for name in self.bases)
        return {
            shorter for name in names for shorter in (name, name.removeprefix("base_model.model."))
        }


def _peft_layers(top: torch.nn.Module) -> Iterator[_PeftLayer]:
    names: dict[int, list[str]] = {}
    for name, parameter in top.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(without_marks(name))
    for path, layer in top.named_modules():
        if not any("adapter_layer_names" in vars(kind) for kind in type(layer).__mro__):
            continue
        children = layer._modules
        kind = next(
            (k for k in ("base_layer", "original_module") if children.get(k) is not None), ""
        )
        if kind:
            parameters = cast("torch.nn.Module", children[kind]).parameters()
            # A tied base may be published under the name of a parameter outside of the layer.
            bases = tuple(name for p in parameters for name in names[id(p)])
            yield _PeftLayer(f"{path}." if path else "", layer, kind, bases)


def _refuse_base(layer: _PeftLayer, base: str, published: Collection[str]) -> None:
    for adapter in layer.adapters:
        own = layer.own(adapter)
        if (
            adapter in layer.merged
            or layer.adds_nothing(adapter)
            or any(name in published for name in own)
        ):
            continue
        if layer.kind == "original_module":
            raise PlanError(
                f"parameter {base!r}: must be left out by `name_map`, because the model uses the trained copy "
                f"{next(iter(own))!r} instead; map the copy to the name of the checkpoint"
            )
        raise PlanError(
            f"parameter {base!r}: must contain its active adapters, got adapter {adapter!r}, which is neither merged nor "
            "published; call `merge_adapter()` before `publish` and `unmerge_adapter()` after it, publish the adapter "
            "(`name_map=adapter_names()`), or call `disable_adapter_layers()`"
        )


def _refuse_tied(layer: _PeftLayer, base: str, merged: Mapping[str, set[int]]) -> None:
    """Raise if an adapter is merged into a tied base, but does not act wherever the model uses the base.

    `merged` has the result of `merged_parameters` by name of a base.
    """
    here = layer.merged_parameters()
    other = next((name for name in layer.bases if merged.get(name, set()) != here), None)
    if here and other is not None:
        raise PlanError(
            f"parameter {base!r}: must not be tied while an adapter is merged into it, got a tie to {other!r}, which the model "
            "uses without this adapter in training; untie the weights (`tie_word_embeddings=False`), or train tokens of "
            "both (`trainable_token_indices`)"
        )


def _refuse_others(layer: _PeftLayer, published: Collection[str]) -> None:
    """Raise if engines, which add one adapter to a base of their own, would lack another adapter or have another scale."""
    served = layer.adapters_in(published)
    for adapter in layer.adapters:
        if adapter not in served and not layer.adds_nothing(adapter):
            raise PlanError(
                f"parameter {next(iter(layer.own(adapter)))!r}: must be published, because its adapter {adapter!r} is "
                "active or merged, and engines get another adapter only; deactivate or unmerge it (`set_adapter`, "
                "`unmerge_adapter()`), or publish the merged base"
            )
    for adapter in served:
        scale, configured = _scales(layer.layer, adapter)
        if not math.isclose(scale, configured, rel_tol=1e-6):
            raise PlanError(
                f"parameter {next(iter(layer.own(adapter)))!r}: adapter {adapter!r} must have the scale of its configuration, "
                f"{configured:g}, which engines use, got {scale:g}; undo `set_scale` or `scale_layer` (`unscale_layer()`), or "
                "publish the merged base"
            )


def _scales(layer: Any, adapter: str) -> tuple[float, float]:
    """Return the scale of a LoRA adapter, and the scale by its rank and alpha; 1 for both if it has none."""
    held = vars(layer)
    if any(adapter not in held.get(name, ()) for name in ("scaling", "r", "lora_alpha")):
        return 1.0, 1.0
    rank = float(held["r"][adapter])
    is_root = held.get("use_rslora", {}).get(adapter, False)
    configured = float(held["lora_alpha"][adapter]) / (math.sqrt(rank) if is_root else rank)
    return float(held["scaling"][adapter]), configured


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
                attribute = str(vars(hook).get("name") or vars(hook).get("_tensor_name"))
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
