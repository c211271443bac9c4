"""Refuses a parameter if the model computes with other values, or saves other values.

Otherwise engines would serve another model than the trainer trains. There are four cases:

- A PEFT layer adds an adapter to its base. The base is the original layer inside the PEFT layer.
- `modules_to_save` of PEFT uses a trained copy of a module instead of the original module.
- A parametrisation, weight norm or pruning computes the weight from other parameters.
- A hook or an override of `state_dict` changes the values that a checkpoint contains.
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
    """Raise if engines would compute other values than a PEFT layer of the trainer. Do nothing if PEFT is not imported.

    An adapter may be left out if it changes no value, such as a LoRA adapter with a `lora_B` of zeros.

    Args:
        modules: the trainer's modules.
        published: names of the parameters that engines get, without `WRAPPER_MARKS`.

    Raises:
        PlanError: one of these mistakes was found.
            1. A base is published, and an active adapter is neither merged nor published.
            2. An adapter is merged into a published base, and the base is tied to a layer without this adapter.
            3. An adapter is published without its base, and another active or merged adapter is not published.
            4. An adapter is published without its base, and its scale differs from the scale in its configuration.
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
    """Raise if engines would keep the old values of a base although its adapter is trained.

    Args:
        module: the trainer's module.
        published: names of the parameters that engines get, without `WRAPPER_MARKS`.
        keep: `fnmatch` patterns of engine tensors that keep their values.

    Raises:
        PlanError: a pattern matches a base with a trained adapter, and neither base nor adapter is published.
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
                    "base: return this name for it in `name_map`, and call `merge_adapter()` before `publish`"
                )


@dataclass(frozen=True, slots=True)
class _PeftLayer:
    """A PEFT layer.

    Attributes:
        prefix: path of the layer in the module, with a dot at its end unless it is empty.
        layer: the layer.
        kind: name of the child module that is the base: `base_layer`, or `original_module` for `modules_to_save`.
        bases: all names of the base's parameters, without `WRAPPER_MARKS`. A tied parameter also has names outside of
            the layer.
    """

    prefix: str
    layer: Any
    kind: str
    bases: tuple[str, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are active in a forward pass or merged into the base."""
        active = () if self.layer.disable_adapters else self.layer.active_adapters
        return tuple(dict.fromkeys((*active, *self.merged)))

    @property
    def merged(self) -> tuple[str, ...]:
        """Names of the adapters that are merged into the base."""
        return tuple(vars(self.layer).get("merged_adapters", ()))

    def base_in(self, published: Collection[str]) -> str | None:
        """Return the first parameter name of the layer's base that is published; None if none is."""
        return next((name for name in self.bases if name in published), None)

    def own(self, adapter: str) -> dict[str, torch.Tensor]:
        """Return the parameters of an adapter: name in the module, without `WRAPPER_MARKS` -> parameter."""
        found = _parameters_of(self.layer, adapter)
        return {without_marks(self.prefix + name): parameter for name, parameter in found}

    def adapters_in(self, published: Collection[str]) -> list[str]:
        """Return the names of the adapters with a published parameter."""
        return [a for a in self.adapters if any(name in published for name in self.own(a))]

    def adds_nothing(self, adapter: str) -> bool:
        """Return whether the layer computes the same without the adapter."""
        own = dict(_parameters_of(self.layer, adapter))
        before = self.layer._modules.get("trainable_tokens_original")
        if before is not None and adapter in before:
            return all(
                torch.equal(local_part(p), local_part(before[adapter])) for p in own.values()
            )
        return not own or _adds_nothing(own)

    def is_trained(self) -> bool:
        """Return whether an active or merged adapter has a parameter with `requires_grad`."""
        return any(p.requires_grad for adapter in self.adapters for p in self.own(adapter).values())

    def own_bases(self) -> list[str]:
        """Return the names of the base's parameters inside this layer."""
        return [
            name for name in self.bases if name.startswith(without_marks(self.prefix + self.kind))
        ]

    def merged_parameters(self) -> set[int]:
        """Return the `id` of each parameter of the merged adapters, except adapters that change no value."""
        found = (self.own(a).values() for a in self.merged if not self.adds_nothing(a))
        return {id(parameter) for parameters in found for parameter in parameters}

    def names_without_peft(self) -> set[str]:
        """Return the possible names of the base's parameters in the model without PEFT."""
        names = (without_peft(name) for name in self.bases)
        return {
            shorter for name in names for shorter in (name, name.removeprefix("base_model.model."))
        }


def _peft_layers(top: torch.nn.Module) -> Iterator[_PeftLayer]:
    """Yield each PEFT layer of a module, except layers without a base."""
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
            # Include names outside of the layer, because a tied base may be published under one of these names.
            bases = tuple(name for p in parameters for name in names[id(p)])
            yield _PeftLayer(f"{path}." if path else "", layer, kind, bases)


def _refuse_base(layer: _PeftLayer, base: str, published: Collection[str]) -> None:
    """Check that each active adapter of a layer with a published base is merged, published or without effect.

    Raises:
        PlanError: an adapter is not merged, not published, and has an effect.
    """
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
                f"parameter {base!r}: `name_map` must return None for it, because the model uses the trained copy "
                f"{next(iter(own))!r} instead; for the copy, return the name that this parameter has in the checkpoint"
            )
        raise PlanError(
            f"parameter {base!r}: each active adapter must be merged or published, got adapter {adapter!r}, which is neither; "
            "call `merge_adapter()` before `publish` and `unmerge_adapter()` after it, publish the adapter "
            "(`name_map=adapter_names()`), or call `disable_adapter_layers()`"
        )


def _refuse_tied(layer: _PeftLayer, base: str, merged: Mapping[str, set[int]]) -> None:
    """Raise if an adapter is merged into a base that is tied to a parameter without this adapter.

    Args:
        layer: the PEFT layer of the base.
        base: name of the base's parameter, for the error.
        merged: for all layers, name of a base parameter -> result of `merged_parameters`.

    Raises:
        PlanError: an adapter is merged into such a base.
    """
    here = layer.merged_parameters()
    other = next((name for name in layer.bases if merged.get(name, set()) != here), None)
    if here and other is not None:
        raise PlanError(
            f"parameter {base!r}: must not be tied to {other!r} while an adapter is merged into it, because the trainer's "
            f"model computes with {other!r} without this adapter; untie the two (`tie_word_embeddings=False`), or train the "
            "same tokens of both (`trainable_token_indices`)"
        )


def _refuse_others(layer: _PeftLayer, published: Collection[str]) -> None:
    """Raise if engines with the published adapters would compute other values than the trainer.

    The engines add only the published adapters to their own base. They use the scale from the configuration.

    Raises:
        PlanError: another adapter is active or merged, or a published adapter has another scale than its configuration.
    """
    served = layer.adapters_in(published)
    for adapter in layer.adapters:
        if adapter not in served and not layer.adds_nothing(adapter):
            raise PlanError(
                f"parameter {next(iter(layer.own(adapter)))!r}: must be published, because its adapter {adapter!r} is "
                "active or merged, but engines get only another adapter; deactivate or unmerge it (`set_adapter`, "
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
    """Return the current scale of a LoRA adapter and the scale from its rank and alpha; (1, 1) for other adapters."""
    held = vars(layer)
    if any(adapter not in held.get(name, ()) for name in ("scaling", "r", "lora_alpha")):
        return 1.0, 1.0
    rank = float(held["r"][adapter])
    is_root = held.get("use_rslora", {}).get(adapter, False)
    configured = float(held["lora_alpha"][adapter]) / (math.sqrt(rank) if is_root else rank)
    return float(held["scaling"][adapter]), configured


def _parameters_of(layer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that a PEFT layer has for an adapter, each with its name within the layer."""
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
    """Raise if `name_map` gives a parameter the name of a tensor that the module computes from the parameter.

    A module with weight norm, for example, computes `weight` from `weight_g` and `weight_v`.

    Args:
        module: the trainer's module.
        published: name in the module -> (name in the checkpoint, tensor).

    Raises:
        UnsupportedLayout: a parameter would be published under the name of a tensor that is computed from it.
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
    """Yield the `id` of each parameter from which torch computes an attribute, and the name of the attribute.

    torch does this in parametrisations, pruning, weight norm and spectral norm.
    """
    for child in module.modules():
        chains = child._modules.get("parametrizations")
        if isinstance(chains, torch.nn.ModuleDict):
            for attribute, chain in chains.items():
                yield from ((id(tensor), attribute) for tensor in chain.parameters())
        # Pruning and the older weight_norm and spectral_norm are hooks before the forward pass. Find them here, because
        # `_computes` compares memory, and the computed attribute may share the memory of its original until the first
        # forward pass.
        for hook in child._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                attribute = str(vars(hook).get("name") or vars(hook).get("_tensor_name"))
                for name, tensor in child._parameters.items():
                    if tensor is not None and name.startswith(f"{attribute}_"):
                        yield id(tensor), attribute


def _computes(owner: torch.nn.Module, attribute: str, original: torch.Tensor) -> bool:
    """Return whether a module computes an attribute as a tensor that does not share memory with `original`.

    Args:
        owner: the module.
        attribute: name of the attribute. A registered parameter, buffer or child is not computed.
        original: parameter from which the module may compute it.
    """
    if any(attribute in held for held in (owner._parameters, owner._buffers, owner._modules)):
        return False
    value = vars(owner).get(attribute)
    if value is None and isinstance(getattr(type(owner), attribute, None), property):
        # A property of a user's class may raise any exception.
        with torch.no_grad(), suppress(Exception):
            value = getattr(owner, attribute)
    return isinstance(value, torch.Tensor) and _apart(value, original)


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_part(one), local_part(other)
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def refuse_rewritten(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if `module.state_dict()` returns other values than the published tensors have.

    Only code outside of torch can change the values: a hook of `state_dict`, or a class that overrides it. Do nothing if
    the module has neither hook nor override, or if it contains FSDP1.

    Args:
        module: the trainer's module.
        tensors: name in the module -> published tensor.

    Raises:
        UnsupportedLayout: a published tensor has other values in `state_dict`.
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
                f"parameter {name!r}: a hook or an override of `state_dict` saves other values than the parameter has; "
                "publish a module whose parameters have the saved values, or leave the parameter out with `name_map`"
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
