"""AReaL's clients of inference servers, and their controller, with plain vLLM and SGLang servers.

The module overrides `RemoteInfEngine` (`areal/infra/remote_inf_engine.py`). The servers are plain vLLM servers with
`--weight-transfer-config '{"backend": "windlass"}'`, or SGLang servers with Windlass installed and
WINDLASS_CONTROLLER=wait. The user gives AReaL the servers' addresses, or AReaL starts the servers.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, final

from areal.api import ModelRequest, ModelResponse, ParamSpec, Scheduler, WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig, TrainEngineConfig, get_py_cmd
from areal.api.io_struct import HttpGenerationResult, HttpRequest, get_versioned_lora_name
from areal.engine import sglang_remote, vllm_remote
from areal.infra import RemoteInfEngine
from areal.infra.controller import rollout_callback, rollout_controller
from areal.utils.network import format_hostport

from windlass.envs import environment_value, inherited_environment
from windlass.errors import ConfigError

__all__ = ["RemoteSGLangEngine", "RemotevLLMEngine"]

_log = logging.getLogger(__name__)


@dataclass
class ServersCallback(rollout_callback.RolloutCallback):  # type: ignore[misc]  # AReaL is not typed here
    """AReaL's callback from workers to a `RolloutController`, with the servers added.

    Attributes:
        engine: `vllm` or `sglang`.
        addresses: addresses of all servers, as `HOST:PORT`.
    """

    engine: str = ""
    addresses: list[str] = field(default_factory=list)


@final
class RolloutController(rollout_controller.RolloutController):  # type: ignore[misc]
    """AReaL's rollout controller, which gives no work to workers of servers that an update has left out."""

    _serving: frozenset[str] | None = None

    @property
    def callback(self) -> ServersCallback:
        """Addresses of the servers and of this controller, for trainer workers."""
        return ServersCallback(
            controller_addr=self.callback_addr,
            engine=self.inf_engine.engine,
            addresses=self.server_addresses,
        )

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


class _Stamping:
    """Base class of the backends, which records the version of each token. It comes before AReaL's class."""

    get_version: Callable[[], int]

    def build_generation_request(
        self, req: ModelRequest, with_lora: bool, version: int
    ) -> HttpRequest:
        _STAMPS.get().sent_at = version
        return super().build_generation_request(req, with_lora, version)  # type: ignore[misc]

    def parse_generation_response(self, response: dict[str, Any]) -> HttpGenerationResult:
        result = super().parse_generation_response(response)  # type: ignore[misc]
        stamps = _STAMPS.get()
        stamps.versions += self.versions_of(response, result, stamps.sent_at)
        return result

    def versions_of(
        self, response: dict[str, Any], result: HttpGenerationResult, sent_at: int
    ) -> list[int]:
        """Return the version of each token of `result`. `sent_at` is the version at which the request was sent."""
        del response
        # AReaL labels tokens with the current version. If an update aborted the answer, the current version may
        # already be the new one. In this case, use the version that was current when the request was sent.
        version = sent_at if result.stop_reason == "abort" else self.get_version()
        return [version] * len(result.output_tokens)


@final
class _PlainVllm(_Stamping, vllm_remote.VLLMBackend):  # type: ignore[misc]
    """Requests to a plain `vllm serve`; AReaL's own backend needs AReaL's server program, which needs vLLM 0.17."""

    def build_generation_request(
        self, req: ModelRequest, with_lora: bool, version: int
    ) -> HttpRequest:
        request = super().build_generation_request(req, with_lora, version)
        if with_lora:
            # AReaL loads each version of an adapter under a new name. Windlass updates the adapter of version 0 in place.
            request.payload["model"] = get_versioned_lora_name(req.gconfig.lora_name, 0)
        return request

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
            # Updates write one adapter in place. AReaL's default is a slot for each of the last 8 versions.
            "max_loras": 1,
        }
        return _start(
            "WINDLASS_VLLM_PYTHON",
            get_py_cmd("vllm.entrypoints.openai.api_server", options),
            {"VLLM_SERVER_DEV_MODE": "1"},
        )


@final
class _PlainSglang(_Stamping, sglang_remote.SGLangBackend):  # type: ignore[misc]
    """Requests to a plain `sglang.launch_server`; AReaL's own server program needs SGLang 0.5.10.post1."""

    def versions_of(
        self, response: dict[str, Any], result: HttpGenerationResult, sent_at: int
    ) -> list[int]:
        # SGLang 0.5.19 and later report the weight version of each token. Before the first update, the version is a
        # word and not a number.
        versions = [
            int(span["version"]) if span["version"].isdigit() else sent_at
            for span in response["meta_info"].get("weight_versions") or ()
            for _ in range(span["start"], span["end"])
        ]
        if len(versions) == len(result.output_tokens):
            return versions
        return super().versions_of(response, result, sent_at)

    def launch_server(self, server_args: dict[str, Any]) -> subprocess.Popen[bytes]:
        return _start(
            "WINDLASS_SGLANG_PYTHON",
            get_py_cmd("sglang.launch_server", server_args),
            {"WINDLASS_CONTROLLER": "wait"},
            with_tokens=True,
        )


def _start(
    python_variable: str,
    program: list[str],
    variables: Mapping[str, str],
    *,
    with_tokens: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a server with the Python interpreter that the environment variable `python_variable` names.

    If the variable is not set, use the interpreter in `program`.
    """
    command = [environment_value(python_variable) or program[0], *program[1:]]
    _log.info("starting %s", " ".join(command))
    environment = {**inherited_environment(with_tokens=with_tokens), **variables}
    return subprocess.Popen(command, env=environment, stdout=sys.stdout, stderr=sys.stdout)


@final
class _Servers(RemoteInfEngine):  # type: ignore[misc]
    """AReaL's client of inference servers, which sends requests only to servers that serve the version.

    It labels each token with the version that produced it.
    """

    def __init__(self, config: InferenceEngineConfig, backend: _Stamping) -> None:
        super().__init__(config, backend)
        backend.get_version = self.get_version
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


class PlainServers:
    """Base class of AReaL's engines of this module, which comes before AReaL's class.

    `initialize` takes the addresses of running servers, as in AReaL. `launch_server` starts a server with AReaL's own
    options and Windlass's.
    """

    engine: ClassVar[str]
    backend: ClassVar[type[_Stamping]]
    config: InferenceEngineConfig

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._engine = _Servers(config, self.backend())

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
        require_v1(config)
        return RolloutController(cls, config=config, scheduler=scheduler)


@final
class RemotevLLMEngine(PlainServers, vllm_remote.RemotevLLMEngine):  # type: ignore[misc]
    """AReaL's engine for vLLM, with plain vLLM servers.

    The Python interpreter of a server that AReaL starts is the value of WINDLASS_VLLM_PYTHON, by default `python3`.
    """

    engine = "vllm"
    backend = _PlainVllm


@final
class RemoteSGLangEngine(PlainServers, sglang_remote.RemoteSGLangEngine):  # type: ignore[misc]
    """AReaL's engine for SGLang, with plain SGLang servers.

    The Python interpreter of a server that AReaL starts is the value of WINDLASS_SGLANG_PYTHON, by default `python3`.
    """

    engine = "sglang"
    backend = _PlainSglang


def require_v1(config: TrainEngineConfig | InferenceEngineConfig) -> None:
    """Check that the configuration selects version v1 of AReaL's controller.

    Raises:
        ConfigError: `config` selects another version.
    """
    if config._version != "v1":
        raise ConfigError(f"_version: must be v1 with Windlass, got {config._version}")


def _refuse_trainer() -> NoReturn:
    raise ConfigError(
        "actor: must be an engine of windlass.integrations.areal with this rollout, got an engine that sends weights by "
        "itself; call install() before PPOTrainer"
    )
