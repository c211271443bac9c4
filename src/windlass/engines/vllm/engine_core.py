"""What Windlass adds to vLLM's EngineCore: caches apart by version, versions of tokens, calls of its own rank.

`--scheduler-cls windlass.engines.vllm.engine_core._scheduler`, or the plugin `windlass.integrations.vllm.plugin`,
has vLLM import this module in every EngineCore process, before the first request. Read and found to fit in
0.24 and 0.32.

A hold: what keeps the workers from stepping while weights change begins with vLLM's own pause of requests that
are kept, without its way through the API server and without the sleep of 20 ms that ends it there
(`AsyncLLM.pause_generation`): nothing is scheduled, and what runs on the workers is read and given out. So
no token waits for an update that was made before it, and all that comes after it is of the version after it.

Prefix cache: the hashes of a request's blocks are salted with a namespace, and every update begins
another one. It is begun in the core's loop, by the very call that then brings the workers to rest or
holds them, so that no step is scheduled between the two; nothing has been written yet, and should it
fail, so does the pause. A request enters the namespace of the moment in which vLLM looks for its
prefix: what waited across the update, or was preempted and must compute its keys and values again,
finds nothing older. A running request keeps its blocks and its salt, and what it still caches is found
by nobody who comes later. Blocks of older namespaces are evicted as any that nobody asks for.

Encoder cache: outputs of encoders are found by a hash of their input alone, so that one is emptied,
also before a layout is captured: when vLLM loads weights its workers drop theirs, and the EngineCore,
which is not told, would have them look for what is gone and die. A running request that still needs
an output has the scheduler run the encoder again. What vLLM keeps of multimodal processors are
inputs, which are those of any version.

Versions of tokens, in releases that do not say them (0.24): the scheduler notes the version in every step
that it schedules, and for every request over how many of its tokens that version held; what was scheduled
before a pause and is read after it keeps the version that made it. The spans leave with the last output of a
request in `kv_transfer_params`, the one place of vLLM's outputs that its server passes on as it is
(connectors, which use it, are refused). The version comes from the agents in the ranks: a loop that was
blocked for an update returns it, before the core schedules the next step. vLLM 0.32 sets a version itself, in
the core's loop: a hold does so as it ends, and where the engine is not held it must be paused by `/pause` for it,
which sleeps for 20 ms; with WINDLASS_VLLM_OWN_VERSIONS=1 it does as 0.24 does.

Calls: a server of one rank runs it in the core's process. `/collective_rpc` comes there through the event loop
of the API server, behind the rollouts that are asked for at once when a trainer ends a step, and just then its
update is due. So a call of that rank goes into the core's own queue, and is carried out between two steps as
that route's is.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from windlass.envs import environment_value
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable

_log = logging.getLogger(__name__)
BACKEND = "windlass"
"""For `--weight-transfer-config`."""
SCHEDULER = "windlass.engines.vllm.engine_core._scheduler"
"""For `--scheduler-cls`."""
OUTSIDE = "what was computed with older weights stays in caches outside the engine"
"""Why connectors for keys, values and outputs of encoders are refused: not all go by the salt."""
QUIESCES = "windlass_quiesce"
"""The method of workers that the EngineCore calls with one more argument: the namespace it has begun.

A worker that is not given one refuses the pause: this core would mix the versions of its caches.
"""
_TELLING_CALLS = frozenset({QUIESCES, "windlass_set_version"})
"""Methods of workers that return the version to note from now on, or None."""
_HOLDS = "update_weights"
"""vLLM's own call of workers, which a weight-transfer backend of ours holds; its argument is a dict."""
WHOLE = "whole"
"""Key in that dict: `/start_weight_update` and `/finish_weight_update` are not called; the core sets the version."""
_LOADS, _INITIALISES = "windlass_capture", "init_weight_transfer_engine"
OWN_VERSIONS = "WINDLASS_VLLM_OWN_VERSIONS"
SPANS = "weight_versions"
"""Key in `kv_transfer_params`: a list of spans, as vLLM 0.32 and SGLang spell them."""
_NOTED, _KEPT = "windlass_weight_version", "windlass_weight_versions"
SLOW_S = 0.1
"""Longer than a step should take."""
NUM_FRAMES = 8
_CALL = object()
"""In the place of vLLM's kind of a client's request."""

Span = dict[str, int]
"""`version` over output tokens [`start`, `end`)."""


@final
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

    def enter(self, request: Any) -> None:
        """Hash the blocks of vLLM's `Request`, which holds none, anew if they are of an older namespace.

        Nothing where no request has been salted: Windlass does not update this engine.
        """
        salt = request.cache_salt or ""
        if not self._has_salted or salt.startswith(self._name):
            return
        request.cache_salt = self.salt(salt[len(self._name) :])
        request.block_hashes.clear()
        request.update_block_hashes()


@final
class CoreCalls:
    """Calls of the EngineCore of this process by the one rank that lives there. Made in the core's loop.

    Args:
        core: vLLM's `EngineCoreProc`.
    """

    def __init__(self, core: Any) -> None:
        self._core, self._loop = core, threading.get_ident()

    def call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        """Run a method of the worker in the core's loop, and return when it has. Called in another thread.

        `deadline_s` is None only for a call that lasts as long as a pause does.

        Raises:
            PeerTimeout: it had not within `deadline_s`; it may yet.
            PeerUnreachable: it raised.
        """
        self._run(method, lambda core: core.collective_rpc(method, args=tuple(args)), deadline_s)

    def hold(self, blocked: Callable[[], int]) -> None:
        """Hold the core between two steps while `blocked` runs in its loop. Called in another thread.

        `blocked` returns the version that is served after it; < 0 for none.

        Raises:
            PeerUnreachable: it raised.
        """
        self._run("hold", lambda core: _hold(core, lambda _namespace: blocked()), None)

    def _run(self, method: str, work: Callable[[Any], object], deadline_s: float | None) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        taken = threading.Event()

        def run() -> None:
            taken.set()
            try:
                work(self._core)
                done.set_result(None)
            # As vLLM's own call: it is raised where the result is asked for.
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)

        self._core.input_queue.put_nowait((_CALL, run))
        if not taken.wait(SLOW_S):
            frame = sys._current_frames().get(self._loop)
            frames = traceback.extract_stack(frame)[-NUM_FRAMES:] if frame else []
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[::-1])
            _log.warning("%s waits for vLLM's core, whose loop is in %s", method, where)
        try:
            error = done.exception(deadline_s)
        except concurrent.futures.TimeoutError:
            raise PeerTimeout(f"vLLM's core: {method}: not within {deadline_s} s") from None
        if error is not None:
            raise PeerUnreachable(
                f"vLLM's core: {method}: {type(error).__name__}: {error}"
            ) from error


class _Core:
    """What this module keeps of the EngineCore of this process.

    Attributes:
        version: that the workers told last.
        calls: once a layout has been captured; None in an engine that has no loop of its own.
    """

    namespace = Namespace()
    version: int | None = None
    calls: CoreCalls | None = None


_own = _Core()


def core_calls() -> CoreCalls | None:
    """Return the core of this process, once a layout has been captured there; None where there is none."""
    return _own.calls


def stamps_tokens() -> bool:
    """Whether Windlass, and not vLLM, says which version made a token. Called in vLLM's processes."""
    from vllm.v1.engine.core import EngineCore

    return "set_weight_version" not in vars(EngineCore) or bool(environment_value(OWN_VERSIONS))


def is_backend_of(config: Any) -> bool:
    """Whether an engine of this `VllmConfig` was started with our weight-transfer backend."""
    transfer = vars(config).get("weight_transfer_config")
    return transfer is not None and bool(transfer.backend == BACKEND)


def _scheduler(**made_with: Any) -> object:
    """Make vLLM's own scheduler, which notes versions of tokens where vLLM does not. Called by an EngineCore."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = made_with["vllm_config"]
    if vars(config).get("diffusion_config") is not None:
        raise ConfigError("vLLM: updates of models that generate by diffusion have not been shown")
    keep_caches_apart()
    made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return (_noting(made) if stamps_tokens() else made)(**made_with)


@functools.cache
def keep_caches_apart() -> None:
    """Have the EngineCore of this process do what this module says. Once.

    An engine that Windlass does not update, in a process that merely has the plugin, goes on as it did.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    namespace = _own.namespace
    preprocess, call = EngineCore.preprocess_add_request, EngineCore.collective_rpc
    handle, look_up = EngineCoreProc._handle_client_request, KVCacheManager.get_computed_blocks

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
        of_backend = method in (_HOLDS, _INITIALISES) and is_backend_of(core.vllm_config)
        loads = method == _LOADS or (method == _INITIALISES and of_backend)
        if loads and _own.calls is None and isinstance(core, EngineCoreProc):
            _own.calls = CoreCalls(core)
        if method == _HOLDS and of_backend and kwargs is not None:
            return _update(core, functools.partial(call, core), timeout, kwargs["update_info"])
        if method == QUIESCES or loads:
            _drop_encoder_outputs(core)
        if method == QUIESCES:
            args = (*args, namespace.begin())
        found: list[Any] = call(core, method, timeout, args, kwargs)
        if method in _TELLING_CALLS:
            _own.version = next((v for v in found if v is not None), _own.version)
        return found

    def handle_client_request(core: Any, kind: Any, *request: Any) -> Any:
        return request[0]() if kind is _CALL else handle(core, kind, *request)

    def get_computed_blocks(manager: Any, request: Any, *limits: Any) -> Any:  # 0.33 has one
        namespace.enter(request)
        return look_up(manager, request, *limits)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.collective_rpc = collective_rpc
    EngineCoreProc._handle_client_request = handle_client_request
    KVCacheManager.get_computed_blocks = get_computed_blocks


def _update(
    core: Any, call: Callable[..., list[Any]], timeout: float | None, info: dict[str, object]
) -> list[Any]:
    """Have the workers do vLLM's own `update_weights`; of a `whole` update nothing comes before or after it."""
    found: list[Any] = []

    def update(namespace: str) -> int:
        nonlocal found
        told = {**info, "namespace": namespace}
        if told.pop(WHOLE, False):
            return int(min(call(_receive, timeout, (told,))))
        found = call(_HOLDS, timeout, (), {"update_info": told})
        return -1  # who has begun it ends it, with the version

    _hold(core, update)
    return found


def _receive(worker: Any, info: dict[str, object]) -> int:
    """Called in a worker that has our backend; returns the version that it serves, < 0 for none."""
    engine = worker.weight_transfer_engine
    engine.receive_weights(engine.parse_update_info(info))
    return int(engine.served_version)


def _hold(core: Any, held: Callable[[str], int]) -> None:
    """Bring vLLM's `EngineCore` to rest while `held` keeps its workers; see the module. Called in its loop.

    `held` is given the namespace that was begun, and returns the version that is served after it, < 0 for none.
    """
    with _quiesced(core):
        _drop_encoder_outputs(core)
        version = held(_own.namespace.begin())
        if version >= 0 and not stamps_tokens():
            core.set_weight_version(str(version))


@contextmanager
def _quiesced(core: Any) -> Iterator[None]:
    """Have nothing be scheduled, and give out what runs, as `EngineCoreProc.pause_scheduler` and its loop do."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    before = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue:
            core._process_engine_step()
        yield
    finally:
        scheduler.set_pause_state(before)


def _drop_encoder_outputs(core: Any) -> None:
    """Have an EngineCore and its workers forget what encoders put out. Called in the core's loop."""
    model = core.vllm_config.model_config
    # What an encoder before a decoder put out is its own request's, and never found again.
    if model.is_multimodal_model and not model.is_encoder_decoder:
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()


def _noting(scheduler: Any) -> Any:
    """Return a scheduler that notes versions, made of one of vLLM's (0.24, 0.32)."""

    class NotingScheduler(scheduler):  # type: ignore[misc]
        """Notes versions; schedules as its base does."""

        def schedule(self, throttle_prefills: bool = False) -> Any:
            step = super().schedule(throttle_prefills)
            vars(step)[_NOTED] = _own.version
            return step

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            version: int | None = vars(scheduler_output)[_NOTED]
            # With its last tokens a request leaves the scheduler's.
            kept = {name: self.requests.get(name) for name in scheduler_output.num_scheduled_tokens}
            found = super().update_from_output(scheduler_output, model_runner_output)
            for output in (each for outputs in found.values() for each in outputs.outputs):
                request = kept.get(output.request_id)
                if request is None or version is None:
                    continue
                spans: list[Span] = vars(request).setdefault(_KEPT, [])
                add_tokens(spans, len(output.new_token_ids), version)
                if output.finish_reason is not None:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), SPANS: spans}
            return found

    return NotingScheduler


def add_tokens(spans: list[Span], num_tokens: int, version: int) -> None:
    """Add the tokens of one step to the spans of a request."""
    start = spans[-1]["end"] if spans else 0
    if spans and spans[-1]["version"] == version:
        spans[-1]["end"] = start + num_tokens
    elif num_tokens:
        spans.append({"version": version, "start": start, "end": start + num_tokens})
