"""What the demo runs, in one frozen value that every process of it reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from windlass.config import DiskBackend, P2pBackend, UpdateBackend, UpdateMode, XcclBackend
from windlass.engines.spec import ENGINES
from windlass.errors import ConfigError
from windlass.transports.configs import parse_transport

__all__ = [
    "REAL_ENGINES",
    "DemoSettings",
    "EngineSpec",
    "SchedulerKind",
    "load_settings",
    "make_directory",
    "real_engine_settings",
    "save_settings",
]


REAL_ENGINES = tuple(name for name in ENGINES.names() if ENGINES.find(name).server)
REAL_TRANSPORTS = ("cma", "mooncake")
BACKENDS: dict[str, Callable[[Path], UpdateBackend]] = {
    "p2p": lambda _: P2pBackend(),
    "xccl": lambda _: XcclBackend(),
    "disk": lambda directory: DiskBackend(folder=str((directory / "weights").resolve())),
}


class SchedulerKind(StrEnum):
    """What starts the processes: this host, the Slurm cluster of this host, a Ray cluster on it."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout engine.

    Attributes:
        name: identity in the fleet.
        tensor_parallel_size: processes that share the model.
        dtype: of the engine's parameters; the trainer's fp32 masters are cast while packed.
    """

    name: str
    tensor_parallel_size: int
    dtype: str


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be chosen.

    Attributes:
        steps: optimiser steps, each followed by a published version.
        prompts_per_step: prompts per step. samples_per_prompt: the GRPO group.
        max_new_tokens: length of every answer.
        max_staleness: how many versions old the oldest token of a trained answer may be.
        num_trainers: FSDP2 ranks.
        engines: the fleet.
        engine: `embedded`, or an unmodified `sglang` or `vllm` server (see `real_engine_settings`).
        scheduler: what starts the processes.
        backend: `p2p`, `xccl` or `disk`.
        transport: of `p2p`: `cma`, `shm` or `mooncake`. mode: `in_place` or `staged`.
        kill_engine_at: version in whose update one engine is killed with SIGKILL; 0 for never.
        learning_rate: of AdamW. seed: of prompts, weights and sampling.
        output_dir: logs, weight snapshots, the PNG.
    """

    steps: int = 40
    prompts_per_step: int = 48
    samples_per_prompt: int = 8
    max_new_tokens: int = 8
    max_staleness: int = 2
    num_trainers: int = 2
    engines: tuple[EngineSpec, ...] = (
        EngineSpec(name="engine-a", tensor_parallel_size=1, dtype="bfloat16"),
        EngineSpec(name="engine-b", tensor_parallel_size=2, dtype="float32"),
    )
    engine: str = "embedded"
    scheduler: SchedulerKind = SchedulerKind.LOCAL
    backend: str = "p2p"
    transport: str = "cma"
    mode: UpdateMode = UpdateMode.IN_PLACE
    kill_engine_at: int = 0
    learning_rate: float = 2e-3
    seed: int = 0
    output_dir: str = "demo-output"

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.steps),
            ("prompts_per_step", self.prompts_per_step),
            ("samples_per_prompt", self.samples_per_prompt),
            ("max_new_tokens", self.max_new_tokens),
        ):
            if value < 1:
                raise ConfigError(f"demo: {name} must be >= 1, got {value}")
        if self.engine not in ("embedded", *REAL_ENGINES):
            raise ConfigError(
                f"demo: engine must be one of {['embedded', *REAL_ENGINES]}, got {self.engine!r}"
            )
        if self.engine in REAL_ENGINES:
            self._check_real()
        if not 0 <= self.kill_engine_at < self.steps:
            raise ConfigError(
                f"demo: kill_engine_at must be in [0, steps={self.steps}), since the engine comes back "
                f"with a later version, got {self.kill_engine_at}"
            )
        parse_transport(self.transport)
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"demo: backend must be one of {list(BACKENDS)}, got {self.backend!r}"
            )

    def _check_real(self) -> None:
        if self.backend != "p2p" or self.transport not in REAL_TRANSPORTS:
            raise ConfigError(
                f"demo: --engine {self.engine} goes with --backend p2p and --transport one of "
                f"{list(REAL_TRANSPORTS)}, got {self.backend!r} and {self.transport!r}"
            )
        if self.kill_engine_at and len(self.engines) < 2:
            raise ConfigError(
                f"demo: kill_engine_at needs two engines, got {len(self.engines)} {self.engine}"
            )

    @property
    def start_deadline_s(self) -> float:
        """How long the fleet may take to come up; SGLang and vLLM import for a minute."""
        return 600.0 if self.engine in REAL_ENGINES else 120.0

    @property
    def step_deadline_s(self) -> float:
        """How long the answers of one step may take."""
        return 300.0 if self.engine in REAL_ENGINES else 120.0

    @property
    def directory(self) -> Path:
        """`output_dir` as an absolute path: a scheduler may start processes elsewhere."""
        return Path(self.output_dir).resolve()

    @property
    def update_backend(self) -> UpdateBackend:
        """How weights travel."""
        return BACKENDS[self.backend](self.directory)

    @property
    def versions_dir(self) -> Path:
        """Where trainer rank 0 keeps each version's weights, for the torn-weights check."""
        return self.directory / "versions"

    @property
    def model_config_path(self) -> Path:
        """The model's transformers configuration."""
        return self.directory / "model.json"

    def model_config(self) -> dict[str, Any]:
        """A small Qwen3 with real attention, grouped KV heads and tied embeddings."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 16,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        }


def real_engine_settings(settings: DemoSettings) -> DemoSettings:
    """One server with one rank, and steps of a size that it answers in seconds on two cores."""
    return msgspec.structs.replace(
        settings,
        engines=(EngineSpec(name="engine-a", tensor_parallel_size=1, dtype="bfloat16"),),
        prompts_per_step=16,
    )


def make_directory(settings: DemoSettings) -> None:
    """Make the output folder anew: what an earlier demo has left there is deleted, nothing else is.

    Raises:
        ConfigError: there is something else, or it cannot be made.
    """
    folder = settings.directory
    made = [folder / "settings.json", settings.model_config_path, settings.versions_dir]
    try:
        if folder.exists() and any(folder.iterdir()) and not all(p.exists() for p in made):
            raise ConfigError(
                "demo: --output must be a new folder, an empty one, or that of an earlier demo, which "
                f"is deleted, got {folder}"
            )
        if folder.exists():
            shutil.rmtree(folder)
        settings.versions_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"demo: --output {folder} cannot be made: {error}") from error


def save_settings(settings: DemoSettings) -> Path:
    """Write the settings and the model's configuration; returns the settings' path."""
    settings.versions_dir.mkdir(parents=True, exist_ok=True)
    settings.model_config_path.write_bytes(msgspec.json.encode(settings.model_config()))
    path = settings.directory / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    return path


def load_settings(path: Path) -> DemoSettings:
    """The inverse of `save_settings`.

    Raises:
        ConfigError: unreadable or invalid.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=DemoSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"demo settings {path}: {error}") from error
