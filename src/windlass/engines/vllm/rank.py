"""A rank of vLLM and the layout of its model, whoever asks: a worker extension or a weight-transfer backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from windlass.engines.capture.capture import all_ranks, capture, capture_on_every_rank
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.engine_rank import EngineApi, EngineRank
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm.adapter import LoraWorker, capture_adapter
from windlass.engines.vllm.spec import refuse_unsafe_config


class _Runner(Protocol):
    kv_caches: list[torch.Tensor | list[torch.Tensor]]
    """Recurrent layers have several."""

    def get_model(self) -> torch.nn.Module: ...


class ParallelConfig(Protocol):
    """The part of vLLM's that is used."""

    pipeline_parallel_size: int
    data_parallel_size: int
    """1 for dense models: their replicas know nothing of each other."""

    data_parallel_index: int
    """Of the replica, dense or not."""

    world_size: int
    """Ranks of a replica."""


class Worker(Protocol):
    """The part of vLLM's worker that is used."""

    rank: int
    model_runner: _Runner
    parallel_config: ParallelConfig
    vllm_config: Any

    def reload_weights(
        self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]], is_checkpoint_format: bool
    ) -> None: ...

    def finish_weight_update(self) -> None: ...


def number_of(worker: Worker) -> int:
    """Return a process's number among all of the server's: replicas, stages, tensor-parallel ranks."""
    parallel = worker.parallel_config
    return parallel.data_parallel_index * parallel.world_size + worker.rank


def capture_rank(
    worker: Worker,
    engine_rank: EngineRank,
    settings: AgentSettings,
    api: Callable[[], EngineApi],
    *,
    has_own_scheduler: bool = True,
) -> CapturedLayout:
    """Capture what a rank holds of the checkpoint; in its main loop, on every rank of the server.

    A layout that is refused changes nothing.

    Args:
        worker: vLLM's own, of this process.
        engine_rank: keeps what was captured.
        settings: of the engine.
        api: see `EngineRank.capture`.
        has_own_scheduler: see `refuse_unsafe_config`.

    Raises:
        RefusedByOtherRank: another rank could not, and has the reason.
        ConfigError, UnsupportedLayout: see `refuse_unsafe_config`, `EngineRank.capture` and `capture`.
    """
    rank = number_of(worker)
    refuse_unsafe_config(
        worker.vllm_config, adapter=bool(settings.adapter), has_own_scheduler=has_own_scheduler
    )

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model = worker.model_runner.get_model()
        with (
            _forgotten_if_it_fails(model),
            _experts_packed_anew(model),
            _no_warnings_of_parts(),
        ):
            worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)

    def own() -> Captured:
        if settings.adapter:
            model = worker.model_runner.get_model()
            return capture_adapter(cast("LoraWorker", worker), model, settings, rank)
        return capture(
            worker.model_runner.get_model(),
            checkpoint_specs(Path(settings.checkpoint)),
            load,
            worker=f"{settings.name}/{rank}",
            reference=settings.reference(),
            ignored=cache_storages(worker),
        )

    def captured() -> Captured:
        # Replicas take the call in loops of their own, which may wait for each other in a step.
        if worker.parallel_config.world_size == settings.world_size > 1:
            return capture_on_every_rank(own, _on_every_rank)
        return own()

    return engine_rank.capture(settings, rank, captured, api)


def _on_every_rank(mine: bool) -> bool:
    """Whether it is so on all ranks of this server, each of which is in the same call."""
    from vllm.distributed.parallel_state import get_world_group

    return all_ranks(mine, torch.device("cpu"), get_world_group().cpu_group)


_OF_KERNELS = ("moe_kernel", "moe_quant_config")
"""What refers to tensors of experts: the kernel, and where its block scales lie."""


@contextmanager
def _experts_packed_anew(model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM pack experts for their kernel while it loads weights again.

    vLLM 0.32 packs experts for its CPU kernel only while there is no kernel yet, so weights that
    are loaded again would stay unpacked. The kernels of the start are put back afterwards: they,
    and not those made meanwhile, refer to the tensors that the model keeps.
    """
    held = [holder for module in model.modules() for holder in (module, _method_of(module))]
    kernels = [
        (holder, {name: vars(holder)[name] for name in _OF_KERNELS if name in vars(holder)})
        for holder in {id(h): h for h in held if h is not None}.values()
        if vars(holder).get("moe_kernel") is not None
    ]
    for holder, _ in kernels:
        vars(holder)["moe_kernel"] = None
    try:
        yield
    finally:
        for holder, found in kernels:
            vars(holder).update(found)


_RELOAD = "vllm.model_executor.model_loader.reload"


@contextmanager
def _no_warnings_of_parts() -> Iterator[None]:
    """VLLM warns of every layer for which a load has nothing; capture proves what loads leave."""
    loggers = [logging.getLogger(f"{_RELOAD}.{name}") for name in ("layerwise", "inplace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _forgotten_if_it_fails(model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM forget what it keeps of a load that failed: the next one would go on with it.

    It keeps tensors that have come for a layer beside the model (0.24, 0.32: `LAYERWISE_INFO`),
    and takes a layer that has some for one that is being loaded.
    """
    try:
        yield
    except BaseException:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for module in model.modules():
            if module in LAYERWISE_INFO:
                LAYERWISE_INFO[module].reset()
        raise


def _method_of(module: torch.nn.Module) -> object | None:
    method: object | None = vars(module).get("quant_method")
    return method


def cache_storages(worker: Worker) -> frozenset[int]:
    """Return the addresses of storages that hold keys and values, and no weights."""
    caches = worker.model_runner.kv_caches
    found = [t for c in caches for t in ([c] if isinstance(c, torch.Tensor) else c)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in found)
