"""What `--worker-extension-cls windlass.engines.vllm.extension.WindlassExtension` adds to a worker.

vLLM makes this a base class of its worker, so `self` is the worker. The methods are called by
`collective_rpc` in the worker's main loop, after every earlier step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import msgspec
import torch

from windlass.config import PauseMode
from windlass.engines.capture.capture import (
    Captured,
    all_ranks,
    capture,
    capture_on_every_rank,
)
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.engine_rank import EngineRank
from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.rank_reports import Secrets, carry_out
from windlass.engines.spec import AgentSettings, CapturedLayout
from windlass.engines.vllm.adapter import LoraWorker, Slot, capture_adapter, keep_adapter
from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.engines.vllm.spec import refuse_unsafe_config
from windlass.errors import ConfigError

__all__ = ["VllmApi", "WindlassExtension"]

multiply_by_parameters()  # vLLM imports this module in a worker before it loads the model

_MODES: Mapping[PauseMode, str] = {PauseMode.ABORT: "abort", PauseMode.IN_PLACE: "keep"}


class _Runner(Protocol):
    kv_caches: list[torch.Tensor | list[torch.Tensor]]
    """Recurrent layers have several."""

    def get_model(self) -> torch.nn.Module: ...


class _ParallelConfig(Protocol):
    pipeline_parallel_size: int
    data_parallel_size: int
    """1 for dense models: their replicas know nothing of each other."""

    data_parallel_index: int
    """Of the replica, dense or not."""

    world_size: int
    """Ranks of a replica."""


class _Worker(Protocol):
    """The part of vLLM's worker that is used."""

    rank: int
    model_runner: _Runner
    parallel_config: _ParallelConfig
    vllm_config: object

    def reload_weights(
        self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]], is_checkpoint_format: bool
    ) -> None: ...


class VllmApi:
    """`EngineApi` over the routes of `VLLM_SERVER_DEV_MODE=1`.

    Args:
        server: in front of the ranks.
        can_block: whether the loop of every rank may be blocked between two steps; see `_can_block`.
    """

    def __init__(self, server: EngineHttp, *, can_block: bool) -> None:
        self._server, self._can_block = server, can_block

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """`abort` ends what is running; `in_place` keeps requests and their blocks.

        Neither has vLLM clear its caches, which are kept apart by version: with `keep` vLLM 0.32
        would compute the keys and values of all running requests anew.
        """
        if mode not in _MODES:
            raise ConfigError(f"vLLM: pause_mode must be one of {list(_MODES)}, got {mode}")
        if self.blocks(mode):
            return False
        self._server.post(f"/pause?mode={_MODES[mode]}&clear_cache=false", {}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:
        """See `EngineApi.blocks`: /pause sleeps for 20 ms after it is done (0.24, 0.32)."""
        return mode is PauseMode.IN_PLACE and self._can_block

    def block(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.block`."""
        body = {"method": "windlass_block", "args": [pause_id, str(deadline_s)]}
        self._server.post("/collective_rpc", body, None)

    def quiesce(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.quiesce`."""
        body = {"method": "windlass_quiesce", "args": [pause_id], "timeout": deadline_s}
        self._server.post("/collective_rpc", body, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineApi.resume`."""
        self._server.post("/resume", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; releases without the route (0.24) stamp nothing."""
        with contextlib.suppress(NoSuchRoute):
            self._server.post("/update_weight_version", {"new_version": str(version)}, deadline_s)


class WindlassExtension:
    """Methods of every worker. vLLM refuses clashes of names."""

    windlass_engine_rank: EngineRank

    def windlass_capture(self, encoded: str, folder: str) -> None:
        """Capture the layout; comes before `windlass_join`. A layout that is refused changes nothing.

        Args:
            encoded: `AgentSettings` as JSON.
            folder: of the launcher, where the rank reports a `CapturedLayout`, see `carry_out`.
        """
        settings = msgspec.json.decode(encoded, type=AgentSettings)
        carry_out(
            folder,
            self.windlass_rank(),
            lambda secrets: msgspec.json.encode(self._windlass_capture(settings, secrets)),
        )

    def _windlass_capture(self, settings: AgentSettings, secrets: Secrets) -> CapturedLayout:
        worker, rank = cast("_Worker", self), self.windlass_rank()
        refuse_unsafe_config(worker.vllm_config, adapter=bool(settings.adapter))

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
                return capture_adapter(cast("LoraWorker", self), model, settings, rank)
            return capture(
                worker.model_runner.get_model(),
                checkpoint_specs(Path(settings.checkpoint)),
                load,
                worker=f"{settings.name}/{rank}",
                reference=settings.reference(),
                ignored=_cache_storages(worker),
            )

        def captured() -> Captured:
            # Replicas take the call in loops of their own, which may wait for each other in a step.
            if worker.parallel_config.world_size == settings.world_size > 1:
                return capture_on_every_rank(own, _on_every_rank)
            return own()

        return self._windlass_engine_rank().capture(
            settings,
            rank,
            captured,
            lambda: VllmApi(
                secrets.server(settings.url), can_block=_can_block(worker.parallel_config)
            ),
        )

    def windlass_join(self, encoded: str, folder: str) -> None:
        """Join the fleet, once what all ranks have captured was found good; as `windlass_capture`."""
        settings, rank = msgspec.json.decode(encoded, type=AgentSettings), self.windlass_rank()

        def join(secrets: Secrets) -> bytes:
            self._windlass_engine_rank().join(settings, rank, secrets.token)
            return b""

        carry_out(folder, rank, join)

    def windlass_rank(self) -> int:
        """Return this process's number among all of the server's: replicas, stages, tensor-parallel ranks."""
        worker = cast("_Worker", self)
        parallel = worker.parallel_config
        return parallel.data_parallel_index * parallel.world_size + worker.rank

    def windlass_quiesce(self, pause_id: str, namespace: str = "") -> None:
        """Called in the main loop once it is paused.

        Args:
            pause_id: of the pause that an agent has asked for.
            namespace: that the EngineCore has begun for its caches; see `windlass.engines.vllm.caches`.

        Raises:
            ConfigError: it has begun none.
        """
        _require_apart(namespace)
        self._windlass_keep()
        self._windlass_engine_rank().gate.quiesced(pause_id)

    def windlass_block(self, pause_id: str, deadline_s: str, namespace: str = "") -> None:
        """Called in the main loop between two steps; it stays until the pause ends.

        Args:
            pause_id: see `windlass_quiesce`.
            deadline_s: see `QuiesceGate.block`.
            namespace: see `windlass_quiesce`.

        Raises:
            ConfigError: see `windlass_quiesce`.
        """
        _require_apart(namespace)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._windlass_keep()
        self._windlass_engine_rank().gate.block(pause_id, float(deadline_s))

    def windlass_digests(self) -> dict[str, str]:
        """Return a fingerprint of every tensor that the model of this rank holds, and its adapter."""
        worker = cast("_Worker", self)
        model = worker.model_runner.get_model()
        held = held_by(model, _cache_storages(worker))
        return fingerprints(held) | fingerprints(held_by(Slot(model)))

    def _windlass_keep(self) -> None:
        if self._windlass_engine_rank().settings.adapter:
            keep_adapter(cast("LoraWorker", self))

    def _windlass_engine_rank(self) -> EngineRank:
        if "windlass_engine_rank" not in vars(self):
            self.windlass_engine_rank = EngineRank()
        return self.windlass_engine_rank


def _require_apart(namespace: str) -> None:
    if not namespace:
        raise ConfigError(
            "vLLM: its core must keep caches apart by version, and began no namespace"
        )


def _on_every_rank(mine: bool) -> bool:
    """Whether it is so on all ranks of this server, each of which is in the same call."""
    from vllm.distributed.parallel_state import get_world_group

    return all_ranks(mine, torch.device("cpu"), get_world_group().cpu_group)


def _can_block(parallel: _ParallelConfig) -> bool:
    """Whether the loop of a rank may be blocked between two steps while weights change.

    Not where a step is spread over stages, or is one of several replicas (experts): another rank
    may be in mid-step then, and waits for this one. Not where tokens are stamped (0.32): the
    version is set by the core's loop, which is waiting for the ranks that are blocked.
    """
    from vllm.v1.engine.core import EngineCore

    shared = parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1
    return not shared and "set_weight_version" not in vars(EngineCore)


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


def _cache_storages(worker: _Worker) -> frozenset[int]:
    caches = worker.model_runner.kv_caches
    found = [t for c in caches for t in ([c] if isinstance(c, torch.Tensor) else c)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in found)
