"""Weight updates of AReaL's train engines: every rank writes its shards directly into the servers of the rollout.

This module was written for AReaL 1.0.4 (inclusionAI/AReaL). It overrides four methods of AReaL's train engines,
`connect_engine`, `update_weights`, `offload` and `destroy`. AReaL's trainer calls these methods in every rank, or AReaL's
controller calls them on every worker (`areal/infra/controller/train_controller.py`). No process group includes the servers.
`windlass.integrations.areal.rollout` has the clients of the servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, NoReturn, final

from areal.api import InferenceEngine, Scheduler, WeightUpdateMeta
from areal.api.cli_args import PPOActorConfig, TrainEngineConfig
from areal.trainer.ppo.actor import PPOActorController

from windlass.errors import ConfigError
from windlass.integrations.areal.rollout import (
    PlainServers,
    RolloutController,
    ServersCallback,
    require_v1,
)
from windlass.integrations.fleet_sync import FleetSync
from windlass.integrations.hosted import HostAddress
from windlass.integrations.joined import JoinedServers, server_name
from windlass.integrations.vllm.sync import plain_servers_sync

if TYPE_CHECKING:
    from windlass.trainers.client import TrainerClient

DEADLINE_S = 600.0
"""Deadline in seconds for all servers to join, and then for each version."""
_NO_LORA = (
    "; Windlass updates adapters from FSDP actors in vLLM servers only. Use both, train all weights, or leave out "
    "install() and set weight_update_mode to disk"
)
_NO_DISK = (
    "; AReaL demands disk if the actor shares GPUs with the servers (a scheduling `target`). Give them separate GPUs "
    "and set weight_update_mode to xccl, or leave out install()"
)


class UpdatingEngine(ABC):
    """Base class of the train engines of this package, which comes before AReaL's class.

    Attributes:
        sends_adapters: whether this class can update an adapter (`use_lora`).

    Memory: trainer ranks read their shards and write the servers' weights during `update_weights` only. `offload`, which frees
    the memory of this rank, leaves the fleet first. The next update connects again.
    """

    sends_adapters: ClassVar[bool] = False
    config: TrainEngineConfig
    rollout_engine: InferenceEngine | None
    _check_rollout_engine_connected: Callable[[], None]
    _offload_aware_context: Callable[[], AbstractContextManager[None]]

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # AReaL's class follows
        self._sync: FleetSync | None = None

    @abstractmethod
    def connect_trainer(self, address: HostAddress) -> TrainerClient:
        """Connect this rank's weights to the controller. Collective; blocks."""

    def skip_own_group(self) -> None:
        """Tell AReaL's engine that it has a process group with the servers, so that it creates none."""
        self.weight_update_group_initialized = True

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        """Connect to the servers of `engine`. Collective; blocks.

        A second call with the same servers keeps the connection. A call with other servers replaces the connection.

        Args:
            engine: an engine of Windlass; in a worker, the `ServersCallback` from the controller.
            meta: AReaL's description of the update; its `type` must be `xccl`.

        Raises:
            ConfigError: Windlass cannot send weights to `engine`, or does not support a setting of this trainer. SGLang
                also needs WINDLASS_TOKEN or WINDLASS_TOKEN_FILE.
            EngineRefused, PeerUnreachable, PeerTimeout: see `WeightSync`.
            UnsupportedLayout: Windlass cannot describe a parameter.
        """
        rollout = _checked(engine)
        _require_supported(self.config, meta, self.sends_adapters and rollout.engine == "vllm")
        self.skip_own_group()
        known = self.rollout_engine
        super().connect_engine(engine, meta)  # type: ignore[misc]
        if self._sync is not None and known is not None:
            if _servers_of(_checked(known)) == _servers_of(rollout):
                return
            self._leave()
        self._connect(rollout)

    def _connect(self, rollout: PlainServers | ServersCallback) -> FleetSync:
        """Connect to the servers of the rollout, and return the connection. Collective; blocks."""
        servers = _servers_of(rollout)
        if rollout.engine == "vllm":
            self._sync = plain_servers_sync(
                self.connect_trainer, servers=servers, pause="abort", deadline_s=DEADLINE_S
            )
        else:
            urls = {server_name(url): url for url in servers}
            self._sync = FleetSync(
                urls, lambda: JoinedServers(servers), self.connect_trainer, DEADLINE_S
            )
        return self._sync

    def update_weights(self, meta: WeightUpdateMeta) -> list[str]:
        """Publish the current weights to every server. Collective; blocks.

        The update leaves out a server that is dead or fails, and the rollout sends no requests to this server. A server
        that was restarted at the same address joins before the update. As with AReaL's own engine, the caller pauses the
        rollout before this call and sets the rollout's version afterwards.

        Memory: the caller must not change the weights before this method returns.

        Args:
            meta: AReaL's description of the update; its `version` must be greater than all earlier versions.

        Returns:
            Addresses of the servers that serve the version, as `HOST:PORT`.

        Raises:
            RuntimeError: `connect_engine` was not called; raised by AReaL.
            ConfigError: `meta` has no version.
            RoundAborted, PeerUnreachable, PeerTimeout: see `WeightSync.send_weights`.
        """
        self._check_rollout_engine_connected()
        if meta.version is None:
            raise ConfigError(f"update_weights: meta.version must be an integer >= 0, got {meta}")
        # If this rank is offloaded, the context brings its memory back, and calls `offload` again at the end.
        with self._offload_aware_context():
            sync = self._sync or self._connect(_checked(self.rollout_engine))
            sent = sync.send_weights(meta.version)
        serving = [url.removeprefix("http://") for url in sent.servers]
        if isinstance(self.rollout_engine, PlainServers):
            self.rollout_engine.send_only_to(serving)
        return serving

    def offload(self) -> None:
        """Leave the fleet, and free this rank's GPU memory with torch_memory_saver. Collective.

        When torch_memory_saver brings the memory back, it maps new pages at the same addresses. This invalidates all
        registrations of the memory, so this rank must leave the fleet first.
        """
        self._leave()
        super().offload()  # type: ignore[misc]

    def destroy(self) -> None:
        """Disconnect from the servers, then destroy AReaL's engine. Idempotent.

        The servers keep their weights and continue to serve.
        """
        self._leave()
        super().destroy()  # type: ignore[misc]

    def _leave(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()


class UpdatingActor:
    """Base class of the PPO actors of this package, which comes before AReaL's class."""

    @classmethod
    def as_controller(cls, config: PPOActorConfig, scheduler: Scheduler) -> ActorController:
        """Create the controller of these actors.

        Raises:
            ConfigError: `config` does not select version 1 of AReaL's controller. Version 2 sends weights with awex.
        """
        require_v1(config)
        return ActorController(train_engine=cls, config=config, scheduler=scheduler)


@final
class ActorController(PPOActorController):  # type: ignore[misc]
    """AReaL's controller of PPO actors, which also sends the servers' addresses to the actors.

    After each update, this controller tells the `RolloutController` which servers serve the version.
    """

    def connect_engine(self, rollout: RolloutController, meta: WeightUpdateMeta) -> None:
        """Call `UpdatingEngine.connect_engine` on every worker.

        Raises:
            ConfigError: `rollout` is not a `RolloutController` of this module.
        """
        if not isinstance(rollout, RolloutController):
            _refuse_rollout(rollout)
        self.rollout = rollout
        self._custom_function_call("connect_engine", engine=rollout.callback, meta=meta)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """See `UpdatingEngine.update_weights`."""
        self._check_rollout_engine_connected()
        self.rollout.send_only_to(self._custom_function_call("update_weights", meta=meta))


def _servers_of(rollout: PlainServers | ServersCallback) -> list[str]:
    """Return the URLs of the servers, in the same order on every rank."""
    return [f"http://{address}" for address in sorted(rollout.addresses)]


def _checked(engine: object) -> PlainServers | ServersCallback:
    """Return `engine`. Raise ConfigError if Windlass cannot send weights to it."""
    if not isinstance(engine, PlainServers | ServersCallback):
        _refuse_rollout(engine)
    return engine


def _require_supported(config: TrainEngineConfig, meta: WeightUpdateMeta, can_adapt: bool) -> None:
    """Check that AReaL sends weights by `xccl`, and trains an adapter only if Windlass can update adapters here.

    Raises:
        ConfigError: an option has another value.
    """
    if (config.use_lora or meta.use_lora) and not can_adapt:
        raise ConfigError(
            f"use_lora: must be False with this actor and these servers, got True{_NO_LORA}"
        )
    if meta.type != "xccl":
        why = _NO_DISK if meta.type == "disk" else ""
        raise ConfigError(f"weight_update_mode: must be xccl with Windlass, got {meta.type}{why}")


def _refuse_rollout(rollout: object) -> NoReturn:
    raise ConfigError(
        "rollout: must be RemotevLLMEngine or RemoteSGLangEngine of windlass.integrations.areal (call install() "
        f"before PPOTrainer), got {type(rollout).__module__}.{type(rollout).__name__}"
    )
