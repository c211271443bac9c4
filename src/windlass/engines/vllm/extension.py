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
from windlass.engines.attach import AgentSettings, NoSuchRoute, post
from windlass.engines.capture.capture import Captured, capture
from windlass.engines.capture.codes import checkpoint_specs
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.engine_rank import Membership
from windlass.engines.vllm.adapter import LoraWorker, Slot, capture_adapter, keep_adapter
from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.engines.vllm.settings import REFUSED, refuse_unsafe_config
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
        url: of the server.
        can_hold: whether the loop of every rank may be held between two steps; see `_can_hold`.
    """

    def __init__(self, url: str, *, can_hold: bool) -> None:
        self._url, self._can_hold = url, can_hold

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """`abort` ends what is running; `in_place` keeps requests and their blocks.

        Neither has vLLM clear its caches, which are kept apart by version: with `keep` vLLM 0.32
        would compute the keys and values of all running requests anew.
        """
        if mode not in _MODES:
            raise ConfigError(f"vLLM: pause_mode must be one of {list(_MODES)}, got {mode}")
        if self.holds(mode):
            return False
        post(self._url, f"/pause?mode={_MODES[mode]}&clear_cache=false", {}, deadline_s)
        return True

    def holds(self, mode: PauseMode) -> bool:
        """See `EngineApi.holds`: /pause sleeps for 20 ms after it is done (0.24, 0.32)."""
        return mode is PauseMode.IN_PLACE and self._can_hold

    def hold(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.hold`."""
        body = {"method": "windlass_hold", "args": [pause_id, str(deadline_s)]}
        post(self._url, "/collective_rpc", body, None)

    def rest(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.rest`."""
        body = {"method": "windlass_at_rest", "args": [pause_id], "timeout": deadline_s}
        post(self._url, "/collective_rpc", body, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineApi.resume`."""
        post(self._url, "/resume", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; releases without the route (0.24) stamp nothing."""
        with contextlib.suppress(NoSuchRoute):
            post(self._url, "/update_weight_version", {"new_version": str(version)}, deadline_s)


class WindlassExtension:
    """Methods of every worker. vLLM refuses clashes of names."""

    windlass_membership: Membership

    def windlass_learn(self, encoded: str, folder: str) -> dict[str, list[str] | int]:
        """Capture the layout; comes before `windlass_join`.

        Args:
            encoded: `AgentSettings` as JSON.
            folder: where a rank of this host writes what it returns, too, under its number.

        Returns:
            Checkpoint tensors that left no trace on this rank, and see `Captured`.

        Raises:
            UnsupportedLayout: see `capture`; the engine serves on as before.
            ConfigError: a setting that an update does not survive; or see `Membership.learn`.
        """
        with _refusals_in(folder, self.windlass_rank()):
            learnt = self._windlass_learn(msgspec.json.decode(encoded, type=AgentSettings))
        _leave_in(folder, self.windlass_rank(), learnt)
        return learnt

    def _windlass_learn(self, settings: AgentSettings) -> dict[str, list[str] | int]:
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

        def learn() -> Captured:
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

        captured = self._windlass_membership().learn(
            settings,
            rank,
            learn,
            lambda: VllmApi(settings.url, can_hold=_can_hold(worker.parallel_config)),
        )
        return {
            "unplaced": list(captured.unplaced),
            "constants": list(captured.constants),
            "repacked": list(captured.repacked),
            "recomputed": list(captured.recomputed),
            "buffer_nbytes": captured.buffer_nbytes,
        }

    def windlass_join(self, encoded: str, folder: str) -> None:
        """Join the fleet, once what all ranks have learnt was found good; as `windlass_learn`."""
        settings, rank = msgspec.json.decode(encoded, type=AgentSettings), self.windlass_rank()
        with _refusals_in(folder, rank):
            self._windlass_membership().join(settings, rank)
        _leave_in(folder, rank, None)

    def windlass_rank(self) -> int:
        """Of this process among all of the server's: replicas, stages, tensor-parallel ranks."""
        worker = cast("_Worker", self)
        parallel = worker.parallel_config
        return parallel.data_parallel_index * parallel.world_size + worker.rank

    def windlass_at_rest(self, pause_id: str, namespace: str = "") -> None:
        """Called in the main loop once it is paused.

        Args:
            pause_id: of the pause that an agent has asked for.
            namespace: that the EngineCore has begun for its caches; see `windlass.engines.vllm.caches`.

        Raises:
            ConfigError: it has begun none.
        """
        _require_apart(namespace)
        self._windlass_keep()
        self._windlass_membership().gate.at_rest(pause_id)

    def windlass_hold(self, pause_id: str, deadline_s: str, namespace: str = "") -> None:
        """Called in the main loop between two steps; it stays until the pause ends.

        Args:
            pause_id: see `windlass_at_rest`.
            deadline_s: see `RestGate.hold`.
            namespace: see `windlass_at_rest`.

        Raises:
            ConfigError: see `windlass_at_rest`.
        """
        _require_apart(namespace)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._windlass_keep()
        self._windlass_membership().gate.hold(pause_id, float(deadline_s))

    def windlass_digests(self) -> dict[str, str]:
        """A fingerprint of every tensor that the model of this rank holds, and its adapter."""
        worker = cast("_Worker", self)
        model = worker.model_runner.get_model()
        held = held_by(model, _cache_storages(worker))
        return fingerprints(held) | fingerprints(held_by(Slot(model)))

    def _windlass_keep(self) -> None:
        if self._windlass_membership().settings.adapter:
            keep_adapter(cast("LoraWorker", self))

    def _windlass_membership(self) -> Membership:
        if "windlass_membership" not in vars(self):
            self.windlass_membership = Membership()
        return self.windlass_membership


def _require_apart(namespace: str) -> None:
    if not namespace:
        raise ConfigError(
            "vLLM: its core must keep caches apart by version, and began no namespace"
        )


def _leave_in(folder: str, rank: int, said: dict[str, list[str] | int] | None) -> None:
    if Path(folder).is_dir():
        (Path(folder) / str(rank)).write_bytes(msgspec.json.encode(said))


@contextmanager
def _refusals_in(folder: str, rank: int) -> Iterator[None]:
    """Leave the reason there: vLLM answers 500 with no word of it, and goes on serving."""
    try:
        yield
    except Exception as error:
        if Path(folder).is_dir():
            (Path(folder) / f"{rank}{REFUSED}").write_text(f"{type(error).__name__}: {error}")
        raise


def _can_hold(parallel: _ParallelConfig) -> bool:
    """Whether the loop of a rank may be held between two steps while weights change.

    Not where a step is spread over stages, or is one of several replicas (experts): another rank
    may be in mid-step then, and waits for this one. Not where tokens are stamped (0.32): the
    version is set by the core's loop, which is waiting for the ranks that are held.
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
