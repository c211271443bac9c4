"""Metrics of a job for TensorBoard and Weights & Biases, in addition to the JSON lines of the output folder."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

import msgspec

from windlass.errors import ConfigError

_log = logging.getLogger(__name__)
FOLDER = "tensorboard"
"""Name of the folder of events in the output folder."""


class LogSection(msgspec.Struct, frozen=True, kw_only=True):
    """Additional destinations of the metrics of steps and evaluations.

    Attributes:
        tensorboard: whether to write events into `output_dir/tensorboard`.
        wandb: name of a project of Weights & Biases; empty for none. The run is written into `output_dir/wandb`.
        wandb_mode: "offline", so that `wandb sync` uploads the run later, or "online".
    """

    tensorboard: bool = False
    wandb: str = ""
    wandb_mode: str = "offline"

    def __post_init__(self) -> None:
        if self.wandb_mode not in {"offline", "online"}:
            raise ConfigError(
                f"log.wandb_mode must be 'offline' or 'online', got {self.wandb_mode!r}"
            )


class MetricLog(Protocol):
    """Place for metrics."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, by name."""
        ...

    def close(self) -> None:
        """Write all metrics to files."""
        ...


@final
class TensorBoardLog(MetricLog):
    """Event file for TensorBoard. Earlier events of steps that a job repeats are hidden.

    Args:
        folder: output folder of the job.
        first_step: number of the first step that the job trains.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        board = _library("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = board.SummaryWriter(str(folder / FOLDER), purge_step=first_step)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and flush the file."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


@final
class WandbLog(MetricLog):
    """Run of Weights & Biases. Each launch of a job is a new run; its group has the name of the output folder."""

    def __init__(self, folder: Path, settings: LogSection) -> None:
        wandb = _library("wandb", "wandb")
        self._run: Any = wandb.init(
            project=settings.wandb, dir=str(folder), mode=settings.wandb_mode, group=folder.name
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, with the number of the step as the metric `step`."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run; with the mode "online", this waits for the upload."""
        self._run.finish()


@final
class MetricLogs:
    """All logs of a job. The first error while a metric is written or a log is closed is logged, and no error ends the job.

    Args:
        settings: the places.
        folder: output folder of the job.
        first_step: number of the first step that the job trains.

    Raises:
        ConfigError: a library is not installed.
    """

    def __init__(self, settings: LogSection, folder: Path, first_step: int) -> None:
        self._logs: list[MetricLog] = []
        self._warned = False
        if settings.tensorboard:
            self._logs.append(TensorBoardLog(folder, first_step))
        if settings.wandb:
            self._logs.append(WandbLog(folder, settings))

    def add(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step with the names `kind/NAME`. If a library raises, log the first error and continue."""
        for each in self._logs:
            try:
                each.add(step, {f"{kind}/{name}": value for name, value in metrics.items()})
            except Exception as error:  # noqa: BLE001 - the boundary of other libraries
                self._warn(each, error)

    def close(self) -> None:
        """Close all logs. Blocks while a log uploads metrics. Idempotent."""
        while self._logs:
            log = self._logs.pop()
            try:
                log.close()
            except Exception as error:  # noqa: BLE001 - the boundary of other libraries
                self._warn(log, error)

    def _warn(self, log: MetricLog, error: Exception) -> None:
        if not self._warned:
            _log.warning("metrics were not written to %s: %r", type(log).__name__, error)
        self._warned = True


def _library(module: str, extra: str) -> Any:
    """Import a module of another library; raise `ConfigError` that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log.{extra}: the library {extra} must be installed: {error}; install Windlass with the extra `{extra}`"
        ) from error
