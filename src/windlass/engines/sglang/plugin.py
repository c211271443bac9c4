"""What SGLang's own server does once Windlass is installed beside it and WINDLASS_CONTROLLER is set.

    WINDLASS_CONTROLLER=http://TRAINER:8000 WINDLASS_TOKEN_FILE=token python -m sglang.launch_server ...

SGLang calls entry points of the group `sglang.srt.plugins` before it reads its settings
(`sglang/srt/plugins/__init__.py`, 0.5.11 and later). This one does nothing where the variable is not set and no
launcher of Windlass has started the server. Else the process that serves HTTP

- refuses settings that an update does not survive, before a model is loaded;
- has every rank call `windlass.engines.sglang.hook.run`, a custom weight loader;
- keeps private routes private (`windlass.engines.private_routes`), and orders reaching every replica;
- once it is warm, has its ranks join the fleet of the controller. With `wait` in place of an address they join when
  `POST /windlass/join` says where; it may do so again, once the controller before has ended.

A launcher's server is made ready in the same way, and joins when the launcher says so.

On the other hosts of a server that spans several (`--node-rank 1` and so on), which serve no HTTP, settings are
refused and ranks made ready as on the first; orders come from there, and reports go there (`windlass.engines.report_route`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, final

from windlass.engines.join_route import JoinOrder, JoinRoute
from windlass.engines.private_routes import App, PrivateRoutes, is_launched, new_key
from windlass.engines.quantised import require_followed
from windlass.engines.rank_reports import OTHER_NODES_VARIABLE, Secrets, join_fleet
from windlass.engines.report_route import ReportRoute
from windlass.engines.sglang.spec import (
    HOOK,
    ORIGINAL,
    RELEASES,
    RULES,
    SglangServer,
)
from windlass.engines.spec import AgentSettings, refuse_expandable_segments, refuse_settings
from windlass.engines.versions import check_installed
from windlass.envs import (
    CONTROLLER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    control_token,
    environment_value,
    set_values,
)
from windlass.errors import ConfigError, ProtocolError, WindlassError
from windlass.net.addresses import (
    check_url,
    is_loopback,
    is_this_host,
    is_wildcard,
    join_host_port,
    own_address,
    url_of,
)
from windlass.updates.engine_channel import report_cannot_join

WAIT = "wait"
_HTTP = "sglang.srt.entrypoints.http_server"
_OTHER_SERVERS = ("SGLANG_RUST_SERVER", "SGLANG_USE_MODELSCOPE")
_SAMPLED = "rollouts carry log-probabilities of the distribution that was sampled"
_OF_TENSORS = (None, "direct", "flattened_bucket")
"""Load formats that are no custom weight loader."""
_log = logging.getLogger(__name__)
_done: set[str] = set()
"""What this process has done, of which once is enough."""


def load() -> None:
    """Called by SGLang in every process of a server, and by `windlass.engines.sglang.serve`. Idempotent.

    Nothing is refused here: SGLang logs what a plugin raises, and goes on without it.
    """
    if not (environment_value(CONTROLLER_VARIABLE) or is_launched()) or not _first("load"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Called by whoever starts an engine, with resolved settings that have reached no rank yet.
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.check_server_args", _prepare, HookType.BEFORE
    )


def _check_variables() -> None:
    """Check the environment that a server is started with.

    Raises:
        ConfigError: a variable with which updates have not been shown, or rollouts would be wrong.
    """
    for variable in _OTHER_SERVERS:
        if _is_set(variable):
            raise ConfigError(f"{variable} must not be set: updates with it have not been shown")
    if not _is_set(ORIGINAL):
        return
    if is_launched():
        raise ConfigError(f"{ORIGINAL} must not be set: {_SAMPLED}")
    _log.warning("%s is set: %s, and this server's are not", ORIGINAL, _SAMPLED)


def _is_set(variable: str) -> bool:
    return environment_value(variable).lower() in ("1", "true", "yes", "y")


def _first(step: str) -> bool:
    if step in _done:
        return False
    _done.add(step)
    return True


def _prepare(server_args: Any) -> None:
    """Make a server ready whose settings are known and whose ranks have not been started; see this module."""
    settings = _resolved(server_args)
    for warning in check_installed(RELEASES):
        _log.warning("%s", warning)
    http_server = sys.modules.get(_HTTP)
    if http_server is None:
        raise ConfigError(
            f"{CONTROLLER_VARIABLE} must not be set for an engine without an HTTP server, which cannot be paused"
        )
    _check_variables()
    refuse_expandable_segments()

    def setting(name: str) -> object:
        try:
            return getattr(settings, name)
        except AttributeError as error:
            raise LookupError(name) from error

    refuse_settings("SGLang", RULES, setting)
    if Path(settings.model_path).is_dir():
        _require_followed(settings, Path(settings.model_path))
    _set_loader(server_args, [*settings.custom_weight_loader])
    if not _first("prepare"):  # the engine of this process is started again
        return
    if settings.node_rank:
        _have_ranks_know_the_token()
        return
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    member = None if is_launched() else _Member(settings)
    reach_replicas(TokenizerControlMixin)
    _stand_in_front(http_server, member, control_token() if settings.nnodes > 1 else "")
    if member is not None and member.controller != WAIT:
        _call_when_warm(member.join_at_start)


def _have_ranks_know_the_token() -> None:
    """Called on a host whose ranks report to a server on another; raise ConfigError if they could prove nothing there."""
    control_token()  # takes it out of the environment
    if not environment_value(TOKEN_FILE_VARIABLE):
        raise ConfigError(
            f"{TOKEN_FILE_VARIABLE} must be set on every host of a server but the first: its ranks read the "
            f"token there, got ''"
        )
    set_values({OTHER_NODES_VARIABLE: "1"})


def _resolved(server_args: Any) -> Any:
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:  # to 0.5.16 what is resolved is assigned
        return server_args
    return resolving_view(server_args)


def _set_loader(server_args: Any, loaders: list[str]) -> None:
    if HOOK in loaders:
        return
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:  # to 0.5.16
        server_args.custom_weight_loader = [*loaders, HOOK]
        return
    declare_resolution(server_args, "windlass", custom_weight_loader=[*loaders, HOOK])


def _require_followed(settings: Any, checkpoint: Path) -> None:
    asked = settings.quantization
    require_followed(checkpoint, ("--quantization", asked) if asked else ())


def reach_replicas(mixin: Any) -> None:
    """Have orders reach every data-parallel replica, by the methods of SGLang's tokenizer manager.

    SGLang (0.5.23) asks the schedulers of all replicas and waits for them, but refuses tensors beforehand, because a
    payload has one entry per tensor-parallel rank. Orders, which are the same for every rank, pass the refusal by. Of
    the replicas' answers to a flush it passes on one; here a refusal of any counts: stages of it are still at work.
    """
    update: Callable[..., Awaitable[Any]] = mixin.update_weights_from_tensor
    flush: Callable[..., Awaitable[Any]] = mixin.flush_cache

    async def update_weights_from_tensor(
        manager: Any, request: Any, received: object = None
    ) -> Any:
        payloads: Sequence[str | bytes] = request.serialized_named_tensors
        is_order = request.load_format not in _OF_TENSORS and len(set(payloads)) == 1
        if manager.server_args.dp_size == 1 or not is_order:
            return await update(manager, request, received)
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

        manager.auto_create_handle_loop()
        request.serialized_named_tensors = normalize_serialized_named_tensor_payloads(payloads)
        return await manager._weight_update_session_call(
            manager.update_weights_from_tensor_communicator, request
        )

    async def flush_cache(manager: Any, timeout_s: float | None = None) -> Any:
        """Refuse what one replica has refused; what all have done SGLang does as ever, once more."""
        if manager.server_args.dp_size == 1:
            return await flush(manager, timeout_s)
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        manager.auto_create_handle_loop()
        answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
        refused = [answer for answer in answers if not answer.success]
        return refused[0] if refused else await flush(manager, timeout_s)

    mixin.update_weights_from_tensor, mixin.flush_cache = update_weights_from_tensor, flush_cache


def _stand_in_front(http_server: ModuleType, member: _Member | None, token: str) -> None:
    """Have requests come past Windlass first, whatever else is put in front of the server later.

    Args:
        http_server: SGLang's module.
        member: None for a server that a launcher has started.
        token: of ranks on other hosts, which report here; empty where there are none.
    """
    app = vars(http_server)["app"]
    build: Callable[[], Any] = app.build_middleware_stack

    def build_behind() -> Any:
        behind: App = PrivateRoutes(build(), None if member is None else member.key)
        if token:
            behind = ReportRoute(behind, token)
        return behind if member is None else JoinRoute(behind, member.token, member.join)

    app.build_middleware_stack = build_behind


def _call_when_warm(action: Callable[[], None]) -> None:
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
class _Member:
    """The server of this process, with SGLang's resolved settings, as a member of fleets.

    Raises:
        ConfigError: there is no token; or the controller is no address; or see `_url`.
        PeerUnreachable: see `_url`.
    """

    def __init__(self, settings: Any) -> None:
        self.controller = environment_value(CONTROLLER_VARIABLE)
        self.token = control_token()
        self._settings = settings
        self._spans_hosts: bool = settings.nnodes > 1
        if self.controller != WAIT:
            check_url(self.controller, CONTROLLER_VARIABLE)
            self._url(self.controller)
        elif not self.token:
            raise ConfigError(
                f"{CONTROLLER_VARIABLE}: {WAIT} must come with a token, which the one who says where shows"
            )
        if self._spans_hosts and not self.token:
            raise ConfigError(
                "--nnodes must be 1 without a token, by which ranks on other hosts prove who they are, "
                f"got {settings.nnodes}"
            )
        kept = ExitStack()
        self.key = kept.enter_context(new_key(settings.port))
        atexit.register(kept.close)
        self._is_joining = threading.Lock()

    def join_at_start(self) -> None:
        """Have the ranks join in a thread of its own; the server ends if they cannot."""

        def join() -> None:
            try:
                self.join(JoinOrder(self.controller))
            except WindlassError as error:
                self._end(f"{type(error).__name__}: {error}")

        threading.Thread(target=join, name="windlass-join", daemon=True).start()

    def _end(self, reason: str) -> None:
        """Nobody is to be answered by an engine that was meant to be updated and is not."""
        from sglang.srt.utils import kill_process_tree

        sys.stderr.write(f"engine {self._name(self.controller)}: {reason}\n")
        sys.stderr.flush()
        with contextlib.suppress(WindlassError):
            report_cannot_join(self.controller, self.token, self._name(self.controller), reason)
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(2)

    def join(self, order: JoinOrder) -> str:
        """Have every rank join a fleet, after leaving the one before; return the engine's name. Blocks.

        Raises:
            ProtocolError: it is on its way into one.
            ConfigError: the controller is no address; or the checkpoint is in no folder; or see `_url` and
                `join_fleet`.
            PeerUnreachable, PeerTimeout: see `join_fleet`.
        """
        if not self._is_joining.acquire(blocking=False):
            raise ProtocolError("join: the engine must not be on its way into a fleet, it is")
        try:
            check_url(order.controller, "controller")
            if self._spans_hosts and order.token not in ("", self.token):
                raise ConfigError(
                    "token must not be given to a server over several hosts: ranks on the others show the one "
                    "of their start"
                )
            given = self._settings
            from windlass.engines.capture.codes import checkpoint_folder

            model = given.model_path, given.revision, given.download_dir
            checkpoint = checkpoint_folder("--model-path", *model)
            _require_followed(given, checkpoint)
            settings = AgentSettings(
                name=self._name(order.controller),
                controller=order.controller,
                transport=order.transport,
                url=self._url(order.controller),
                checkpoint=str(checkpoint),
                world_size=given.tp_size * given.pp_size * given.dp_size,
                loaded=given.load_format != "dummy",
                serves_own_weights=True,
            )
            keys = self.key, given.api_key or "", given.admin_api_key or ""
            join_fleet(SglangServer(), settings, Secrets(order.token or self.token, *keys))
        finally:
            self._is_joining.release()
        _log.info("engine %s has joined the fleet of %s", settings.name, settings.controller)
        return settings.name

    def _name(self, controller: str) -> str:
        """Return the same for a server that is started again."""
        return join_host_port(self._host(controller), self._settings.port)

    def _url(self, controller: str) -> str:
        return url_of(self._host(controller), self._settings.port)

    def _host(self, controller: str) -> str:
        """Return the host that others are told.

        Raises:
            ConfigError: others would be led to themselves. PeerUnreachable: see `own_address`.
        """
        host: str = self._settings.host
        if is_wildcard(host):
            host = own_address(controller)
        if is_loopback(host) and (self._spans_hosts or not is_this_host(controller)):
            who = "a rank" if self._spans_hosts else controller
            raise ConfigError(
                f"--host must be an address that others reach, since {who} is on another host, got {host!r}"
            )
        return host
