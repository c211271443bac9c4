"""AReaL: FSDP2 ranks write their shards straight into the vLLM servers that it rolls out with.

    from windlass.integrations.areal import install

    install()  # before `PPOTrainer(...)`; the rest of the script stays

Read at AReaL 1.0.4 (inclusionAI/AReaL): `FSDPEngine.connect_engine` and `update_weights`
(`areal/engine/fsdp_engine.py`), which its trainer calls in every rank or has its controller call on every worker
(`areal/infra/controller/train_controller.py`), and `RemoteInfEngine` (`areal/infra/remote_inf_engine.py`). Nothing is
gathered, and no process group is made with the servers. These are plain ones of vLLM with
`--weight-transfer-config '{"backend": "windlass"}'`: ones that AReaL is told of, or starts by `RemotevLLMEngine`.
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
"""For all servers to join, and then for every version."""


def install() -> None:
    """Have AReaL's `PPOTrainer` train with `FSDPPPOActor` and roll out with `RemotevLLMEngine` of this module.

    Called once, in the process that makes the trainer, before it does. Workers of AReaL's controller import what
    they need by its name.
    """
    vars(areal.engine)["FSDPPPOActor"] = FSDPPPOActor
    vars(areal.trainer.rl_trainer)["RemotevLLMEngine"] = RemotevLLMEngine


class FSDPEngine(fsdp_engine.FSDPEngine):  # type: ignore[misc]  # AReaL is not typed here
    """AReaL's FSDP engine, whose weights Windlass sends; for scripts that make engines themselves.

    Memory: the shards are read, and servers' weights written, within `update_weights` alone.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._sync: WeightSync | None = None

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        """Have the servers of `engine` join. Collective; blocks. A second call with the same servers does nothing.

        Args:
            engine: a `RemotevLLMEngine` of this module; in a worker what AReaL's controller gives for one.
            meta: AReaL's; `type` is `xccl`.

        Raises:
            ConfigError: an engine, or a setting of this one, with which weights cannot be sent.
            EngineRefused, PeerUnreachable, PeerTimeout, UnsupportedLayout: see `WeightSync`.
        """
        servers = _servers_of(engine)
        _require_plain_weights(self.config, meta)
        self.weight_update_group_initialized = True  # so that AReaL makes none
        known = self.rollout_engine
        super().connect_engine(engine, meta)
        if self._sync is not None and known is not None:
            if _servers_of(known) == servers:
                return
            self._leave()
        self._sync = WeightSync(self.model, servers=servers, pause="abort", deadline_s=DEADLINE_S)

    def update_weights(self, meta: WeightUpdateMeta) -> list[str]:
        """Have every server serve the weights as they are now. Collective; blocks.

        A server that has died, or fails, is left out and gets no requests; one that is there again at its address joins
        first. As with AReaL's own engine the caller pauses the rollout before and tells it the version after.
        Memory: the weights must not change before this returns.

        Args:
            meta: AReaL's; its `version` is greater than every one before.

        Returns:
            Addresses of the servers that serve the version.

        Raises:
            RuntimeError: AReaL's: `connect_engine` has not been called. ConfigError: `meta` has no version.
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
        """Leave the servers, which go on with what they have, and do what AReaL does. Idempotent."""
        self._leave()
        super().destroy()

    def _leave(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.shutdown()


@final
class FSDPPPOActor(FSDPEngine, fsdp_engine.FSDPPPOActor):  # type: ignore[misc]
    """AReaL's PPO actor on `FSDPEngine`."""

    @classmethod
    def as_controller(cls, config: PPOActorConfig, scheduler: Scheduler) -> ActorController:
        """Make the controller of such actors.

        Raises:
            ConfigError: `config` asks for AReaL's second kind of controller, which updates by awex.
        """
        _require_v1(config)
        return ActorController(train_engine=cls, config=config, scheduler=scheduler)


@dataclass
class ServersCallback(rollout_callback.RolloutCallback):  # type: ignore[misc]
    """What workers hold for a `RolloutController`: AReaL's, and where the servers are, which that does not tell them."""

    addresses: list[str] = field(default_factory=list)


@final
class ActorController(PPOActorController):  # type: ignore[misc]
    """AReaL's, which tells its workers where servers are, and the rollout which of them serve."""

    def connect_engine(self, rollout: RolloutController, meta: WeightUpdateMeta) -> None:
        """Have every worker connect.

        Raises:
            ConfigError: `rollout` is not that of a `RemotevLLMEngine` of this module.
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
    """AReaL's, which gives no work to a worker whose server was left out."""

    _serving: frozenset[str] | None = None

    @property
    def server_addresses(self) -> list[str]:
        """One per worker."""
        return [format_hostport(info.host, info.port) for info in self.server_infos]

    def send_only_to(self, addresses: Collection[str]) -> None:
        """Give work to the workers of these servers alone, until this is called again."""
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
    """AReaL's engine for vLLM, whose servers are plain ones.

    `initialize` takes the addresses of running servers, as ever. `launch_server` starts one with the
    interpreter of WINDLASS_VLLM_PYTHON (`python3`), Windlass's backend, and AReaL's own options.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        self._engine = _Servers(config)

    @property
    def addresses(self) -> list[str]:
        """Of all servers, `HOST:PORT`."""
        return list(self._engine.addresses)

    def send_only_to(self, addresses: Collection[str]) -> None:
        """Send requests to these servers alone, until this is called again."""
        self._engine.send_only_to(addresses)

    @classmethod
    def as_controller(
        cls, config: InferenceEngineConfig, scheduler: Scheduler
    ) -> RolloutController:
        """Make the controller of such engines.

        Raises:
            ConfigError: `config` asks for AReaL's second kind of controller.
        """
        _require_v1(config)
        return RolloutController(cls, config=config, scheduler=scheduler)


@dataclass
class _Stamps:
    """Of the tokens of one answer, which may come in several parts."""

    sent_at: int = 0
    versions: list[int] = field(default_factory=list)


_STAMPS: ContextVar[_Stamps] = ContextVar("windlass_stamps")
"""Of the running task."""


@final
class _Servers(RemoteInfEngine):  # type: ignore[misc]
    """Requests to those that serve the version, and tokens stamped with the one that they come from."""

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
    """What a `vllm serve` is asked, where AReaL asks a server program of its own, which needs vLLM 0.17."""

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
        # AReaL stamps with the version of now; an update takes less time than an aborted answer may need to be read.
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
            "worker_extension_cls": None,  # of AReaL's own server program
            "weight_transfer_config": '{"backend": "windlass"}',
        }
        program = get_py_cmd("vllm.entrypoints.openai.api_server", options)
        command = [environment_value(PYTHON_VARIABLE) or program[0], *program[1:]]
        _log.info("starting %s", " ".join(command))
        environment = {**inherited_environment(), "VLLM_SERVER_DEV_MODE": "1"}
        return subprocess.Popen(command, env=environment, stdout=sys.stdout, stderr=sys.stdout)


def _servers_of(engine: object) -> list[str]:
    """Return the servers' URLs, in one order on every rank."""
    if not isinstance(engine, RemotevLLMEngine | ServersCallback):
        _refuse_rollout(engine)
    return [f"http://{address}" for address in sorted(engine.addresses)]


def _require_plain_weights(config: TrainEngineConfig, meta: WeightUpdateMeta) -> None:
    """Raises ConfigError: weights that are not in the model's parameters, or go in another way."""
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
        "rollout: must be vLLM by RemotevLLMEngine of windlass.integrations.areal (install() puts it in place), "
        f"got {type(rollout).__module__}.{type(rollout).__name__}"
    )


def _refuse_trainer() -> NoReturn:
    raise ConfigError(
        "actor: must be FSDPPPOActor or FSDPEngine of windlass.integrations.areal with this rollout, got an engine "
        "that sends weights by itself: Megatron and Archon are not updated by Windlass"
    )
