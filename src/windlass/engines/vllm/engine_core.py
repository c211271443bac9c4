"""Additions to vLLM's EngineCore: caches separated by version, weight versions of tokens, and calls from a rank.

The plugin `windlass.integrations.vllm.plugin` calls `keep_caches_apart` in every EngineCore process before the first
request. We wrote the patches for vLLM 0.24 and 0.32. In this module, "the core" is the EngineCore, and its loop schedules
steps.

Hold. During a hold, the core's loop waits between two steps while weights change. The core first stops scheduling and
sends out the results of running steps, because vLLM labels tokens with the version at the time of sending. In
releases whose versions Windlass records (below), the core sends these results after the hold. This saves several
milliseconds per pause. vLLM's own pause (`AsyncLLM.pause_generation`) needs a request to the API server and sleeps
for 20 ms at its end. In the pause mode `abort` the core aborts all requests in the call that blocks the workers. vLLM's
own pause took 300 to 500 ms on a busy H200, because the API server handles all aborted answers, and the requests that
clients repeat, before the next call.

Prefix cache. The core adds a namespace to the cache salt of each request, and every update sets a new namespace. A
request gets the current namespace when vLLM looks up its prefix. A request that waited during the update, or that was
preempted, therefore finds no cache blocks of old weights. A running request keeps its cache blocks and its salt; later
requests do not find the blocks that it adds. vLLM evicts blocks of old namespaces like other unused blocks. The core
sets the namespace in its loop, in the same call that quiesces or holds the workers, so that no step comes in between.

Stores outside the engine. Connectors in `STORES` derive the keys of their entries from the block hashes or the cache salt,
so their entries have the namespace, too. A connector may keep the keys of a request that it has looked up. If a request
enters a new namespace after such a lookup (it was preempted, or the connector had no answer yet), the core does not let
the request load entries: the connector's keys belong to old weights.

Prefill and decode in separate engines. A connector in `HANDOVERS` returns the address of a request's entries to the
client, and the client sends the address to the decode engine. The core of the prefill engine adds the identity of the
weights that computed all these entries (`EngineRank.served_weights`, the same on all engines of a fleet). The core of the
decode engine loads the entries only if its own weights have that identity. Otherwise it computes the prompt itself, and
tells the prefill engine to free the entries.

Encoder cache. vLLM's cache of encoder outputs has keys without a salt, so the core clears this cache in every update. If
a running request still needs an output, the scheduler runs the encoder again. The core also clears the cache before a
capture: a load of weights clears the workers' part of the cache, and vLLM would crash if the core still expected an
output there. The cache of multimodal processors contains inputs, which do not depend on weights.

Weight versions of tokens, in releases that do not report them (0.24). The scheduler records the weight version in every
step that it schedules. For each request, it records which version generated which tokens (`Span`), and returns the spans
with the last output of the request in `kv_transfer_params`, because vLLM's server passes on only this field unchanged.
Connectors also use this field, so Windlass refuses them. The ranks' agents know the version: a worker method that was
blocked for an update returns the version to the core before the next step.

vLLM 0.32 records versions itself, and the core sets the version at the end of a hold. With WINDLASS_VLLM_OWN_VERSIONS=1, 0.32 behaves as 0.24.

Calls. If a server has one rank, the rank runs in the core's process and puts a call into the core's own queue; the core
runs the call between two steps. `/collective_rpc` would be slower: the request would wait in the API server behind all
rollout requests that arrive at the end of a trainer step.
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

from windlass.engines.rank_sleep import RankSleep
from windlass.engines.spec import RankStep
from windlass.engines.vllm.backend import is_backend_of
from windlass.engines.vllm.core_sleep import (
    GO_ON,
    RESTS,
    begin,
    go_on,
    is_at_rest,
)
from windlass.envs import environment_value
from windlass.errors import PeerTimeout, PeerUnreachable

_log = logging.getLogger(__name__)
SCHEDULER = "windlass.engines.vllm.engine_core._scheduler"
"""Value for `--scheduler-cls`, for releases that do not report the versions of tokens."""
STORES = ("OffloadingConnector", "MooncakeStoreConnector", "SimpleCPUOffloadConnector")
"""Connectors of vLLM (0.32) whose keys depend on the cache salt, directly or through block hashes.

A live test has updated an engine with each of these connectors.
"""
HANDOVERS = ("NixlConnector", "NixlPullConnector")
"""Connectors of vLLM (0.32) through which a decode engine reads the entries of a prefill engine.

The prefill engine returns the address of the entries in `kv_transfer_params`, before the decode engine reads them.
A live test has updated engines with each of these connectors.
"""
WEIGHTS = "windlass_weights"
"""Worker method that returns the identity of its weights. Also the key of this identity in `kv_transfer_params`."""
_ADDRESS = "remote_block_ids"
"""Key in `kv_transfer_params` if a request may load entries of another engine."""
_INITIAL = "initial"
"""Identity of the weights of an engine that no update has paused yet."""
QUIESCES = "windlass_quiesce"
"""Worker method to which the core passes the new cache namespace as an additional argument.

A worker that gets no namespace refuses the pause, because the core's caches would not be separated by version. If the caller
gives `ABORTS` as the third argument, the core aborts all requests first; with `core_sleep.RESTS`, it wakes the weights.
"""
ABORTS = "aborts"
_SETS_VERSION = "windlass_set_version"
"""Worker method that returns the weight version of later tokens."""
_HOLDS = "update_weights"
"""vLLM's own worker method. With our weight-transfer backend, the core blocks its loop during this call."""
WHOLE = "whole"
"""Key in the `update_info` of `/update_weights`.

If the value is True, the client calls neither `/start_weight_update` nor `/finish_weight_update`, and the core sets the
version.
"""
ORDERS = "windlass_order"
"""Worker method of our weight-transfer backend; the first argument is a `RankStep`."""
OWN_VERSIONS = "WINDLASS_VLLM_OWN_VERSIONS"
"""Environment variable. If it is set, Windlass records the weight versions of tokens also with vLLM 0.32."""
CLIENTS_CHOOSE_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""vLLM's environment variable. If it is set, two requests with the same `request_id` have the same id in the core."""
SPANS = "weight_versions"
"""Key in `kv_transfer_params`: a list of spans in the form of vLLM 0.32 and SGLang."""
_LOOKED_UP, _LOADS_NOTHING = "windlass_looked_up", "windlass_loads_nothing"
"""Attributes of a vLLM request: its prefix was looked up before; a connector must load no entries for it."""
_NOTED, _KEPT = "windlass_weight_version", "windlass_weight_versions"
"""Attributes with the weight version of a scheduled step, and with the spans of a request."""
SLOW_S = 0.1
"""Longest expected duration of a step, in seconds. If a call waits longer for the core's loop, a warning is logged."""
NUM_FRAMES = 8
"""Number of frames of the loop's stack that this warning names."""
_CALL = object()
"""Kind of our entries in the core's queue. vLLM's own entries have the kind of a client's request."""

Span = dict[str, int]
"""Weight version of successive output tokens: keys `version`, `start` and `end` (exclusive)."""


@final
class Namespace:
    """Current cache namespace of one EngineCore: a random prefix of cache salts, new for every update.

    Any thread may call `salt`. Only the core's loop may call the other methods.

    Attributes:
        weights: identity of the current weights. During an update, the random name, which no other engine has.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_salted = False
        self.weights = _INITIAL

    def begin(self) -> str:
        """Set a new random namespace, and return it."""
        self.weights = self._name = uuid.uuid4().hex
        return self._name

    def weights_of(self, request: Any) -> str:
        """Return the identity of the weights that computed all cache entries of a request.

        Return an empty string if weights of several versions computed the entries.
        """
        return self.weights if (request.cache_salt or "").startswith(self._name) else ""

    def salt(self, own: str | None) -> str:
        """Return the salt of a new request, with the current namespace. `own` is the salt that the client chose, if any.

        Until the first call of this method, `enter` changes no request.
        """
        self._has_salted = True
        return self._name + (own or "")

    def enter(self, request: Any) -> None:
        """Move a vLLM `Request` with an older namespace to the current one, and hash its blocks again.

        The request must own no cache blocks yet. If the engine has looked up the request's prefix under the older namespace,
        also mark the request, so that connectors load nothing for it (see `load_current_entries`). If `salt` was never
        called, Windlass does not update this engine, and the request keeps its salt.
        """
        known, salt = vars(request), request.cache_salt or ""
        was_looked_up = known.get(_LOOKED_UP, False)
        known[_LOOKED_UP] = True
        if not self._has_salted or salt.startswith(self._name):
            return
        known[_LOADS_NOTHING] = was_looked_up
        request.cache_salt = self.salt(salt[len(self._name) :])
        request.block_hashes.clear()
        request.update_block_hashes()


@final
class CoreCalls:
    """Calls from a server's only rank to the EngineCore in the same process. Create this object in the core's loop.

    Args:
        core: vLLM's `EngineCoreProc`.
    """

    def __init__(self, core: Any) -> None:
        self._core, self._loop = core, threading.get_ident()

    def call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        """Run a worker method in the core's loop, and wait until it returns. Never call this in the loop's own thread.

        If the loop does not begin the call within `SLOW_S`, log a warning with the loop's current stack frames.

        `deadline_s` is None (no limit) only for a method that blocks until the end of a pause.

        Raises:
            PeerTimeout: the method did not end within `deadline_s`; it may still run.
            PeerUnreachable: the method raised.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        taken = threading.Event()

        def run() -> None:
            taken.set()
            try:
                self._core.collective_rpc(method, args=tuple(args))
                done.set_result(None)
            # Pass the error to the waiting thread, as vLLM's own calls do.
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
    """State of this module for the EngineCore of this process.

    Attributes:
        namespace: current cache namespace.
        version: newest weight version that the workers returned; None before the first version.
        calls: calls into this core; None before the first capture, and if the EngineCore has no loop.
    """

    namespace = Namespace()
    version: int | None = None
    calls: CoreCalls | None = None


own_core = _Core()
"""State of this process's EngineCore."""


def core_calls() -> CoreCalls | None:
    """Return the object that calls methods in this process's EngineCore.

    Return None before the first capture, and in a process without an EngineCore.
    """
    return own_core.calls


def stamps_tokens() -> bool:
    """Return True if Windlass records the weight version of each token, False if vLLM does.

    Call this in vLLM's processes only.
    """
    from vllm.v1.engine.core import EngineCore

    return "set_weight_version" not in vars(EngineCore) or bool(environment_value(OWN_VERSIONS))


def _scheduler(**made_with: Any) -> object:
    """Return vLLM's own scheduler, extended to record the weight version of every token.

    vLLM's EngineCore calls this function instead of a scheduler class.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = made_with["vllm_config"]
    made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return _with_version_records(made)(**made_with)


@functools.cache
def keep_caches_apart() -> None:
    """Patch this process's EngineCore to separate its caches by version and to run a rank's calls. Idempotent.

    The module docstring describes the patches. They do not change an engine that Windlass does not update.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    namespace = own_core.namespace
    preprocess, call = EngineCore.preprocess_add_request, EngineCore.collective_rpc
    handle = EngineCoreProc._handle_client_request

    def preprocess_add_request(core: Any, request: Any) -> Any:
        """Let a new request use only cache entries of the current weights."""
        if is_backend_of(core.vllm_config):
            request.cache_salt = namespace.salt(request.cache_salt)
            if (connector := core.scheduler.get_kv_connector()) is not None:
                load_current_entries(connector, namespace)
        return preprocess(core, request)

    def collective_rpc(
        core: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Do the EngineCore's part of Windlass's own methods here. Let the workers run everything else."""
        if method == ORDERS:
            _prepare_order(core, args[0])
        if method == _HOLDS and kwargs is not None and is_backend_of(core.vllm_config):
            return _update_in_hold(
                core, functools.partial(call, core), timeout, kwargs["update_info"]
            )
        if method == GO_ON:
            go_on(core)
            return []
        if method == QUIESCES:
            return _quiesce(core, functools.partial(call, core, method, timeout), *args)
        found: list[Any] = call(core, method, timeout, args, kwargs)
        if method == _SETS_VERSION:
            _set_version(core, found)
        return found

    def handle_client_request(core: Any, kind: Any, *request: Any) -> Any:
        """Run a call that a rank has queued, or pass the request to vLLM."""
        return request[0]() if kind is _CALL else handle(core, kind, *request)

    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.collective_rpc = collective_rpc
    EngineCoreProc._handle_client_request = handle_client_request
    _enter_at_look_ups(namespace)


def _prepare_order(core: Any, step: str) -> None:
    """Prepare a core for an order to its workers. `step` is the `RankStep` of the order.

    Before a capture, create `own_core.calls` (unless it exists), and clear the encoder cache.

    Raises:
        RuntimeError: the order needs memory that now sleeps. A capture needs all memory. A join needs only the weights.
    """
    from vllm.v1.engine.core import EngineCoreProc

    asleep = core.model_executor.sleeping_tags
    if asleep if step == RankStep.CAPTURE else RankSleep.WEIGHTS in asleep:
        raise RuntimeError("the server sleeps: call POST /wake_up before its ranks join a fleet")
    if step == RankStep.CAPTURE:
        if own_core.calls is None and isinstance(core, EngineCoreProc):
            own_core.calls = CoreCalls(core)
        _drop_encoder_outputs(core)


def _enter_at_look_ups(namespace: Namespace) -> None:
    """Patch vLLM so that a request enters the current namespace when its prefix is looked up."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def entering(look_up: Callable[..., Any]) -> Callable[..., Any]:
        # vLLM 0.33 passes a limit as an additional argument.
        def looked_up(manager: Any, request: Any, *limits: Any) -> Any:
            namespace.enter(request)
            return look_up(manager, request, *limits)

        return looked_up

    # With some connectors, vLLM 0.32 calls `get_computed_blocks_for_connector`.
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
        if name in vars(KVCacheManager):
            setattr(KVCacheManager, name, entering(vars(KVCacheManager)[name]))


def load_current_entries(connector: Any, namespace: Namespace) -> None:
    """Patch the scheduler's side of a connector so that it loads only cache entries of the current weights.

    The patched `get_num_new_matched_tokens` reports that no tokens match in two cases:

    - `Namespace.enter` has marked the request: the connector looked up its prefix before the last update, and may still
      use the keys of that time.
    - The request contains the address of cache entries (`kv_transfer_params`), and different weights computed them.

    When a request finishes, the patched connector adds the identity of the weights to the address of the request's
    entries.

    `connector` is vLLM's `KVConnectorBase_V1`. Idempotent.
    """
    if _LOADS_NOTHING in vars(connector):
        return
    vars(connector)[_LOADS_NOTHING] = True
    match: Callable[..., tuple[int | None, bool]] = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, *told: Any) -> tuple[int | None, bool]:
        """Return no matching tokens for entries of other weights."""
        handover = vars(request).get("kv_transfer_params") or {}
        if handover.get(_ADDRESS) and handover.get(WEIGHTS) != namespace.weights:
            return 0, False
        if not vars(request).get(_LOADS_NOTHING, False):
            return match(request, *told)
        # The scheduler and connectors of vLLM 0.32 honour this setting of a request.
        request.skip_reading_prefix_cache = True
        count, loads_later = match(request, *told)
        return (None, loads_later) if count is None else (0, False)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    # If a connector supports several groups of caches, vLLM calls `request_finished_all_groups`.
    for name in ("request_finished", "request_finished_all_groups"):
        finished = getattr(connector, name, None)
        if finished is not None:
            setattr(connector, name, _with_weights(finished, namespace))


def _with_weights(finished: Callable[..., Any], namespace: Namespace) -> Callable[..., Any]:
    """Wrap a connector's method `finished`, which returns the address of a finished request's cache entries.

    The wrapper adds the identity of the weights that computed the entries to each returned address.
    """

    def request_finished(request: Any, *blocks: Any) -> tuple[bool, dict[str, Any] | None]:
        """Add the identity of the weights to the address of the entries."""
        is_kept, handover = finished(request, *blocks)
        if handover and handover.get(_ADDRESS):
            handover[WEIGHTS] = namespace.weights_of(request)
        return is_kept, handover

    return request_finished


def _quiesce(
    core: Any,
    call: Callable[[tuple[str, str, str]], list[Any]],
    pause_id: str,
    blocked_s: str,
    first: str = "",
) -> list[Any]:
    """Call `windlass_quiesce` in the workers with a new cache namespace; return their results.

    If `first` is `ABORTS`, first abort all requests. If the server sleeps, or if the agent expects it to sleep (`first` is
    `RESTS`), first wake the weights. If `blocked_s` is not empty, block the core's loop until the pause ends, and set the
    version that the workers return.
    """
    if first == ABORTS:
        _abort_requests(core)
    # The server may have fallen asleep since its agent asked for the pause.
    rests = first == RESTS or is_at_rest(core)
    if rests:
        begin(core, pause_id)
    _drop_encoder_outputs(core)
    if not blocked_s:
        return call((pause_id, "", own_core.namespace.begin()))
    # If Windlass records versions, the tokens of running steps keep their version. The update then starts before the core
    # has processed these steps, and clients get the tokens of these steps after the update. But if clients choose the ids of
    # requests, a client may repeat a request that has ended here, and vLLM would give the new request these tokens. Then
    # process the running steps first.
    may_repeat = first == ABORTS and environment_value(CLIENTS_CHOOSE_IDS) not in {"", "0"}
    with _scheduler_paused(core, drain=may_repeat or not stamps_tokens()):
        found = call((pause_id, blocked_s, own_core.namespace.begin()))
    _set_version(core, found)
    if rests:
        go_on(core)
    return found


def _set_version(core: Any, told: list[int | None]) -> None:
    """Set the version of later tokens to the first result of the workers (`told`) that is not None, if any."""
    version = next((v for v in told if v is not None), None)
    if version is None:
        return
    own_core.version = version
    if not stamps_tokens():
        core.set_weight_version(str(version))


def _update_in_hold(
    core: Any, call: Callable[..., list[Any]], timeout: float | None, info: dict[str, object]
) -> list[Any]:
    """Block the core's loop while the workers run vLLM's `update_weights`; return the workers' results.

    If `info` has the key `whole`, call `receive_weights` in the workers instead.
    """
    found: list[Any] = []

    def update(namespace: str) -> int:
        nonlocal found
        told = {**info, "namespace": namespace}
        if told.pop(WHOLE, False):
            return int(min(call(_receive_in_worker, timeout, (told,))))
        found = call(_HOLDS, timeout, (), {"update_info": told})
        # The client sets the version after the update, in a separate call.
        return -1

    hold(core, update)
    return found


def _receive_in_worker(worker: Any, info: dict[str, object]) -> int:
    """Block a worker until the round of a version has ended; see `receive_weights`. The worker calls this function.

    Return the version that the worker serves after the round, or a negative number if it serves no version.
    """
    engine = worker.weight_transfer_engine
    engine.receive_weights(engine.parse_update_info(info))
    return int(engine.served_version)


def hold(core: Any, held: Callable[[str], int]) -> None:
    """Pause vLLM's `EngineCore` between two steps, run `held`, and set the version of later tokens. Called in the core's loop.

    `held` gets the new cache namespace, blocks the workers while weights change, and returns the version that the engine
    then serves (negative to set no version). If the server sleeps, wake its weights before calling `held`, and its KV
    cache afterwards.
    """
    rests = is_at_rest(core)
    with _scheduler_paused(core):
        if rests:
            begin(core, "")
        _drop_encoder_outputs(core)
        version = held(own_core.namespace.begin())
        if version >= 0 and not stamps_tokens():
            core.set_weight_version(str(version))
    if rests:
        go_on(core)


@contextmanager
def _scheduler_paused(core: Any, *, drain: bool = True) -> Iterator[None]:
    """Pause the scheduler, and run the `with` block. Then restore the scheduler's state.

    With `drain`, process the results of all running steps before the block, so that clients get their tokens. This
    function makes the same calls as vLLM's `EngineCoreProc.pause_scheduler` and the core's loop. If the engine has a
    connector and the block raises nothing, set `namespace.weights` of the core to the identity that the workers return.
    If the workers return different identities or an empty one, keep the old identity.
    """
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    before = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while drain and core.batch_queue:
            core._process_engine_step()
        yield
        if scheduler.get_kv_connector() is not None:
            identities: set[str] = set(core.collective_rpc(WEIGHTS))
            if len(identities) == 1:
                own_core.namespace.weights = identities.pop() or own_core.namespace.weights
    finally:
        scheduler.set_pause_state(before)


def _abort_requests(core: Any) -> None:
    """Abort all requests, and send their last outputs. Called in the core's loop.

    vLLM's `EngineCoreProc.pause_scheduler` makes the same calls for the mode `abort`.
    """
    from vllm.v1.request import RequestStatus

    core._send_abort_outputs(core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))


def _drop_encoder_outputs(core: Any) -> None:
    """Clear the encoder cache of an EngineCore and its workers. Called in the core's loop."""
    model = core.vllm_config.model_config
    # In an encoder-decoder model, requests do not share encoder outputs.
    if model.is_multimodal_model and not model.is_encoder_decoder:
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()


def _with_version_records(scheduler: Any) -> Any:
    """Return a subclass of a vLLM scheduler class (0.24, 0.32) that records the weight version of every token."""

    class NotingScheduler(scheduler):  # type: ignore[misc]
        """vLLM's scheduler; it also records the weight version of each step and of each token."""

        def schedule(self, throttle_prefills: bool = False) -> Any:
            """Return the next step, with the version of the weights that will compute it."""
            step = super().schedule(throttle_prefills)
            vars(step)[_NOTED] = own_core.version
            return step

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            """Record the step's version for all new tokens. If a request finishes, add its tokens' versions to the output."""
            version: int | None = vars(scheduler_output)[_NOTED]
            # Look up the requests first: the base class removes a request that has its last token.
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
    """Record in a request's spans that one step generated `num_tokens` tokens with weights of `version`."""
    start = spans[-1]["end"] if spans else 0
    if spans and spans[-1]["version"] == version:
        spans[-1]["end"] = start + num_tokens
    elif num_tokens:
        spans.append({"version": version, "start": start, "end": start + num_tokens})
