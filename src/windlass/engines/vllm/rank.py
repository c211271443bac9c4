"""Capture the memory layout of a vLLM rank's model."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast, final

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from windlass.element_ids.codes import CheckpointSpec
from windlass.engines.capture.capture import all_ranks, capture, capture_on_every_rank
from windlass.engines.capture.checkpoint import checkpoint_specs, started_with
from windlass.engines.capture.description import Captured
from windlass.engines.engine_rank import EngineApi, EngineRank
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm.adapter import capture_adapter
from windlass.engines.vllm.spec import draft_follows, refuse_unsafe_config
from windlass.transports.registry import transport_name

Worker = Any
"""vLLM's worker of one rank."""


def number_of(worker: Worker) -> int:
    """Return the index of a worker among all ranks of the server: the ranks of earlier replicas come first."""
    # `world_size` is the number of ranks of one replica. `rank` is an index in one replica, except if torchrun has started
    # the ranks of several engines (`external_launcher`): `rank` is then an index among the ranks of all engines.
    parallel = worker.parallel_config
    return int(
        parallel.data_parallel_index * parallel.world_size + worker.rank % parallel.world_size
    )


def capture_rank(
    worker: Worker,
    engine_rank: EngineRank,
    settings: AgentSettings,
    api: Callable[[], EngineApi] | None = None,
) -> CapturedLayout:
    """Capture a rank's layout and store the layout in `engine_rank`. A failed capture does not change the model.

    The main loop of every rank of the server calls this. For `api` see `EngineRank.capture`.

    Raises:
        RefusedByOtherRank: another rank failed to capture its layout, and reports the reason.
        ConfigError, UnsupportedLayout: see `refuse_unsafe_config`, `EngineRank.capture` and `capture`.
    """
    rank = number_of(worker)
    refuse_unsafe_config(
        worker.vllm_config,
        adapter=bool(settings.adapter),
        serves_own_weights=settings.serves_own_weights,
        transport=transport_name(settings.transport),
    )

    model, draft = served_by(worker), _draft_of(worker)
    direct, counts = _DirectCopies(model), SeenTensors()

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        drafts: list[tuple[str, torch.Tensor]] = []
        if draft is not None:
            weights = _collect_draft_tensors(worker, weights, drafts)
        with reloading(model), direct.where_needed(), counted_once(counts):
            worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
            if draft is not None and drafts:
                _reload_draft(worker, draft, drafts)

    def own() -> Captured:
        if settings.adapter:
            return capture_adapter(worker, model, settings, rank)
        return capture(
            model,
            _specs_of(worker, Path(settings.checkpoint)),
            load,
            worker=f"{settings.name}/{rank}",
            reference=started_with(settings),
            ignored=cache_storages(worker),
            made_up=settings.made_up,
        )

    def captured() -> Captured:
        # With replicas, use no collective: the loop of one replica may wait in a step for another replica.
        if worker.parallel_config.world_size == settings.world_size > 1:
            return capture_on_every_rank(own, _on_every_rank)
        return own()

    return engine_rank.capture(settings, rank, captured, api)


def served_by(worker: Worker) -> torch.nn.Module:
    """Return the model of a rank. If updates reach its draft model, return a module that contains both models."""
    target, draft = worker.model_runner.get_model(), _draft_of(worker)
    return target if draft is None else torch.nn.ModuleDict({"target": target, "draft": draft})


def models_of(worker: Worker) -> Sequence[torch.nn.Module]:
    """Return all models of a rank: the module of `served_by`, and the draft model if updates do not reach it."""
    draft = _any_draft_of(worker)
    if draft is None or draft_follows(worker.vllm_config):
        return (served_by(worker),)
    return (served_by(worker), draft)


def _draft_of(worker: Worker) -> torch.nn.Module | None:
    """Return the draft model if updates reach it, else None; see `draft_follows`."""
    return _any_draft_of(worker) if draft_follows(worker.vllm_config) else None


def _any_draft_of(worker: Worker) -> torch.nn.Module | None:
    """Return the draft model of a rank, or None."""
    drafter = vars(worker.model_runner).get("drafter")
    model: Any = None if drafter is None else vars(drafter).get("model")
    # If a draft model runs in CUDA graphs, vLLM wraps it in an object that is not a module.
    is_wrapped = model is not None and not isinstance(model, torch.nn.Module)
    found: torch.nn.Module | None = model.unwrap() if is_wrapped else model
    return found


_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")
"""Beginning of the names of a layer's checkpoint tensors, with the layer's number."""


def _collect_draft_tensors(
    worker: Worker,
    weights: Iterator[tuple[str, torch.Tensor]],
    drafts: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all `weights`. Also append the tensors of the multi-token-prediction (MTP) layers to `drafts`.

    In a checkpoint, these layers have higher numbers than the model's layers, or the prefix `mtp.`.
    """
    num_layers = int(worker.vllm_config.model_config.hf_text_config.num_hidden_layers)
    for name, tensor in weights:
        layer = _LAYER.match(name)
        if name.startswith("mtp.") if layer is None else int(layer[1]) >= num_layers:
            drafts.append((name, tensor))
        yield name, tensor


def _reload_draft(
    worker: Worker, draft: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]
) -> None:
    """Load the draft model, except modules that it shares with the target model.

    The steps are the same as in vLLM's `reload_weights` (0.24, 0.32), which loads the target model only.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    of_target = {id(module) for module in worker.model_runner.get_model().modules()}
    shared = [module for module in draft.modules() if id(module) in of_target]
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(draft)
        with _skipped_by_loaders(chain.from_iterable(m.parameters(recurse=False) for m in shared)):
            cast("Any", draft).load_weights(iter(weights))
        finalize_layerwise_reload(draft, worker.vllm_config.speculative_config.draft_model_config)


@contextmanager
def _skipped_by_loaders(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Make vLLM's loaders skip `parameters` in the `with` block; restore the parameters' weight loaders afterwards."""
    found = [vars(parameter) for parameter in parameters]
    loaders = [attributes.get("weight_loader") for attributes in found]
    for attributes in found:
        attributes["weight_loader"] = lambda *_, **__: None
    try:
        yield
    finally:
        for attributes, loader in zip(found, loaders, strict=True):
            del attributes["weight_loader"]
            if loader is not None:
                attributes["weight_loader"] = loader


_HEAD = "lm_head.weight"
"""End of the output matrix's name."""


def _specs_of(worker: Worker, checkpoint: Path) -> tuple[CheckpointSpec, ...]:
    """Return the checkpoint's tensors, without the output matrix if vLLM has tied it to the embedding.

    If the configuration ties the two matrices but the checkpoint contains both, vLLM (0.32) sets the flag below and loads
    both. If they are equal, vLLM then ties them (`model_loader/weight_tying.py`), and the model has no output matrix.
    """
    specs = checkpoint_specs(checkpoint)
    settings = vars(worker.vllm_config.model_config)
    if not settings.get("word_embeddings_untied_by_checkpoint", False):
        return specs
    if any(name.endswith(_HEAD) for name, _ in worker.model_runner.get_model().named_parameters()):
        return specs
    return tuple(spec for spec in specs if not spec.name.endswith(_HEAD))


def _on_every_rank(mine: bool) -> bool:
    """Return whether `mine` is True on all ranks of this server. Collective."""
    from vllm.distributed.parallel_state import get_world_group

    return all_ranks(mine, torch.device("cpu"), get_world_group().cpu_group)


@final
class _DirectCopies(TorchFunctionMode):
    """Torch function mode for models that call `copy_` on parameters instead of the parameters' weight loaders.

    During a reload (0.32, `model_loader/reload/layerwise.py`), parameters are on the meta device, and vLLM wraps their
    weight loaders to buffer tensors. A direct `copy_` to a parameter would be lost (gpt-oss: experts, sinks), so this mode
    calls a wrapped weight loader instead. It ignores the `copy_` calls that vLLM makes to count elements.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._places: Mapping[int, tuple[torch.nn.Module, str]] = {}
        self._is_needed = True

    @contextmanager
    def where_needed(self) -> Iterator[None]:
        """In the `with` block, apply this torch function mode if the model's loader may need it.

        The mode adds seconds to every load. So if a load makes no direct copies, later loads do not use the mode.
        """
        if not self._is_needed:
            yield
            return
        with self:
            yield
        self._is_needed = bool(self._places)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (_DATA, torch.Tensor.copy_) and not _get_current_dispatch_mode_stack():
            target = args[0]
            if isinstance(target, torch.nn.Parameter) and target.is_meta and not kwargs:
                if func != _DATA:
                    self._load(target, args[1])
                return target
        return func(*args, **(kwargs or {}))

    def _load(self, target: Any, value: torch.Tensor) -> None:
        """Load `value` into the parameter `target` on the meta device. Use vLLM's wrapper of a weight loader."""
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        if id(target) not in self._places:
            self._places = {
                id(parameter): (module, name)
                for module in self._model.modules()
                for name, parameter in module.named_parameters(recurse=False)
            }
        module, name = self._places[id(target)]
        # The parameter's original weight loader may need more arguments, such as an expert's index.
        target.weight_loader = default_weight_loader
        make_online_process_loader(module, name)(target, value)


_Count = Callable[[Any, inspect.BoundArguments], tuple[int, object]]
SeenTensors = dict[tuple[object, ...], tuple[int, object]]
"""Cached counts of elements, by the key that `_key_of` returns."""
_NUMBER_IN_PATH = re.compile(r"\.\d+\.")
"""Index of a layer or an expert in a parameter's path. A weight loader gets the expert's index as an argument, too."""


@contextmanager
def counted_once(known: SeenTensors) -> Iterator[None]:
    """In the `with` block, cache vLLM's counts of the elements that a weight loader copies.

    vLLM's reload (0.24, 0.32) post-processes a layer when all elements of the layer have arrived. To count elements, it
    calls every weight loader once more, with a parameter on the meta device. These calls use a third of a reload's
    time. With the cache, vLLM makes one such call for all identical layers.

    If a cached count were wrong, vLLM would post-process a layer too early, and capture would notice wrong values.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    count: _Count = layerwise.get_numel_loaded

    def counted(loader: Any, arguments: inspect.BoundArguments) -> tuple[int, object]:
        key = _key_of(loader, arguments)
        if key is None:
            return count(loader, arguments)
        if key not in known:
            known[key] = count(loader, arguments)
        return known[key]

    layerwise.get_numel_loaded = counted
    try:
        yield
    finally:
        layerwise.get_numel_loaded = count


def _key_of(loader: Any, arguments: inspect.BoundArguments) -> tuple[object, ...] | None:
    """Return a cache key for a call of a weight loader. Calls with equal keys copy the same number of elements.

    Return None if an argument cannot be part of a key; the count of this call is then not cached.
    """
    method = inspect.ismethod(loader)
    found: list[object] = [loader.__func__, type(loader.__self__)] if method else [loader]
    for name, value in arguments.arguments.items():
        if isinstance(value, torch.Tensor):
            if is_lazy(value):
                return None
            found += name, type(value), value.shape, value.dtype
        elif isinstance(value, str):
            found += name, _NUMBER_IN_PATH.sub(".", value)
        elif value is None or isinstance(value, int | float):
            found += name, value
        else:
            return None
    return tuple(found)


_DATA = vars(torch._C.TensorBase)["data"].__get__
"""Function that torch calls for `tensor.data`."""
_OF_KERNELS = ("moe_kernel", "moe_quant_config")
"""Attributes of a layer that reference the experts' tensors: the kernel, and the configuration with scales."""
_RELOAD = "vllm.model_executor.model_loader.reload"


@contextmanager
def reloading(model: torch.nn.Module) -> Iterator[None]:
    """In the `with` block, change how vLLM (0.24, 0.32) reloads weights.

    - vLLM reads the `__name__` of each weight loader, but a `functools.partial` (MiniMax-M2) has none. Set it.
    - vLLM 0.32 packs the experts of a layer for its CPU kernel only while the layer's kernel object is None. Set it to
      None for the reload. At the end, put the old kernel objects back: they reference the tensors that the model keeps,
      and kernel objects of the reload reference temporary tensors.
    - vLLM logs a warning for each layer that gets no tensors. Suppress the warnings, because capture loads parts of a
      checkpoint.
    - vLLM keeps the tensors of incomplete layers in `LAYERWISE_INFO`. If a load fails, delete these tensors, so that
      the next load does not use them.
    """
    for parameter in model.parameters():
        loader = vars(parameter).get("weight_loader")
        if isinstance(loader, partial):
            vars(loader).setdefault("__name__", "weight_loader")
    holders = {
        id(holder): holder
        for module in model.modules()
        for holder in (module, vars(module).get("quant_method"))
        if holder is not None and vars(holder).get("moe_kernel") is not None
    }
    kernels = [
        (holder, {name: vars(holder)[name] for name in _OF_KERNELS if name in vars(holder)})
        for holder in holders.values()
    ]
    for holder, _ in kernels:
        vars(holder)["moe_kernel"] = None
    loggers = [logging.getLogger(f"{_RELOAD}.{name}") for name in ("layerwise", "inplace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except BaseException:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for module in model.modules():
            if module in LAYERWISE_INFO:
                LAYERWISE_INFO[module].reset()
        raise
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for holder, found in kernels:
            vars(holder).update(found)


def cache_storages(worker: Worker) -> frozenset[int]:
    """Return the addresses of the KV cache's storages, which capture must skip."""
    caches = worker.model_runner.kv_caches
    found = [t for c in caches for t in ([c] if isinstance(c, torch.Tensor) else c)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in found)
