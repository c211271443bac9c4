"""What Windlass knows of an engine, in one value, and where it is found by name.

A new engine is one folder here with a `spec.py` that defines `ENGINE`, or an entry point of the group
`windlass.engines` in another distribution. This module imports neither torch nor an engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from windlass.engines.http import EngineHttp
from windlass.engines.versions import EngineReleases
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.plugins import Registry

if TYPE_CHECKING:
    import argparse

    from windlass.engines.capture.codes import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting of an engine may be while updates reach the engine.

    Attributes:
        option: how the command line spells it; empty where only the live configuration says it.
        allowed: values that updates survive, the usual one first; empty: it must not be given.
        why: no other value is.
        settings: where the live configuration has it, in the engine's own words.
        aliases: other spellings of the option.
    """

    option: str
    allowed: tuple[object, ...]
    why: str
    settings: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def refusal_of(self, text: str) -> str:
        """Return what is wrong with the option followed by `text`; empty if nothing is."""
        texts = [str(v) for v in self.allowed if v not in (None, "") and not isinstance(v, bool)]
        if text in texts:
            return ""
        if not texts:
            return f"must not be given: {self.why}"
        return f"must be {texts[0]}, got {text!r}: {self.why}"


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line, spelt with dashes, and what follows each: its value, if it has one."""
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            yield option.replace("_", "-"), value if equals else following


def refuse_options(words: Sequence[str], rules: Iterable[Rule]) -> None:
    """Check the words of a command line that are meant for an engine.

    Raises:
        ConfigError: names an option with which an update would be wrong, and why.
    """
    by_option = {option: rule for rule in rules for option in (rule.option, *rule.aliases)}
    for option, value in options_of(words):
        rule = by_option.get(option)
        if rule and (refusal := rule.refusal_of(value)):
            raise ConfigError(f"{option} {refusal}")


def refuse_settings(engine: str, rules: Iterable[Rule], setting: Callable[[str], object]) -> None:
    """Check what a running engine is set to, however that was written: in a file, shortened, by default.

    `setting` returns the value at a place of the configuration, and raises LookupError where this release has none.

    Raises:
        ConfigError: names a setting with which an update would be wrong, and why.
    """
    for rule in rules:
        for place in rule.settings:
            try:
                found = setting(place)
            except LookupError:
                continue
            if found not in rule.allowed:
                raise ConfigError(
                    f"{engine}: {place} must be {rule.allowed[0]}, got {found}: {rule.why}"
                )


def expandable_segments() -> str:
    """Return `VARIABLE=value` of what asks torch for memory that cannot be registered; else empty."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment_value(variable)
        if "expandable_segments:true" in value.lower():
            return f"{variable}={value}"
    return ""


def refuse_expandable_segments() -> None:
    """Check the allocator's environment.

    Raises:
        ConfigError: it asks torch for memory that cannot be registered.
    """
    if asked := expandable_segments():
        variable, _, value = asked.partition("=")
        raise ConfigError(
            f"{variable} must not ask for expandable segments: their memory cannot be registered "
            f"or shared, got {value!r}"
        )


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of an engine is told.

    Attributes:
        name: identity in the fleet; ranks are called `name/rank`.
        controller: address. transport: name of the transport that receives weights.
        url: of the engine's own HTTP server.
        checkpoint: folder with safetensors files of the model's names, shapes and types; of the
            adapter's, where updates are of one.
        adapter: name of the adapter that updates reach; empty if they reach the model.
        loaded: whether the engine started with the weights of `checkpoint`; if not, nothing can be
            compared with them.
        world_size: ranks of this engine.
        serves_own_weights: whether it answers with the weights of its start before the first version.
        join_deadline_s: for all ranks to capture their layouts, and again for all to join.
    """

    name: str
    controller: str
    transport: str
    url: str
    checkpoint: str
    world_size: int
    loaded: bool = True
    adapter: str = ""
    serves_own_weights: bool = False
    join_deadline_s: float = 600.0

    @property
    def made_up(self) -> bool:
        """Whether the engine holds values of nobody's, and has answered with none of them."""
        return not self.loaded and not self.serves_own_weights

    def reference(self) -> StoredCheckpoint | None:
        """Return the weights that the engine holds now; None where nobody knows them."""
        from windlass.engines.capture.codes import StoredCheckpoint

        return StoredCheckpoint(Path(self.checkpoint)) if self.loaded else None


class CapturedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found when it captured its layout: names of tensors.

    Attributes:
        unplaced: of the checkpoint, that left no trace on this rank. unread: those of them that the
            loader passed by.
        recomputed: see `windlass.engines.capture.description.Captured`.
        buffer_nbytes: of buffers that stay, because these tensors are received there.
        seconds: that stages of the capture took; empty for one of an earlier join.
    """

    unplaced: tuple[str, ...]
    unread: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    buffer_nbytes: int
    seconds: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How an engine's own server is started: its command line, and what its environment has besides."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class RankStep(StrEnum):
    """What the ranks of a server are told to do, in this order, before they are in a fleet."""

    CAPTURE = "capture"
    JOIN = "join"


class EngineServer(Protocol):
    """A server of somebody else's, whose ranks run an agent: see `windlass.engines.launch`.

    Attributes:
        ready_line: what it logs once it serves.
        answers_for_all: whether every rank has carried out an order once the server has answered it.
    """

    ready_line: str
    answers_for_all: bool

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        """Return how to start the server.

        `args`: options that every engine has, see `windlass.engines.launch.arguments`; `rest`: the server's own.

        Raises:
            ConfigError: options that do not go together, or that this release cannot do.
        """
        ...

    def order(
        self, server: EngineHttp, step: RankStep, settings: AgentSettings, folder: str
    ) -> None:
        """Have every rank capture its layout, or join the fleet after leaving the one before.

        No rank is in a fleet because of the first. Each reports in `folder`, see
        `windlass.engines.rank_reports.carry_out`: what it has captured as a `CapturedLayout` in JSON, or nothing.

        Raises:
            ConfigError: a setting that an update does not survive.
            PeerUnreachable: the server is not there, or could not have its ranks do it. PeerTimeout.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a job says of one of its engines.

    Attributes:
        model: configuration or checkpoint folder.
        transport: of the weights: a name, or a configuration as JSON.
        port: of its server; 0 lets the system choose, for an engine that can.
        num_nodes: that its ranks are spread over. node: the one that the command is for.
        arguments: the engine's own.
        python: interpreter; this one when empty.
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
    """An engine.

    Attributes:
        name: in configurations and on command lines; that of its folder or entry point.
        title: for people.
        module: what `python -m` starts; takes the options that `command` gives.
        releases: what is known of them; None for an engine that comes with Windlass or a plugin.
        rules: of its options and settings.
        server: of somebody else's, which a launcher starts and whose ranks are told to join; None for
            an engine whose ranks join by themselves.
        check: raises ConfigError for the words of a command line that an engine without a `server` is not started with.
        context_option: option that bounds the tokens of a prompt with its answer; empty if none is known.
        default_context: that bound where the option is not given, if it does not depend on the model.
        needs_port: whether its server cannot choose a port by itself.
        spans_nodes: whether its server may be started in parts, one on each of several nodes.
        cpu_arguments: options with which it serves a small model on a machine without a GPU.
        cpu_environment: variables for the same.
        gpu_arguments: options with which it serves a small model on a GPU that it shares with others.
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
    cpu_arguments: tuple[str, ...] = ()
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    gpu_arguments: tuple[str, ...] = ()

    def command(self, options: EngineOptions) -> tuple[str, ...]:
        """Return the command line of a process that serves, and whose ranks join the fleet.

        Raises:
            ConfigError: the engine needs a port, and has none.
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
