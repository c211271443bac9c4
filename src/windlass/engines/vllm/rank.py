"""A rank of vLLM and the layout of its model, whoever asks: a worker extension or a weight-transfer backend."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast, final

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from windlass.engines.capture.capture import all_ranks, capture, capture_on_every_rank
from windlass.engines.capture.codes import CheckpointSpec, checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.engine_rank import EngineApi, EngineRank
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm.adapter import capture_adapter
from windlass.engines.vllm.spec import refuse_unsafe_config

Worker = Any
"""The one that vLLM made in this process."""


def number_of(worker: Worker) -> int:
    """Return a process's number among all of the server's: replicas, stages, tensor-parallel ranks."""
    parallel = worker.parallel_config  # of one replica, but for its index
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def capture_rank(
    worker: Worker,
    engine_rank: EngineRank,
    settings: AgentSettings,
    api: Callable[[], EngineApi] | None = None,
    *,
    is_launched: bool,
) -> CapturedLayout:
    """Capture what a rank holds of the checkpoint; in its main loop, on every rank of the server.

    A layout that is refused changes nothing. `engine_rank` keeps what was captured.

    Raises:
        RefusedByOtherRank: another rank could not, and has the reason.
        ConfigError, UnsupportedLayout: see `refuse_unsafe_config`, `EngineRank.capture` and `capture`.
    """
    rank = number_of(worker)
    refuse_unsafe_config(
        worker.vllm_config, adapter=bool(settings.adapter), is_launched=is_launched
    )

    model, draft = served_by(worker), _draft_of(worker)
    direct, counts = _DirectCopies(model), _Known()

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        drafts: list[tuple[str, torch.Tensor]] = []
        if draft is not None:
            weights = _set_aside(worker, weights, drafts)
        with reloading(model), direct.where_needed(), _counted_once(counts):
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
            reference=settings.reference(),
            ignored=cache_storages(worker),
            made_up=settings.made_up,
        )

    def captured() -> Captured:
        # Replicas take the call in loops of their own, which may wait for each other in a step.
        if worker.parallel_config.world_size == settings.world_size > 1:
            return capture_on_every_rank(own, _on_every_rank)
        return own()

    return engine_rank.capture(settings, rank, captured, api)


def served_by(worker: Worker) -> torch.nn.Module:
    """Return all that a rank serves: its model, and with it the one that drafts for it, if there is one."""
    target, draft = worker.model_runner.get_model(), _draft_of(worker)
    return target if draft is None else torch.nn.ModuleDict({"target": target, "draft": draft})


def _draft_of(worker: Worker) -> torch.nn.Module | None:
    drafter = vars(worker.model_runner).get("drafter")
    model: Any = None if drafter is None else vars(drafter).get("model")
    is_wrapped = model is not None and not isinstance(model, torch.nn.Module)  # by graphs
    found: torch.nn.Module | None = model.unwrap() if is_wrapped else model
    return found


_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")


def _set_aside(
    worker: Worker,
    weights: Iterator[tuple[str, torch.Tensor]],
    drafts: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors; those of layers for further tokens, which checkpoints number last, go to `drafts`, too."""
    num_layers = int(worker.vllm_config.model_config.hf_text_config.num_hidden_layers)
    for name, tensor in weights:
        layer = _LAYER.match(name)
        if name.startswith("mtp.") if layer is None else int(layer[1]) >= num_layers:
            drafts.append((name, tensor))
        yield name, tensor


def _reload_draft(
    worker: Worker, draft: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]
) -> None:
    """Load the model that drafts as vLLM's `reload_weights` does the target (0.24, 0.32), but what the two share."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    of_target = {id(module) for module in worker.model_runner.get_model().modules()}
    shared = [module for module in draft.modules() if id(module) in of_target]
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(draft)
        with _passed_by(chain.from_iterable(m.parameters(recurse=False) for m in shared)):
            cast("Any", draft).load_weights(iter(weights))
        finalize_layerwise_reload(draft, worker.vllm_config.speculative_config.draft_model_config)


@contextmanager
def _passed_by(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Have a loader leave parameters out; vLLM's reload uses these very ones, and their loaders, again."""
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


def _specs_of(worker: Worker, checkpoint: Path) -> tuple[CheckpointSpec, ...]:
    """Return what the checkpoint holds and vLLM keeps: not the head of a tied model, which is its embedding twice.

    vLLM (0.32, `model_loader/weight_tying.py`) loads both, and ties them again if they are equal.
    """
    specs = checkpoint_specs(checkpoint)
    settings = vars(worker.vllm_config.model_config)
    if not settings.get("word_embeddings_untied_by_checkpoint", False):
        return specs
    if any(name.endswith(_HEAD) for name, _ in worker.model_runner.get_model().named_parameters()):
        return specs
    return tuple(spec for spec in specs if not spec.name.endswith(_HEAD))


def _on_every_rank(mine: bool) -> bool:
    """Whether it is so on all ranks of this server, each of which is in the same call."""
    from vllm.distributed.parallel_state import get_world_group

    return all_ranks(mine, torch.device("cpu"), get_world_group().cpu_group)


@final
class _DirectCopies(TorchFunctionMode):
    """Entered for a load, hands vLLM's reload what a model copies to its parameters itself.

    While vLLM (0.32, `model_loader/reload/layerwise.py`) loads again, parameters have no memory and their weight
    loaders keep what they are given. What a model copies past them would be lost (gpt-oss: experts,
    sinks). A reload that counts what a weight loader copies is let through.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._places: Mapping[int, tuple[torch.nn.Module, str]] = {}
        self._is_needed = True

    @contextmanager
    def where_needed(self) -> Iterator[None]:
        """Enter for a load, and not again once one has copied nothing past its loaders: it takes seconds."""
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
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        if id(target) not in self._places:
            self._places = {
                id(parameter): (module, name)
                for module in self._model.modules()
                for name, parameter in module.named_parameters(recurse=False)
            }
        module, name = self._places[id(target)]
        target.weight_loader = default_weight_loader  # its own asks for an expert's number
        make_online_process_loader(module, name)(target, value)


_Count = Callable[[Any, inspect.BoundArguments], tuple[int, object]]
_Known = dict[tuple[object, ...], tuple[int, object]]
_NUMBER_IN_PATH = re.compile(r"\.\d+\.")
"""Of a layer, or of an expert, which is an argument of its own too."""


@contextmanager
def _counted_once(known: _Known) -> Iterator[None]:
    """Have vLLM count how many elements weight loaders copy once for all tensors that are loaded alike.

    Its reload (0.24, 0.32) calls every weight loader twice: at first with a parameter without memory, to count
    what it copies, since a layer is processed once all of it has come. That is a third of its time. Layers that are
    alike have the same counts; with a wrong one a layer would be processed without what comes later, and would
    fail the proof of a capture.
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
    """Return what a count depends on: kinds of tensors and of modules, other arguments; None if that cannot be told."""
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
_OF_KERNELS = ("moe_kernel", "moe_quant_config")
"""What refers to tensors of experts: the kernel, and where its block scales lie."""
_RELOAD = "vllm.model_executor.model_loader.reload"


@contextmanager
def reloading(model: torch.nn.Module) -> Iterator[None]:
    """Have a load by vLLM's reload (0.24, 0.32) leave what a load at its start does, or no trace if it fails.

    - It asks weight loaders for a `__name__`, which partials (of MiniMax-M2, say) do not have.
    - 0.32 packs experts for its CPU kernel only while there is no kernel yet, so weights that are loaded again
      would stay unpacked. The kernels of the start are put back afterwards: they, and not those made
      meanwhile, refer to the tensors that the model keeps.
    - It warns of every layer for which a load has nothing; capture proves what loads leave.
    - It keeps tensors that have come for a layer beside the model (`LAYERWISE_INFO`), and takes a layer that
      has some for one that is being loaded: after a load that failed the next one would go on with it.
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
    """Return the addresses of storages that hold keys and values, and no weights."""
    caches = worker.model_runner.kv_caches
    found = [t for c in caches for t in ([c] if isinstance(c, torch.Tensor) else c)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in found)
