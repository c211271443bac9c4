"""Description of an engine (`EngineSpec`), and the registry that finds engines by name.

To add an engine, add a folder here with a `spec.py` that defines `ENGINE`, or an entry point of the group
`windlass.engines` in another distribution. This module imports neither torch nor an engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from windlass.engines.options import Rule, options_of
from windlass.engines.versions import EngineReleases
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.plugins import Registry
from windlass.transports.registry import config_type, transport_name

if TYPE_CHECKING:
    import argparse


def expandable_segments() -> str:
    """Return `VARIABLE=value` for the environment variable that enables torch's expandable segments.

    Return an empty text if no variable enables them.
    """
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment_value(variable)
        if "expandable_segments:true" in value.lower():
            return f"{variable}={value}"
    return ""


def refuse_expandable_segments(transport: str) -> None:
    """Check that an engine's transport can register memory of torch's allocator.

    Args:
        transport: name or configuration of the transport.

    Raises:
        ConfigError: a variable enables expandable segments, and the transport registers memory with a NIC. Or the
            transport does not exist.
        TransportUnavailable: see `config_type`.
    """
    name = transport_name(transport)
    # `auto` offers another transport for memory that a network transport refuses.
    if (
        name == "auto"
        or not (asked := expandable_segments())
        or not config_type(name).between_hosts
    ):
        return
    variable, _, value = asked.partition("=")
    raise ConfigError(
        f"{variable} must not enable expandable segments for an engine with transport {name}: memory of such segments "
        f"cannot be registered with a NIC, got {value!r}; unset it, or use cuda_ipc or pull within one host"
    )


JOIN_S, JOIN_BYTES_PER_S = 600.0, 100_000_000
"""Seconds of a join without the reading of the checkpoint, and the assumed speed of this reading."""


def join_deadline_s(checkpoint: Path) -> float:
    """Return the default of `AgentSettings.join_deadline_s`.

    The default grows with the checkpoint, because ranks may read the checkpoint from a slow disk.
    """
    nbytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return JOIN_S + nbytes / JOIN_BYTES_PER_S


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every rank of an engine gets.

    Attributes:
        name: identity of the engine in the fleet; a rank's identity is `name/rank`.
        controller: URL of the controller.
        transport: name of the transport that receives weights.
        url: URL at which peers reach the engine's HTTP server. It may be the URL of a proxy, so its port
            may differ from `port`.
        port: port on which the server listens; 0 for an engine without a server.
        checkpoint: folder with safetensors files of the model, or of the adapter if `adapter` is set. Capture
            reads names, shapes and dtypes from these files.
        adapter: name of the adapter that gets updates; empty if the model gets updates.
        loaded: whether the engine loaded the weights of `checkpoint` when it started. If not, capture cannot
            compare the engine's memory with the checkpoint.
        world_size: number of ranks of this engine.
        serves_own_weights: True to serve requests with the initial weights until a version is published.
        join_deadline_s: seconds for all ranks to capture their layouts, and the same time again for all ranks to join.
    """

    name: str
    controller: str
    transport: str
    url: str
    checkpoint: str
    world_size: int
    port: int = 0
    loaded: bool = True
    adapter: str = ""
    serves_own_weights: bool = False
    join_deadline_s: float = 600.0

    @property
    def made_up(self) -> bool:
        """True if the weights are random (`--load-format dummy`) and the engine has served no request with them."""
        return not self.loaded and not self.serves_own_weights


class CapturedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a rank's captured layout.

    Attributes:
        unplaced: names of checkpoint tensors that have no element in this rank's memory.
        unread: names in `unplaced` that the engine's loader did not read.
        recomputed: see `windlass.engines.capture.description.Captured`.
        buffer_nbytes: bytes of the buffers that capture allocated outside the model's memory; updates write
            into these buffers.
        seconds: duration of each stage of the capture; empty if the rank reuses an earlier capture.
    """

    unplaced: tuple[str, ...]
    unread: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    buffer_nbytes: int
    seconds: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command line of an engine's own server, and additional environment variables."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class RankStep(StrEnum):
    """Steps of a join, in the order in which the ranks of a server carry them out."""

    CAPTURE = "capture"
    JOIN = "join"


class EngineServer(Protocol):
    """A third-party engine server whose ranks each run an agent; see `windlass.engines.launch`.

    The launcher starts the server with WINDLASS_CONTROLLER=wait in the environment. The server must then serve
    `POST /windlass/join` (`windlass.engines.join_route`), for callers that show the key of its private routes.

    Attributes:
        ready_line: text that the server logs when it is ready.
    """

    ready_line: str

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        """Return the command that starts the server.

        Args:
            args: options that every engine has; see `windlass.engines.launch.arguments`.
            rest: options of the server itself.

        Raises:
            ConfigError: options contradict each other, or the engine's release does not support an option.
            UnsupportedLayout: updates cannot change the whole adapter of `--adapter`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine in a job.

    Attributes:
        model: configuration or checkpoint folder.
        transport: transport of the weights: a name, or a configuration as JSON.
        port: port of the engine's server; 0 lets the system choose, see `EngineSpec.needs_port`.
        num_nodes: number of nodes that the engine's ranks use.
        node: index of the node where the command will run.
        arguments: options of the engine itself.
        python: path of the Python interpreter; empty for the current interpreter.
    """

    name: str
    model: str
    tensor_parallel_size: int = 1
    transport: str = "cma"
    controller: str = ""
    port: int = 0
    num_nodes: int = 1
    node: int = 0
    arguments: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Description of an engine.

    Attributes:
        name: name in configurations and on command lines; equals the name of the engine's folder or entry point.
        title: name for display.
        module: module that `python -m` starts; accepts the options that `command` returns.
        releases: known releases; None for an engine that comes with Windlass or with a plugin.
        rules: rules for the engine's options and settings.
        server: third-party server; a launcher starts it and orders its ranks to join. None for an engine whose
            ranks join without an order.
        check: function that raises ConfigError for an invalid command line; only for an engine without a `server`.
        context_option: option that limits the number of tokens of a prompt plus its answer; empty if unknown.
        default_context: default of `context_option`; None if the default depends on the model.
        needs_port: True if `EngineOptions.port` must not be 0.
        spans_nodes: whether the ranks of one server may run on several nodes.
        dp_within_tp: option that makes `--dp` count groups of the `--tp` ranks instead of replicas; empty if the engine
            has no such option.
        cpu_arguments: options to serve a small model on a machine without a GPU.
        cpu_environment: environment variables to serve a small model on a machine without a GPU.
        gpu_arguments: options to serve a small model on a GPU that other processes also use.
        sleep_arguments: options that let a server on a GPU free its memory while a trainer steps. Empty if the engine needs
            no option for this, or cannot free its memory.
    """

    name: str
    title: str
    module: str
    releases: EngineReleases | None = None
    rules: tuple[Rule, ...] = ()
    server: EngineServer | None = None
    check: Callable[[Sequence[str]], None] | None = None
    context_option: str = ""
    default_context: int | None = None
    needs_port: bool = False
    spans_nodes: bool = False
    dp_within_tp: str = ""
    cpu_arguments: tuple[str, ...] = ()
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    gpu_arguments: tuple[str, ...] = ()
    sleep_arguments: tuple[str, ...] = ()

    def num_replicas(self, dp: int, words: Sequence[str]) -> int:
        """Return the number of replicas with ranks of their own, for `--dp` and the other words of a command line."""
        return 1 if self.dp_within_tp in dict(options_of(words)) else dp

    def command(self, options: EngineOptions) -> tuple[str, ...]:
        """Return the command line that starts the engine; the engine's ranks then join the fleet.

        Raises:
            ConfigError: `needs_port` is True and `options.port` is 0.
        """
        if self.needs_port and not options.port:
            raise ConfigError(f"engine {options.name!r}: port must be > 0 for {self.name}, got 0")
        nodes = options.num_nodes
        return (
            *(options.python or sys.executable, "-m", self.module, "--name", options.name),
            *("--model", options.model, "--tp", str(options.tensor_parallel_size)),
            *("--transport", options.transport),
            *(("--controller", options.controller) if options.controller else ()),
            *(("--port", str(options.port)) if options.port else ()),
            *(("--nnodes", str(nodes), "--node-rank", str(options.node)) if nodes > 1 else ()),
            *options.arguments,
        )


ENGINES: Registry[EngineSpec] = Registry(
    noun="engine",
    kind=EngineSpec,
    package="windlass.engines",
    submodule="spec",
    attribute="ENGINE",
    group="windlass.engines",
)
"""All engines, by name."""
