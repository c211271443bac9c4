"""Additions to vLLM's EngineCore: caches separated by version, versions of tokens, and calls from a rank in its process.

`--scheduler-cls windlass.engines.vllm.engine_core._scheduler`, or the plugin
`windlass.integrations.vllm.plugin`, makes vLLM import this module in every EngineCore process, before the
first request. The patched functions were read in vLLM 0.24 and 0.32.

Hold. While weights change, the core holds its workers between two steps. A hold starts like vLLM's own
pause that keeps requests (`AsyncLLM.pause_generation`), but needs no request to the API server and does not
sleep for 20 ms at the end. The core first stops scheduling and sends out the results of running steps.
Therefore tokens made before the update do not wait for it, and every later token is of the new version.

Prefix cache. The core salts the block hashes of a request with a namespace, and every update begins a new
namespace. The namespace begins in the core's loop, in the same call that then quiesces or holds the workers,
so that no step is scheduled in between. At this point no weights have changed; if beginning the namespace
fails, the pause fails. A request enters the current namespace when vLLM looks up its prefix: a request that
waited during the update, or that was preempted and must compute its keys and values again, finds no older
blocks. A running request keeps its blocks and its salt, and later requests do not find the blocks that it
still adds. vLLM evicts blocks of older namespaces as it evicts any unused block.

Encoder cache. vLLM finds outputs of encoders by a hash of the input alone, so every update empties this
cache. A capture of the layout empties it too: when vLLM loads weights, its workers drop their outputs without
notice to the EngineCore, which would then request missing outputs and crash. If a running request still needs
an output, the scheduler runs the encoder again. The cache of multimodal processors contains inputs, which do
not depend on the version.

Versions of tokens, in releases that do not report them (0.24). The scheduler records the version in every
step that it schedules, and for each request the spans of tokens that each version generated. A step that was
scheduled before a pause and read after it keeps its own version. The spans leave with the last output of a request in
`kv_transfer_params`, the only field that vLLM's server passes on unchanged (connectors, which use it too, are
refused). The version comes from the agents in the ranks: a loop that was blocked for an update returns it
before the core schedules the next step. vLLM 0.32 sets the version itself in the core's loop. A hold sets it
at its end; without a hold, the engine must be paused by `/pause`, which sleeps for 20 ms. With
WINDLASS_VLLM_OWN_VERSIONS=1, 0.32 behaves as 0.24.

Calls. A server of one rank runs the rank in the core's process. `/collective_rpc` would reach it through the
event loop of the API server, behind all rollout requests that arrive when a trainer step ends, and the update
is due at that moment. Therefore the rank puts its call into the core's own queue, and the core runs it
between two steps, like a call through `/collective_rpc`.
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

from windlass.engines.spec import RankStep
from windlass.envs import environment_value
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable

_log = logging.getLogger(__name__)
BACKEND = "windlass"
"""Value for `--weight-transfer-config`."""
SCHEDULER = "windlass.engines.vllm.engine_core._scheduler"
"""Value for `--scheduler-cls`."""
OUTSIDE = "caches outside the engine would keep keys and values of older weights"
"""Reason to refuse connectors for keys and values or for encoder outputs: some of them ignore the cache salt."""
QUIESCES = "windlass_quiesce"
"""Method of workers that the EngineCore calls with an additional argument: the namespace that it has begun.

A worker that receives no namespace refuses the pause, because the core would mix versions in its caches.
"""
_TELLING_CALLS = frozenset({QUIESCES, "windlass_set_version"})
"""Worker methods that return the version to record for later tokens, or None."""
_HOLDS = "update_weights"
"""vLLM's own worker method. With our weight-transfer backend the core holds its workers during this call."""
WHOLE = "whole"
"""Key in the `update_info` of that method. If True, the client calls neither `/start_weight_update` nor
`/finish_weight_update`, and the core sets the version."""
_LOADS = "windlass_capture"
ORDERS = "windlass_order"
"""Method of workers with our weight-transfer backend; its first argument is a `RankStep`."""
OWN_VERSIONS = "WINDLASS_VLLM_OWN_VERSIONS"
SPANS = "weight_versions"
"""Key in `kv_transfer_params`: a list of spans in the form of vLLM 0.32 and SGLang."""
_NOTED, _KEPT = "windlass_weight_version", "windlass_weight_versions"
SLOW_S = 0.1
"""Longest expected step in seconds. A call that waits longer for the core's loop is logged."""
NUM_FRAMES = 8
_CALL = object()
"""Marker of our calls in the core's queue, where vLLM puts the kind of a client's request."""

Span = dict[str, int]
"""`version` of the output tokens [`start`, `end`)."""


@final
class Namespace:
    """Prefix of cache salts: unique per version of the weights and across processes.

    Each EngineCore has one. Any thread may call `salt`; only the core's loop calls the other methods.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_salted = False

    def begin(self) -> str:
        """Begin a new namespace and return its name."""
        self._name = uuid.uuid4().hex
        return self._name

    def salt(self, own: str | None) -> str:
        """Return the salt of a request that arrives now; `own` is the salt that the client gave."""
        self._has_salted = True
        return self._name + (own or "")

    def enter(self, request: Any) -> None:
        """Salt and hash the blocks of a vLLM `Request` again if its namespace is older. It must own no cache blocks yet.

        Do nothing if no request was ever salted: Windlass does not update this engine.
        """
        salt = request.cache_salt or ""
        if not self._has_salted or salt.startswith(self._name):
            return
        request.cache_salt = self.salt(salt[len(self._name) :])
        request.block_hashes.clear()
        request.update_block_hashes()


@final
class CoreCalls:
    """Calls from a server's only rank to the EngineCore in the same process. Create it in the core's loop.

    Args:
        core: vLLM's `EngineCoreProc`.
    """

    def __init__(self, core: Any) -> None:
        self._core, self._loop = core, threading.get_ident()

    def call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        """Run a method of the worker in the core's loop and return when it has ended. Call this from another thread.

        `deadline_s` is None only for a call that lasts as long as a pause.

        Raises:
            PeerTimeout: the method did not end within `deadline_s`; it may still run.
            PeerUnreachable: the method raised.
        """
        self._run(method, lambda core: core.collective_rpc(method, args=tuple(args)), deadline_s)

    def hold(self, blocked: Callable[[], int]) -> None:
        """Hold the core between two steps while `blocked` runs in its loop. Call this from another thread.

        `blocked` returns the version that the engine serves afterwards; < 0 for none.

        Raises:
            PeerUnreachable: `blocked` raised.
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
            # As in vLLM's own calls, the thread that waits for the result gets the error.
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)

        self._core.input_queue.put_nowait((_CALL, run))
        if not taken.wait(SLOW_S):
            frame = sys._current_frames().get(self._loop)
            frames = traceback.extract_stack(frame)[-NUM_FRAMES:] if frame else []
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[::-1])
            _log.warning(
                "%s waits for the loop of vLLM's EngineCore, which is now in %s", method, where
            )
        try:
            error = done.exception(deadline_s)
        except concurrent.futures.TimeoutError:
            raise PeerTimeout(f"vLLM's core: {method} did not end within {deadline_s} s") from None
        if error is not None:
            raise PeerUnreachable(
                f"vLLM's core: {method}: {type(error).__name__}: {error}"
            ) from error


class _Core:
    """State that this module keeps for the EngineCore of this process.

    Attributes:
        version: newest version that the workers reported.
        calls: calls into this core, set when the first capture begins; None in an EngineCore without its own loop.
    """

    namespace = Namespace()
    version: int | None = None
    calls: CoreCalls | None = None


_own = _Core()


def core_calls() -> CoreCalls | None:
    """Return the calls into this process's core; None before the first capture, and in a process without a core."""
    return _own.calls


def stamps_tokens() -> bool:
    """Return whether Windlass, and not vLLM, records the version of each token. Called in vLLM's processes."""
    from vllm.v1.engine.core import EngineCore

    return "set_weight_version" not in vars(EngineCore) or bool(environment_value(OWN_VERSIONS))


def is_backend_of(config: Any) -> bool:
    """Return whether an engine of this `VllmConfig` was started with our weight-transfer backend."""
    transfer = vars(config).get("weight_transfer_config")
    return transfer is not None and bool(transfer.backend == BACKEND)


def _scheduler(**made_with: Any) -> object:
    """Make vLLM's own scheduler, extended to record versions of tokens if vLLM does not. Called by an EngineCore."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = made_with["vllm_config"]
    if vars(config).get("diffusion_config") is not None:
        raise ConfigError("vLLM: updates of models that generate by diffusion have not been tested")
    keep_caches_apart()
    made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return (_noting(made) if stamps_tokens() else made)(**made_with)


@functools.cache
def keep_caches_apart() -> None:
    """Patch the EngineCore of this process as this module describes. Idempotent.

    An engine that Windlass does not update, in a process that only has the plugin, behaves as before.
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
        loads = method == _LOADS or (method == ORDERS and args[0] == RankStep.CAPTURE)
        if loads and _own.calls is None and isinstance(core, EngineCoreProc):
            _own.calls = CoreCalls(core)
        if method == _HOLDS and kwargs is not None and is_backend_of(core.vllm_config):
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

    # vLLM 0.33 passes a limit as an additional argument.
    def get_computed_blocks(manager: Any, request: Any, *limits: Any) -> Any:
        namespace.enter(request)
        return look_up(manager, request, *limits)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.collective_rpc = collective_rpc
    EngineCoreProc._handle_client_request = handle_client_request
    KVCacheManager.get_computed_blocks = get_computed_blocks


def _update(
    core: Any, call: Callable[..., list[Any]], timeout: float | None, info: dict[str, object]
) -> list[Any]:
    """Hold the core while the workers run vLLM's own `update_weights`; a `whole` update needs no other call."""
    found: list[Any] = []

    def update(namespace: str) -> int:
        nonlocal found
        told = {**info, "namespace": namespace}
        if told.pop(WHOLE, False):
            return int(min(call(_receive, timeout, (told,))))
        found = call(_HOLDS, timeout, (), {"update_info": told})
        # A client that began the update with its own call also ends it, with the version.
        return -1

    _hold(core, update)
    return found


def _receive(worker: Any, info: dict[str, object]) -> int:
    """Receive weights in a worker that has our backend; return the version that it then serves, < 0 for none."""
    engine = worker.weight_transfer_engine
    engine.receive_weights(engine.parse_update_info(info))
    return int(engine.served_version)


def _hold(core: Any, held: Callable[[str], int]) -> None:
    """Quiesce vLLM's `EngineCore` and run `held`, which blocks its workers. Called in the core's loop.

    `held` gets the new cache namespace and returns the version that the engine then serves, < 0 for none. See
    "Hold" in the module docstring.
    """
    with _quiesced(core):
        _drop_encoder_outputs(core)
        version = held(_own.namespace.begin())
        if version >= 0 and not stamps_tokens():
            core.set_weight_version(str(version))


@contextmanager
def _quiesced(core: Any) -> Iterator[None]:
    """Pause the scheduler and process the running steps, then run the block and restore the scheduler's state.

    `EngineCoreProc.pause_scheduler` and the core's loop make the same calls.
    """
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
    """Make an EngineCore and its workers drop the outputs of encoders. Called in the core's loop."""
    model = core.vllm_config.model_config
    # In an encoder-decoder model the output belongs to one request and is never looked up by another.
    if model.is_multimodal_model and not model.is_encoder_decoder:
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()


def _noting(scheduler: Any) -> Any:
    """Return a subclass of a vLLM scheduler class (0.24, 0.32) that records the version of every token."""

    class NotingScheduler(scheduler):  # type: ignore[misc]
        """Scheduler that records the version of each step, and otherwise does what its base class does."""

        def schedule(self, throttle_prefills: bool = False) -> Any:
            step = super().schedule(throttle_prefills)
            vars(step)[_NOTED] = _own.version
            return step

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            version: int | None = vars(scheduler_output)[_NOTED]
            # A request leaves the scheduler's table with its last tokens.
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
    """Add the tokens that one step generated with `version` to the spans of a request."""
    start = spans[-1]["end"] if spans else 0
    if spans and spans[-1]["version"] == version:
        spans[-1]["end"] = start + num_tokens
    elif num_tokens:
        spans.append({"version": version, "start": start, "end": start + num_tokens})
