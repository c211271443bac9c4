"""AReaL: FSDP2 ranks write their shards directly into the vLLM servers of the rollout.

    from windlass.integrations.areal import install

    install()  # before `PPOTrainer(...)`; the rest of the script does not change

This module was written for AReaL 1.0.4 (inclusionAI/AReaL). It overrides two methods of `FSDPEngine`
(`areal/engine/fsdp_engine.py`), `connect_engine` and `update_weights`. AReaL's trainer calls these methods in every
rank, or AReaL's controller calls them on every worker (`areal/infra/controller/train_controller.py`). The module also
overrides `RemoteInfEngine` (`areal/infra/remote_inf_engine.py`). No rank gathers tensors, and no process group includes
the servers. The servers are plain vLLM servers with `--weight-transfer-config '{"backend": "windlass"}'`. The user gives
AReaL the servers' addresses, or AReaL starts the servers through `RemotevLLMEngine`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import areal.engine
import areal.trainer.rl_trainer
from areal.api import (
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    ParamSpec,
    Scheduler,
    WeightUpdateMeta,
)
from areal.api.cli_args import InferenceEngineConfig, PPOActorConfig, TrainEngineConfig, get_py_cmd
from areal.api.io_struct import HttpGenerationResult, HttpRequest
from areal.engine import fsdp_engine, vllm_remote
from areal.infra import RemoteInfEngine
from areal.infra.controller import rollout_callback, rollout_controller
from areal.trainer.ppo.actor import PPOActorController
from areal.utils.network import format_hostport
from areal.utils.offload import is_tms_enabled

from windlass.envs import environment_value, inherited_environment
from windlass.errors import ConfigError
from windlass.integrations.vllm import WeightSync

__all__ = ["FSDPEngine", "FSDPPPOActor", "RemotevLLMEngine", "install"]

_log = logging.getLogger(__name__)
PYTHON_VARIABLE = "WINDLASS_VLLM_PYTHON"
DEADLINE_S = 600.0
"""Deadline in seconds for all servers to join, and then for each version."""


def install() -> None:
    """Make AReaL's `PPOTrainer` use `FSDPPPOActor` and `RemotevLLMEngine` of this module.

    Call this once, in the process that creates the trainer, before you create the trainer. Workers of AReaL's
    controller need no call, because they import these classes by name.
    """
    vars(areal.engine)["FSDPPPOActor"] = FSDPPPOActor
    vars(areal.trainer.rl_trainer)["RemotevLLMEngine"] = RemotevLLMEngine


class FSDPEngine(fsdp_engine.FSDPEngine):  # type: ignore[misc]  # AReaL is not typed here
    """AReaL's FSDP engine with weight updates by Windlass, for scripts that create engines themselves.

    Memory: trainer ranks read their shards and write the servers' weights during `update_weights` only.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._sync: WeightSync | None = None

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        """Connect to the servers of `engine`. Collective; blocks.

        A second call with the same servers keeps the connection. A call with other servers replaces the connection.

        Args:
            engine: a `RemotevLLMEngine` of this module; in a worker, the `ServersCallback` from the controller.
            meta: AReaL's description of the update; its `type` must be `xccl`.

        Raises:
            ConfigError: Windlass cannot send weights to `engine`, or does not support a setting of this trainer.
            EngineRefused, PeerUnreachable, PeerTimeout, UnsupportedLayout: see `WeightSync`.
        """
        servers = _servers_of(engine)
        _require_plain_weights(self.config, meta)
        # Without this flag, AReaL would create a process group with the servers.
        self.weight_update_group_initialized = True
        known = self.rollout_engine
        super().connect_engine(engine, meta)
        if self._sync is not None and known is not None:
            if _servers_of(known) == servers:
                return
            self._leave()
        self._sync = WeightSync(self.model, servers=servers, pause="abort", deadline_s=DEADLINE_S)

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
        if self._sync is None or meta.version is None:
            raise ConfigError(f"update_weights: meta.version must be an integer >= 0, got {meta}")
        sent = self._sync.send_weights(meta.version)
        serving = [url.removeprefix("http://") for url in sent.servers]
        if isinstance(self.rollout_engine, RemotevLLMEngine):
            self.rollout_engine.send_only_to(serving)
        return serving

    def destroy(self) -> None:
        """Disconnect from the servers, then destroy AReaL's engine. Idempotent.

        The servers keep their weights and continue to serve.
        """
        self._leave()
        super().destroy()

    def _leave(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()


@final
class FSDPPPOActor(FSDPEngine, fsdp_engine.FSDPPPOActor):  # type: ignore[misc]
    """AReaL's PPO actor, based on `FSDPEngine` of this module."""

    @classmethod
    def as_controller(cls, config: PPOActorConfig, scheduler: Scheduler) -> ActorController:
        """Create the controller of these actors.

        Raises:
            ConfigError: `config` does not select version 1 of AReaL's controller. Version 2 sends weights with awex.
        """
        _require_v1(config)
        return ActorController(train_engine=cls, config=config, scheduler=scheduler)


@dataclass
class ServersCallback(rollout_callback.RolloutCallback):  # type: ignore[misc]
    """AReaL's callback from workers to a `RolloutController`, with the addresses of the servers added.

    Attributes:
        addresses: addresses of all servers, as `HOST:PORT`.
    """

    addresses: list[str] = field(default_factory=list)


@final
class ActorController(PPOActorController):  # type: ignore[misc]
    """AReaL's controller of PPO actors, which also sends the servers' addresses to the actors.

    After each update, this controller tells the `RolloutController` which servers serve the version.
    """

    def connect_engine(self, rollout: RolloutController, meta: WeightUpdateMeta) -> None:
        """Call `FSDPEngine.connect_engine` on every worker.

        Raises:
            ConfigError: `rollout` is not a `RolloutController` of this module.
        """
        if not isinstance(rollout, RolloutController):
            _refuse_rollout(rollout)
        self.rollout = rollout
        engine = ServersCallback(
            controller_addr=rollout.callback_addr, addresses=rollout.server_addresses
        )
        self._custom_function_call("connect_engine", engine=engine, meta=meta)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """See `FSDPEngine.update_weights`."""
        self._check_rollout_engine_connected()
        self.rollout.send_only_to(self._custom_function_call("update_weights", meta=meta))


@final
class RolloutController(rollout_controller.RolloutController):  # type: ignore[misc]
    """AReaL's rollout controller, which gives no work to workers of servers that an update has left out."""

    _serving: frozenset[str] | None = None

    @property
    def server_addresses(self) -> list[str]:
        """Address of each worker's server, as `HOST:PORT`."""
        return [format_hostport(info.host, info.port) for info in self.server_infos]

    def send_only_to(self, addresses: Collection[str]) -> None:
        """Give work only to the workers of these servers, until the next call."""
        self._serving = frozenset(addresses)

    def _choose_worker(self) -> tuple[Any, int]:
        chosen: tuple[Any, int] = super()._choose_worker()
        if self._serving is not None:
            addresses = self.server_addresses
            for _ in addresses:
                if addresses[chosen[1]] in self._serving:
                    break
                chosen = super()._choose_worker()
        return chosen


@final
class RemotevLLMEngine(vllm_remote.RemotevLLMEngine):  # type: ignore[misc]
    """AReaL's engine for vLLM, with plain vLLM servers.

    `initialize` takes the addresses of running servers, as in AReaL. `launch_server` starts a server with
    Windlass's backend and AReaL's own options. It uses the Python interpreter that WINDLASS_VLLM_PYTHON names, by
    default `python3`.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        self._engine = _Servers(config)

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, as `HOST:PORT`."""
        return list(self._engine.addresses)

    def send_only_to(self, addresses: Collection[str]) -> None:
        """Send requests only to these servers, until the next call."""
        self._engine.send_only_to(addresses)

    @classmethod
    def as_controller(
        cls, config: InferenceEngineConfig, scheduler: Scheduler
    ) -> RolloutController:
        """Create the controller of these engines.

        Raises:
            ConfigError: `config` does not select version 1 of AReaL's controller.
        """
        _require_v1(config)
        return RolloutController(cls, config=config, scheduler=scheduler)


@dataclass
class _Stamps:
    """Versions of the tokens of one answer, for which AReaL may send several requests.

    Attributes:
        sent_at: current version when the newest request was sent.
        versions: version of each token that was received.
    """

    sent_at: int = 0
    versions: list[int] = field(default_factory=list)


_STAMPS: ContextVar[_Stamps] = ContextVar("windlass_stamps")
"""Versions of the tokens of the answer that the running asyncio task waits for."""


@final
class _Servers(RemoteInfEngine):  # type: ignore[misc]
    """AReaL's client of inference servers, which sends requests only to servers that serve the version.

    It labels each token with the version that produced it.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config, _PlainVllm(self.get_version))
        self._serving: frozenset[str] | None = None

    def send_only_to(self, addresses: Collection[str]) -> None:
        self._serving = frozenset(addresses)
        for rid, address in [*self.rid_to_address.items()]:
            if address not in self._serving:
                self.rid_to_address.pop(rid, None)

    def choose_server(self) -> str:
        chosen: str = super().choose_server()
        for _ in self.addresses:
            if self._serving is None or chosen in self._serving:
                break
            chosen = super().choose_server()
        return chosen

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        stamps = _Stamps()
        _STAMPS.set(stamps)
        response = await super().agenerate(req)
        response.output_versions = stamps.versions
        return response

    def init_weights_update_group(
        self, meta: WeightUpdateMeta, xccl_group_ranks: list[int] | None = None
    ) -> NoReturn:
        del meta, xccl_group_ranks
        _refuse_trainer()

    def update_weights_from_distributed(
        self, meta: WeightUpdateMeta, param_specs: list[ParamSpec]
    ) -> NoReturn:
        del meta, param_specs
        _refuse_trainer()

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> NoReturn:
        del meta
        _refuse_trainer()


@final
class _PlainVllm(vllm_remote.VLLMBackend):  # type: ignore[misc]
    """Requests to a plain `vllm serve`; AReaL's own backend needs AReaL's server program, which needs vLLM 0.17."""

    def __init__(self, get_version: Callable[[], int]) -> None:
        self._get_version = get_version

    def build_generation_request(
        self, req: ModelRequest, with_lora: bool, version: int
    ) -> HttpRequest:
        _STAMPS.get().sent_at = version
        return super().build_generation_request(req, with_lora, version)

    def parse_generation_response(self, response: dict[str, Any]) -> HttpGenerationResult:
        result = super().parse_generation_response(response)
        stamps = _STAMPS.get()
        # AReaL labels tokens with the current version. If an update aborted the answer, the current version may
        # already be the new one. In this case, use the version that was current when the request was sent.
        ended_by_update = result.stop_reason == "abort"
        version = stamps.sent_at if ended_by_update else self._get_version()
        stamps.versions += [version] * len(result.output_tokens)
        return result

    def get_pause_request(self) -> HttpRequest:
        return HttpRequest(endpoint="/pause?mode=abort", payload={})

    def get_resume_request(self) -> HttpRequest:
        return HttpRequest(endpoint="/resume", payload={})

    def launch_server(self, server_args: dict[str, Any]) -> subprocess.Popen[bytes]:
        options = {
            **server_args,
            # Only AReaL's own server program has this class.
            "worker_extension_cls": None,
            "weight_transfer_config": '{"backend": "windlass"}',
        }
        program = get_py_cmd("vllm.entrypoints.openai.api_server", options)
        command = [environment_value(PYTHON_VARIABLE) or program[0], *program[1:]]
        _log.info("starting %s", " ".join(command))
        environment = {**inherited_environment(), "VLLM_SERVER_DEV_MODE": "1"}
        return subprocess.Popen(command, env=environment, stdout=sys.stdout, stderr=sys.stdout)


def _servers_of(engine: object) -> list[str]:
    """Return the URLs of the servers, in the same order on every rank."""
    if not isinstance(engine, RemotevLLMEngine | ServersCallback):
        _refuse_rollout(engine)
    return [f"http://{address}" for address in sorted(engine.addresses)]


def _require_plain_weights(config: TrainEngineConfig, meta: WeightUpdateMeta) -> None:
    """Check that AReaL keeps all weights in the model's parameters and sends them by `xccl`.

    Raises:
        ConfigError: an option keeps the weights elsewhere or sends them in another way.
    """
    for option, given, allowed in (
        ("use_lora", config.use_lora or meta.use_lora, False),
        ("weight_update_mode", meta.type, "xccl"),
        ("enable_offload", is_tms_enabled(), False),
    ):
        if given != allowed:
            raise ConfigError(f"{option}: must be {allowed} with Windlass, got {given}")


def _require_v1(config: TrainEngineConfig | InferenceEngineConfig) -> None:
    if config._version != "v1":
        raise ConfigError(f"_version: must be v1 with Windlass, got {config._version}")


def _refuse_rollout(rollout: object) -> NoReturn:
    raise ConfigError(
        "rollout: must be RemotevLLMEngine of windlass.integrations.areal (call install() before PPOTrainer), "
        f"got {type(rollout).__module__}.{type(rollout).__name__}"
    )


def _refuse_trainer() -> NoReturn:
    raise ConfigError(
        "actor: must be FSDPPPOActor or FSDPEngine of windlass.integrations.areal with this rollout, got an engine "
        "that sends weights by itself; Windlass does not support AReaL's Megatron and Archon engines"
    )
