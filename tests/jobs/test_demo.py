"""The whole demo: real trainers, real engines, real updates, and a check of every answer."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_checkpoint import write_checkpoint
from demos import check_demo, run_demo
from needs import need_package, need_transport
from slurm_cluster import missing_reason, slurm_cluster

STEPS = 8
FEW_STEPS = 4
"""Steps of a short demo. With a staleness of two, the first version's answers would be enough for three steps."""


@pytest.mark.long
def test_ctrl_c_ends_a_demo_without_a_traceback(tmp_path: Path) -> None:
    command = (
        *(sys.executable, "-m", "windlass.cli.main", "demo", "--plain"),
        *("--output", str(tmp_path / "out")),
    )
    demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert demo.stderr is not None
    with demo, demo.stderr as said:
        connected = next((line for line in said if "connected" in line), "")
        assert connected, "it ended by itself"
        demo.send_signal(signal.SIGINT)
        after = said.read()
        assert demo.wait(60) == 130
    assert "Traceback" not in after, after
    assert "never retrieved" not in after, after


@pytest.mark.long
def test_an_engine_killed_during_an_update_catches_up_over_cma_in_place(tmp_path: Path) -> None:
    measured = run_demo(tmp_path, "--kill-engine-at", "3", steps=STEPS)
    check_demo(measured, STEPS)
    updates = measured["updates"]
    assert isinstance(updates, list)
    assert "engine-b" in updates[3]["left_out"]


@pytest.mark.long
def test_a_demo_makes_staged_updates_over_mooncake(tmp_path: Path) -> None:
    need_transport("mooncake")
    options = ("--transport", "mooncake", "--mode", "staged")
    check_demo(run_demo(tmp_path, *options, steps=FEW_STEPS), FEW_STEPS)


def demos_of_the_tutorial() -> list[str]:
    page = (Path(__file__).parents[2] / "docs/tutorials/laptop.md").read_text()
    return [line for line in re.findall(r'make demo ARGS="([^"]+)"', page) if "cuda" not in line]


@pytest.mark.long
@pytest.mark.parametrize("options", demos_of_the_tutorial())
def test_the_demo_of_the_tutorial_runs(tmp_path: Path, options: str) -> None:
    if "mooncake" in options:
        need_transport("mooncake")
    if "megatron" in options:
        need_package("megatron")
    words = options.split()
    steps = int(words[words.index("--steps") + 1]) if "--steps" in words else FEW_STEPS
    check_demo(run_demo(tmp_path, *words, steps=steps), steps)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["xccl", "disk"])
def test_a_demo_updates_engines_by_another_backend(tmp_path: Path, backend: str) -> None:
    check_demo(run_demo(tmp_path, "--backend", backend, steps=FEW_STEPS), FEW_STEPS)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_a_demo_trains_a_checkpoint_on_prompts_of_text(tmp_path: Path, trainer: str) -> None:
    if trainer == "megatron":
        need_package("megatron")
    folder = write_checkpoint(tmp_path / "checkpoint")
    options = ("--checkpoint", str(folder), "--trainer", trainer, "--learning-rate", "2e-3")
    check_demo(run_demo(tmp_path, *options, steps=FEW_STEPS), FEW_STEPS)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nixl", "auto"])
def test_a_demo_updates_engines_by_another_transport(tmp_path: Path, transport: str) -> None:
    if transport == "nixl":
        need_transport("nixl")
    check_demo(run_demo(tmp_path, "--transport", transport, steps=FEW_STEPS), FEW_STEPS)


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())
def test_a_demo_runs_every_process_as_a_step_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        check_demo(run_demo(tmp_path, "--scheduler", "slurm", steps=FEW_STEPS), FEW_STEPS)


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_demo_runs_every_process_in_a_ray_placement_group(tmp_path: Path) -> None:
    check_demo(run_demo(tmp_path, "--scheduler", "ray", steps=FEW_STEPS), FEW_STEPS)
