"""SGLang plugin: makes SGLang's own server join a fleet if WINDLASS_CONTROLLER is set.

    WINDLASS_CONTROLLER=http://TRAINER:8000 WINDLASS_TOKEN_FILE=token python -m sglang.launch_server ...

SGLang calls entry points of the group `sglang.srt.plugins` before it reads its settings
(`sglang/srt/plugins/__init__.py`, 0.5.11 and later). The plugin is active if WINDLASS_CONTROLLER is set. In the process
that serves HTTP, the plugin

- refuses settings of the engine that break a rule (`rules_for`), before SGLang loads a model;
- registers the custom weight loader `windlass.engines.sglang.hook.run` on every rank;
- protects private routes (`windlass.engines.private_routes`), and lets orders reach every data-parallel replica;
- lets the pause mode `abort` return as soon as the last request has ended (`pause_at_once`);
- orders the ranks to join the controller's fleet after warm-up. If WINDLASS_CONTROLLER is `wait`, the ranks join when
  `POST /windlass/join` names a controller; after this controller has ended, they can join another controller. A
  launcher starts a server with `wait` and sends this order.

If a server runs on several hosts, only the first host serves HTTP. The plugin checks the same settings on the other hosts
(`--node-rank 1` and so on). Their ranks get orders from the first host, and send reports to it
(`windlass.engines.report_route`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, final

from windlass.config import PauseMode
from windlass.engines.held_server import HeldRoutes
from windlass.engines.join_route import JoinOrder, JoinRoute
from windlass.engines.member import WAIT, Member, keep_key
from windlass.engines.options import refuse_settings
from windlass.engines.private_routes import App, Message, PrivateRoutes, Receive, Send, route_path
from windlass.engines.quantised import require_followed
from windlass.engines.rank_reports import (
    OTHER_NODES_VARIABLE,
    Secrets,
    capture_layouts,
    join_fleet,
)
from windlass.engines.report_route import ReportRoute
from windlass.engines.sglang.orders import HOOK
from windlass.engines.sglang.sleep import RELEASE, report_refusals
from windlass.engines.sglang.spec import (
    ORIGINAL,
    RELEASES,
    SAMPLED,
    SLEEPING,
    is_set,
    num_replicas,
    require_pull,
    rules_for,
    send_step,
)
from windlass.engines.spec import AgentSettings, join_deadline_s, refuse_expandable_segments
from windlass.engines.versions import check_installed, installed_version
from windlass.envs import (
    CONTROLLER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    control_token,
    environment_value,
    set_values,
)
from windlass.errors import ConfigError, WindlassError
from windlass.net.addresses import url_of
from windlass.net.clock import Backoff

ALIVE = "/health_generate"
"""SGLang's route that waits for an answer of a scheduler and of the detokenizer."""
_HTTP = "sglang.srt.entrypoints.http_server"
_OTHER_SERVERS = {
    "SGLANG_RUST_SERVER": "Windlass protects private routes in SGLang's server in Python only",
    "SGLANG_USE_MODELSCOPE": "Windlass reads the checkpoint from a folder or from the Hugging Face Hub",
}
"""Environment variable of SGLang -> reason not to set it."""
_OF_TENSORS = (None, "direct", "flattened_bucket")
"""Values of SGLang's `load_format` that do not name a custom weight loader."""
_log = logging.getLogger(__name__)
_done: set[str] = set()
"""Names of the steps that this process has done and must not repeat."""


def load() -> None:
    """Register the plugin. Idempotent.

    SGLang and `windlass.engines.sglang.serve` call this in every process of a server. `_prepare` checks the
    settings. This function does not, because SGLang would only log its exception and start the server.
    """
    if not environment_value(CONTROLLER_VARIABLE) or not _is_first_call("load"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang calls `check_server_args` after it has resolved the settings and before it starts ranks.
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.check_server_args", _prepare, HookType.BEFORE
    )


def _check_variables() -> None:
    """Check the server's environment variables.

    Raises:
        ConfigError: a variable of `_OTHER_SERVERS` is set.
    """
    for variable, reason in _OTHER_SERVERS.items():
        if is_set(variable):
            raise ConfigError(f"{variable} must not be set: {reason}")
    if is_set(ORIGINAL):
        _log.warning("%s is set: this server is not fit for rollouts, since %s", ORIGINAL, SAMPLED)


def _is_first_call(step: str) -> bool:
    """Return True at the first call for a step in this process, False at every later call."""
    if step in _done:
        return False
    _done.add(step)
    return True


def _prepare(server_args: Any) -> None:
    """Check the resolved settings and patch the server before its ranks start; see the module docstring.

    Raises:
        ConfigError: the engine has no HTTP server, or its release, a setting, an environment variable or the checkpoint
            does not fit Windlass.
    """
    settings = _resolved(server_args)
    for warning in check_installed(RELEASES):
        _log.warning("%s", warning)
    http_server = sys.modules.get(_HTTP)
    if http_server is None:
        raise ConfigError(
            f"{CONTROLLER_VARIABLE} must not be set for an engine without an HTTP server: Windlass cannot pause it"
        )
    _check_variables()

    def setting(name: str) -> object:
        try:
            return getattr(settings, name)
        except AttributeError as error:
            raise LookupError(name) from error

    version = installed_version(RELEASES)
    # Accept the memory saver here, as if the transport were `pull`. The transport is known only when the ranks join;
    # `_settings_and_secrets` checks it then.
    refuse_settings(
        "SGLang", rules_for(version, sleeps=settings.enable_memory_saver), setting, SLEEPING
    )
    if Path(settings.model_path).is_dir():
        _require_followed(settings, Path(settings.model_path))
    _set_loader(server_args, [*settings.custom_weight_loader])
    # A second call means that SGLang restarts the engine in this process.
    if not _is_first_call("prepare"):
        return
    if settings.node_rank:
        check_ranks_have_the_token()
        return
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    member = SglangMember(settings)
    reach_replicas(TokenizerControlMixin)
    pause_at_once(TokenizerManager)
    if settings.enable_memory_saver:
        report_refusals(TokenizerControlMixin)
    refuse_ignored(TokenizerManager)
    _add_middleware(http_server, member, member.token if settings.nnodes > 1 else "")
    if member.controller != WAIT:
        _call_when_warm(member.join_at_start)


def check_ranks_have_the_token() -> None:
    """Check that ranks on this host know where the token is, and make them send reports by HTTP (an environment variable).

    The ranks send reports to the first host. The token proves that a report comes from a rank of this server. Call this
    on every host except the first.

    Raises:
        ConfigError: the variable for the token's file is not set.
    """
    # `control_token` removes the token from the environment, so that no child process inherits it.
    control_token()
    if not environment_value(TOKEN_FILE_VARIABLE):
        raise ConfigError(
            f"{TOKEN_FILE_VARIABLE} must be set on every host of a server except the first host, because ranks read the "
            "token from this file"
        )
    set_values({OTHER_NODES_VARIABLE: "1"})


def _resolved(server_args: Any) -> Any:
    """Return an object with the settings that SGLang has resolved from the command line, as attributes."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    # SGLang up to 0.5.16 assigns resolved settings to `server_args` itself.
    except ImportError:
        return server_args
    return resolving_view(server_args)


def _set_loader(server_args: Any, loaders: list[str]) -> None:
    """Add Windlass's custom weight loader to the server's setting. `loaders` are the loaders in the setting so far."""
    if HOOK in loaders:
        return
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:  # SGLang up to 0.5.16
        server_args.custom_weight_loader = [*loaders, HOOK]
        return
    declare_resolution(server_args, "windlass", custom_weight_loader=[*loaders, HOOK])


def _require_followed(settings: Any, checkpoint: Path) -> None:
    """Check that trainers can quantise weights as the checkpoint declares; raises as `require_followed` does."""
    asked = settings.quantization
    require_followed(checkpoint, ("--quantization", asked) if asked else ())


def replicas_of(settings: Any) -> int:
    """Return the number of replicas, from SGLang's resolved settings; see `num_replicas`."""
    names = ("attn_dp_size", "enable_dp_attention")
    told = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return num_replicas(told, settings.dp_size)


class _RefusalsFirst:
    """Proxy of SGLang's tokenizer manager that puts refusals first in the results of a flush.

    SGLang's `flush_cache` reads the first result only.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        """Return the manager's attribute."""
        return getattr(self._manager, name)

    async def flush_cache_communicator(self, request: Any) -> list[Any]:
        """Flush the caches of all replicas. Return the results of all replicas, refusals first."""
        answers = await self._manager.flush_cache_communicator(request)
        return sorted(answers, key=lambda answer: bool(answer.success))


def reach_replicas(mixin: Any) -> None:
    """Patch SGLang's tokenizer manager so that orders reach every data-parallel replica.

    SGLang (0.5.23) refuses `/update_weights_from_tensor` with several replicas, because a request has one payload per
    tensor-parallel rank of one replica. An order has the same payload for every rank, so the patched manager sends this
    payload to the schedulers of all replicas.

    SGLang returns the result of only one replica for `/flush_cache`. A replica refuses a flush while its pipeline stages
    still run steps. So the patched manager returns a refusal if any replica refuses. `mixin` is SGLang's class
    `TokenizerControlMixin`.
    """
    update: Callable[..., Awaitable[Any]] = mixin.update_weights_from_tensor
    flush: Callable[..., Awaitable[Any]] = mixin.flush_cache

    async def update_weights_from_tensor(
        manager: Any, request: Any, received: object = None
    ) -> Any:
        """Send an order to the schedulers of all replicas; pass everything else to SGLang."""
        payloads: Sequence[str | bytes] = request.serialized_named_tensors
        is_order = request.load_format not in _OF_TENSORS and len(set(payloads)) == 1
        if replicas_of(manager.server_args) == 1 or not is_order:
            return await update(manager, request, received)
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

        manager.auto_create_handle_loop()
        request.serialized_named_tensors = normalize_serialized_named_tensor_payloads(payloads)
        return await manager._weight_update_session_call(
            manager.update_weights_from_tensor_communicator, request
        )

    async def flush_cache(manager: Any, timeout_s: float | None = None) -> Any:
        """Flush the caches, and return a refusal if any replica refuses."""
        return await flush(_RefusalsFirst(manager), timeout_s)

    mixin.update_weights_from_tensor, mixin.flush_cache = update_weights_from_tensor, flush_cache


def pause_at_once(manager_class: Any) -> None:
    """Patch SGLang's `TokenizerManager` so that a pause in mode `abort` returns when the last request has ended.

    SGLang (0.5.23) aborts all requests and then checks once a second whether they have ended. The patched method waits
    for the lock that every running request holds. An abort does not end a request that reaches the schedulers later. So
    the method aborts again if requests still run after 50 ms, then 100 ms, and so on up to 1 s.
    """
    pause: Callable[..., Awaitable[None]] = manager_class.pause_generation

    async def pause_generation(manager: Any, request: Any) -> None:
        """Abort again and again until no request runs."""
        if request.mode != "abort":
            await pause(manager, request)
            return
        async with manager.is_pause_cond:
            manager.is_pause = True
            for wait_s in Backoff(0.05, 1.0).pauses():
                manager.abort_request(abort_all=True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s), manager.model_update_lock.writer_lock:
                        pass
                # A request may wait for this method to release the lock. Let the request take the lock, so that `is_locked`
                # returns True.
                await asyncio.sleep(0)
                if not await manager.model_update_lock.is_locked():
                    return

    manager_class.pause_generation = pause_generation


def refuse_ignored(manager_class: Any) -> None:
    """Patch SGLang's `TokenizerManager` to refuse a seed or priority that SGLang would ignore.

    If the patched method raises ValueError, SGLang (0.5.23) answers with HTTP status 400.
    """
    generate: Callable[..., AsyncIterator[Any]] = manager_class.generate_request

    async def generate_request(manager: Any, asked: Any, request: Any = None) -> AsyncIterator[Any]:
        """Raise `ValueError` for a seed or a priority that SGLang would ignore."""
        settings = manager.server_args
        given = vars(asked).get("sampling_params")
        each = given if isinstance(given, list) else [given]
        has_seed = any(
            one.get("sampling_seed") is not None for one in each if isinstance(one, dict)
        )
        if has_seed and not settings.enable_deterministic_inference:
            raise ValueError(
                "sampling_params: sampling_seed must be None without --enable-deterministic-inference"
            )
        if vars(asked).get("priority") is not None and not settings.enable_priority_scheduling:
            raise ValueError("priority must be None without --enable-priority-scheduling")
        async for answer in generate(manager, asked, request):
            yield answer

    manager_class.generate_request = generate_request


@final
class CaptureBeforeSleep:
    """ASGI middleware that calls `capture` before each request to free memory.

    Args:
        app: application of the server.
        capture: blocking function.
    """

    def __init__(self, app: App, capture: Callable[[], None]) -> None:
        self._app, self._capture = app, capture

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and route_path(scope) == RELEASE:
            await asyncio.to_thread(self._capture)
        await self._app(scope, receive, send)


def _add_middleware(http_server: ModuleType, member: SglangMember, token: str) -> None:
    """Wrap SGLang's ASGI application in Windlass's middleware, outside all middleware that SGLang adds later.

    Args:
        http_server: SGLang's module `http_server`.
        member: this server.
        token: token that proves that a report comes from a rank on another host; empty for a server on one host.
    """
    app = vars(http_server)["app"]
    build: Callable[[], Any] = app.build_middleware_stack

    def build_behind() -> Any:
        behind: App = CaptureBeforeSleep(build(), member.before_release)
        behind = HeldRoutes(PrivateRoutes(behind, member.key, alive=ALIVE), member.port)
        if token:
            behind = ReportRoute(behind, token)
        return JoinRoute(behind, member.token, member.key, member.join)

    app.build_middleware_stack = build_behind


def _call_when_warm(action: Callable[[], None]) -> None:
    """Make SGLang call `action` after its warm-up, in addition to the callback that SGLang itself passes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def _with_callback(*args: Any, **given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        theirs = given.get("launch_callback")

        def call_both() -> None:
            if theirs is not None:
                theirs()
            action()

        return args, {**given, "launch_callback": call_both}

    HookRegistry.register(f"{_HTTP}._wait_and_warmup", _with_callback, HookType.BEFORE)
    HookRegistry.apply_hooks()


@final
class SglangMember(Member):
    """`Member` for an SGLang server.

    Args:
        settings: SGLang's resolved settings.

    Raises:
        ConfigError: the server runs on several hosts and has no token; see also `Member`.
        PeerUnreachable: see `Member`.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        # Whether the ranks have captured their layouts, and the reason if they could not before their memory was freed.
        self._is_captured, self._refusal = False, ""
        self._has_slept = False
        port = settings.port
        super().__init__(
            settings.host,
            port,
            key=keep_key(port),
            spans_hosts=settings.nnodes > 1,
            transport=SLEEPING if settings.enable_memory_saver else "auto",
        )
        if self._spans_hosts and not self.token:
            raise ConfigError(
                f"--nnodes must be 1 without a token, got {settings.nnodes}: ranks on other hosts authenticate "
                "with the token"
            )

    def _end_server(self) -> None:
        """Kill the other processes of the server, and end this process with status 2."""
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(2)

    def _have_ranks_join(self, order: JoinOrder) -> None:
        """Order all ranks to capture their layouts and to join the controller's fleet; wait until they have joined.

        If memory has slept, first pause generation. Record that the layouts are captured.

        Raises:
            ConfigError: `before_release` could not capture the layouts before the memory was freed.
            PeerUnreachable, PeerTimeout: see `join_fleet`.
        """
        if self._refusal:
            raise ConfigError(
                "join: the ranks could not capture their layouts before the server freed its memory; restart the server "
                f"({self._refusal})"
            )
        settings, secrets = self._settings_and_secrets(order)
        if self._has_slept:
            # Requests that wait for the weights hold a lock of SGLang. Orders need this lock unless generation is
            # paused. The end of the first round resumes generation.
            secrets.server(settings.url).post(
                "/pause_generation", {"mode": str(PauseMode.IN_PLACE)}, settings.join_deadline_s
            )
        join_fleet(send_step, settings, secrets)
        self._is_captured = True

    def before_release(self) -> None:
        """Make the ranks capture their layouts before their memory is freed for the first time.

        Blocks; if a join is in progress, first wait until it has ended. There are two reasons to capture now: a capture
        needs the weights with which the server was started, and only a rank with a layout keeps the scheduler paused
        while the weights are lost. If the capture fails, record the reason. The server then still frees its memory, and
        refuses every later join.
        """
        with self._is_joining:
            if not self._settings.enable_memory_saver:
                return
            self._has_slept = True
            if self._is_captured or self._refusal:
                return
            here = url_of("127.0.0.1", self.port)
            try:
                order = JoinOrder(
                    here, self._transport, name=self.name_for(here), url=self.url_for(here)
                )
                capture_layouts(send_step, *self._settings_and_secrets(order))
                self._is_captured = True
            except WindlassError as error:
                self._refusal = f"{type(error).__name__}: {error}"
                _log.warning(
                    "this server cannot join a fleet after it has slept: %s", self._refusal
                )

    def _settings_and_secrets(self, order: JoinOrder) -> tuple[AgentSettings, Secrets]:
        """Return the settings and the secrets with which the ranks carry out an order.

        Raises:
            ConfigError: the transport is not `pull` on a server with the memory saver, or cannot register memory of
                expandable segments, the order names another model, the
                model's folder is missing, or trainers cannot quantise weights as the checkpoint declares.
        """
        given = self._settings
        if given.enable_memory_saver:
            require_pull(order.transport)
        refuse_expandable_segments(order.transport)
        from windlass.engines.capture.checkpoint import checkpoint_folder

        model = given.model_path, given.revision, given.download_dir
        checkpoint = checkpoint_folder("--model-path", *model)
        order.check_model(checkpoint)
        _require_followed(given, checkpoint)
        settings = AgentSettings(
            name=order.name,
            controller=order.controller,
            transport=order.transport,
            url=order.url,
            port=self.port,
            checkpoint=str(checkpoint),
            world_size=given.tp_size * given.pp_size * replicas_of(given),
            loaded=given.load_format != "dummy",
            serves_own_weights=order.serves_own_weights,
            join_deadline_s=order.deadline_s or join_deadline_s(checkpoint),
        )
        keys = self.key, given.api_key or "", given.admin_api_key or ""
        return settings, Secrets(order.token or self.token, *keys)
