"""Small jobs of `windlass launch` for tests: one rank, one engine, rollouts in the controller's loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from servers import VENVS

from tools.entry_points import write_entry_points
from windlass.net.addresses import free_port

__all__ = ["EXAMPLE", "check_on_policy", "launch", "start", "vllm_engine", "write_job"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch"
DEADLINE_S = 240.0


def write_job(
    folder: Path,
    recipe: str,
    *,
    top: str = "",
    trainer: str = "",
    rollout: str = "",
    script: Path | None = None,
    num_workers: int = 0,
) -> Path:
    """Write a job and its recipe of class `R` into `folder`; the other arguments are lines of its tables."""
    (folder / "recipe.py").write_text(textwrap.dedent(recipe))
    path = folder / "job.toml"
    path.write_text(
        f"""
output_dir = "{folder}/out"
transport = "cma"
{top}

[environment]
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"

[recipe]
file = "{folder}/recipe.py"
name = "R"

[trainer]
script = "{script or EXAMPLE / "trainer.py"}"
arguments = ["{EXAMPLE}/model.json"]
{trainer}

[[engines]]
name = "engine-a"
model = "{EXAMPLE}/model.json"
arguments = ["--max-positions", "32"]

[rollout]
groups_per_step = 2
samples_per_group = 2
num_workers = {num_workers}
sampling = {{ max_new_tokens = 4, ignore_eos = true }}
{rollout}
"""
    )
    return path


@contextmanager
def start(job: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a job that ends with the block; one pipe carries its output and its log."""
    with subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "launch", str(job)),
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


def launch(job: Path, *, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """Run a job to its end; return its status and its output."""
    with start(job) as (process, _):
        printed, _ = process.communicate(timeout=deadline_s)
        return process.returncode, printed


def vllm_engine(folder: Path, *, max_model_len: int) -> str:
    """Return the lines of a job's engine that make it a live vLLM; skip the test if vLLM is not installed.

    Args:
        folder: folder for a file by which vLLM finds Windlass.
        max_model_len: number of tokens of vLLM's context.
    """
    python = VENVS["vllm"] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"vllm is not installed: {python}")
    path = f"{EXAMPLE.parents[1]}/src:{write_entry_points(folder / 'installed')}"
    return f"""kind = "vllm"
port = {free_port()}
python = "{python}"
environment = {{ PYTHONPATH = "{path}", VLLM_CPU_KVCACHE_SPACE = "1" }}
arguments = ["--max-model-len", "{max_model_len}", "--enforce-eager", "--dtype", "float32"]"""


def check_on_policy(folder: Path) -> None:
    """Check the metrics of a job with three steps.

    The first step is on policy: the trainer gives each token the log-probability that the engine reported.
    """
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line) for line in lines]
    assert first["logprob_difference"] < 1e-4
    assert abs(first["ratio"] - 1) < 1e-4
    assert (last["step"], last["version"], len(lines)) == (3, 3, 3)
    assert first["reward"] > 0.1
