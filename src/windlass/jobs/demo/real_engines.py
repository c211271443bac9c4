"""The demo's engine as an unmodified SGLang or vLLM server of an environment of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

import windlass
from windlass.engines.spec import ENGINES
from windlass.envs import environment_value
from windlass.errors import ConfigError
from windlass.jobs.demo.grpo import build_model
from windlass.jobs.demo.settings import DemoSettings, EngineSpec
from windlass.jobs.schedulers.base import ProcessSpec
from windlass.layout.dtypes import DType
from windlass.memory.torch_dtypes import torch_dtype
from windlass.net.addresses import free_port

__all__ = ["prepare_real_engine", "real_engine"]


def prepare_real_engine(settings: DemoSettings) -> None:
    """Check the environment and write the checkpoint that the engine starts with.

    Its weights are not the trainer's: what is served later came by updates.

    Raises:
        ConfigError: there is no interpreter in the engine's environment.
    """
    if not _interpreter(settings.engine).exists():
        raise ConfigError(
            f"demo: {_variable(settings.engine)} must name an environment with {settings.engine}, got "
            f"{str(_venv(settings.engine))!r} (`make engines` installs one for CPUs)"
        )
    config = msgspec.json.decode(settings.model_config_path.read_bytes())
    for spec in settings.engines:
        model = build_model(config, settings.seed + 1).to(torch_dtype(DType(spec.dtype)))
        model.save_pretrained(_checkpoint(settings, spec))  # type: ignore[operator]
    link = _package_dir(settings) / "windlass"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path(windlass.__file__).parent, target_is_directory=True)


def real_engine(settings: DemoSettings, spec: EngineSpec, controller: str) -> ProcessSpec:
    """How to start one engine of the fleet."""
    command = (
        *(str(_interpreter(settings.engine)), "-m", f"windlass.engines.{settings.engine}"),
        *("--name", spec.name, "--model", str(_checkpoint(settings, spec))),
        *("--tp", str(spec.tensor_parallel_size), "--port", str(free_port())),
        *("--controller", controller, "--transport", settings.transport),
        *("--dtype", spec.dtype, *ENGINES.find(settings.engine).cpu_arguments),
    )
    environment = {
        **ENGINES.find(settings.engine).cpu_environment,
        # The package alone: the engine's environment has its own torch and transformers.
        "PYTHONPATH": str(_package_dir(settings).resolve()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.engine == "sglang" and spec.tensor_parallel_size > 1:
        bind = "|".join(str(rank) for rank in range(spec.tensor_parallel_size))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = bind
    return ProcessSpec(name=spec.name, command=command, environment=environment)


def _variable(engine: str) -> str:
    return f"WINDLASS_{engine.upper()}_VENV"


def _venv(engine: str) -> Path:
    return Path(environment_value(_variable(engine)) or f".venv-{engine}")


def _interpreter(engine: str) -> Path:
    return (_venv(engine) / "bin" / "python").absolute()


def _checkpoint(settings: DemoSettings, spec: EngineSpec) -> Path:
    return (settings.directory / "start" / spec.name).absolute()


def _package_dir(settings: DemoSettings) -> Path:
    return settings.directory / "package"
