"""Metrics in the files of the real libraries of TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.errors import ConfigError
from windlass.jobs.metric_logs import FOLDER, LogSection, MetricLogs


def test_tensorboard_shows_each_step_once_after_a_job_continued(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 5), (4, 7)):
        logs = MetricLogs(LogSection(tensorboard=True), tmp_path, first)
        for step in range(first, last):
            logs.add("train", step, {"reward": first + step / 8})
        logs.close()
    found: Any = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    # The first job trained steps 1 to 4, and the second continued at step 4.
    expected = [(1, 1.125), (2, 1.25), (3, 1.375), (4, 4.5), (5, 4.625), (6, 4.75)]
    assert [(event.step, event.value) for event in found.Scalars("train/reward")] == expected


# A thread of TensorBoard ends with the error at any later time, so this job is a process of its own.
UNWRITABLE_JOB = """
import logging, pathlib, shutil, sys
from windlass.jobs.metric_logs import FOLDER, LogSection, MetricLogs

logging.basicConfig(stream=sys.stdout)
folder = pathlib.Path(sys.argv[1])
logs = MetricLogs(LogSection(tensorboard=True), folder, 1)
shutil.rmtree(folder / FOLDER)
for step in (1, 2):
    logs.add("train", step, {"reward": 0.5})
logs.close()
print("the job has ended")
"""


def test_a_log_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    """Regression: the error of the log's close skipped the end of the job, so its summary was not written."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    job = [sys.executable, "-c", UNWRITABLE_JOB, str(tmp_path)]
    done = subprocess.run(job, check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.count("not written to TensorBoardLog") == 1
    assert done.stdout.endswith("the job has ended\n")


# Wandb's service writes the last records when the process of the job ends, which may be after `close`.
WANDB_JOB = """
import pathlib, sys
from windlass.jobs.metric_logs import LogSection, MetricLogs

logs = MetricLogs(LogSection(wandb="project"), pathlib.Path(sys.argv[1]), 1)
logs.add("evaluation", 3, {"accuracy": 0.625})
logs.close()
"""


def test_wandb_writes_a_run_without_a_network(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("the extra wandb is not installed")
    quiet = {**os.environ, "WANDB_SILENT": "true"}
    job = [sys.executable, "-c", WANDB_JOB, str(tmp_path)]
    subprocess.run(job, check=True, timeout=120, env=quiet)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"evaluation/accuracy" in run.read_bytes()
    assert b"0.625" in run.read_bytes()


def test_a_mode_of_wandb_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"log\.wandb_mode must be 'offline' or 'online', got 'on'"
    ):
        LogSection(wandb_mode="on")
