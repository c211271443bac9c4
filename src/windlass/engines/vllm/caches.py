"""Keep vLLM's caches of one version of the weights from answering for another.

Prefix cache: the hashes of a request's blocks are salted with a namespace, and every update begins
another one. It is begun in the loop of the EngineCore, by the very call that then brings the workers
to rest or holds them, so that no step is scheduled between the two; nothing has been written yet,
and should it fail, so does the pause. A request enters the namespace of the moment in which vLLM
looks for its prefix: what waited across the update, or was preempted and must compute its keys and
values again, finds nothing older. A running request keeps its blocks and its salt, and what it still
caches is found by nobody who comes later. Blocks of older namespaces are evicted as any that nobody
asks for; no list of blocks is walked while the engine is paused.

Encoder cache: outputs of encoders are found by a hash of their input alone, so that one is emptied,
also before a layout is captured: when vLLM loads weights its workers drop theirs, and the EngineCore,
which is not told, would have them look for what is gone and die. A running request that still needs
an output has the scheduler run the encoder again. What vLLM keeps of multimodal processors are
inputs, which are those of any version.

`--scheduler-cls windlass.engines.vllm.caches._scheduler`, or the plugin `windlass.integrations.vllm.plugin`,
has vLLM import this module in every EngineCore process, before the first request. Read and found to fit in
0.24 and 0.32.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from windlass.engines.vllm.core_calls import take_orders
from windlass.engines.vllm.token_versions import noting, stamps_tokens
from windlass.errors import ConfigError

BACKEND = "windlass"
"""For `--weight-transfer-config`."""

SCHEDULER = "windlass.engines.vllm.caches._scheduler"
"""For `--scheduler-cls`."""
OUTSIDE = "what was computed with older weights stays in caches outside the engine"
"""Why connectors for keys, values and outputs of encoders are refused: not all go by the salt."""
PAUSING_CALLS = frozenset({"windlass_quiesce", "windlass_block"})
"""Methods of workers that the EngineCore calls with one more argument: the namespace it has begun.

A worker that is not given one refuses the pause: this core would mix the versions of its caches.
"""

_HOLDS = "update_weights"
"""vLLM's own call of workers, which a weight-transfer backend of ours holds; its argument is a dict."""
_LOADS, _INITIALISES = "windlass_capture", "init_weight_transfer_engine"


class Salted(Protocol):
    """The part of vLLM's `Request` that decides which blocks of the prefix cache are its own."""

    cache_salt: str | None
    block_hashes: list[bytes]

    def update_block_hashes(self) -> None: ...


class Namespace:
    """What salts begin with: one per version of the weights, unlike any other of any process.

    One per EngineCore. `salt` may be called by another thread, all else is called in its loop.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_salted = False

    def begin(self) -> str:
        """Begin another one and return its name."""
        self._name = uuid.uuid4().hex
        return self._name

    def salt(self, own: str | None) -> str:
        """Return the salt of a request that came now; `own` is what its client gave."""
        self._has_salted = True
        return self._name + (own or "")

    def enter(self, request: Salted) -> None:
        """Hash the request's blocks anew if they are of an older namespace.

        Nothing where no request has been salted: Windlass does not update this engine.

        Args:
            request: holds no blocks; its salt is one of `salt`.
        """
        if not self._has_salted:
            return
        salt = request.cache_salt or ""
        if salt.startswith(self._name):
            return
        request.cache_salt = self.salt(salt[len(self._name) :])
        request.block_hashes.clear()
        request.update_block_hashes()


def _scheduler(**made_with: Any) -> object:
    """Make vLLM's own scheduler, in a core whose caches are kept apart. Called by an EngineCore.

    It notes versions of tokens where vLLM does not: see `windlass.engines.vllm.token_versions`.

    Raises:
        ConfigError: a model for which vLLM has a scheduler of its own.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = made_with["vllm_config"]
    if vars(config).get("diffusion_config") is not None:
        raise ConfigError("vLLM: updates of models that generate by diffusion have not been shown")
    keep_caches_apart()
    made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return (noting(made) if stamps_tokens() else made)(**made_with)


def is_backend_of(config: Any) -> bool:
    """Whether an engine of this `VllmConfig` was started with our weight-transfer backend."""
    transfer = vars(config).get("weight_transfer_config")
    return transfer is not None and bool(transfer.backend == BACKEND)


def drop_encoder_outputs(core: Any) -> None:
    """Have an EngineCore and its workers forget what encoders put out. Called in the core's loop."""
    model = core.vllm_config.model_config
    # What an encoder before a decoder put out is its own request's, and never found again.
    if model.is_multimodal_model and not model.is_encoder_decoder:
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()


@functools.cache
def keep_caches_apart() -> None:
    """Have the EngineCore of this process do what this module says. Once.

    An engine that Windlass does not update, in a process that merely has the plugin, goes on as it did.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.core import EngineCore

    namespace = Namespace()
    preprocess, call = EngineCore.preprocess_add_request, EngineCore.collective_rpc

    def preprocess_add_request(core: Any, request: Any) -> Any:
        config = core.vllm_config
        if config.scheduler_config.scheduler_cls == SCHEDULER or is_backend_of(config):
            request.cache_salt = namespace.salt(request.cache_salt)
        return preprocess(core, request)

    def collective_rpc(
        core: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method == _LOADS:
            take_orders(core)
        of_backend = method in (_HOLDS, _INITIALISES) and is_backend_of(core.vllm_config)
        if method in PAUSING_CALLS or method == _LOADS or of_backend:
            drop_encoder_outputs(core)
        if method in PAUSING_CALLS:
            args = (*args, namespace.begin())
        elif method == _HOLDS and of_backend and kwargs is not None:
            update = {**kwargs["update_info"], "namespace": namespace.begin()}
            kwargs = {**kwargs, "update_info": update}
        found: list[Any] = call(core, method, timeout, args, kwargs)
        return found

    def entering(look_up: Callable[..., Any]) -> Callable[..., Any]:
        def looked_up(manager: Any, request: Any, *limits: Any) -> Any:  # 0.33 has one
            namespace.enter(request)
            return look_up(manager, request, *limits)

        return looked_up

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.collective_rpc = collective_rpc
    KVCacheManager.get_computed_blocks = entering(KVCacheManager.get_computed_blocks)
