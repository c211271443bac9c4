"""The main job, whole: real trainers, real engines, real updates, every answer checked."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need_transport
from slurm_cluster import missing_reason, slurm_cluster

STEPS = 8
FEW_STEPS = 4
"""With two versions of staleness, three could be fed by the first version's answers alone."""


def run_demo(tmp_path: Path, *options: str, steps: int = STEPS) -> dict[str, object]:
    """Run the demo; returns what it measured."""
    json_path = tmp_path / "demo.json"
    command = (
        *(sys.executable, "-m", "windlass.cli.main", "demo", "--plain", "--steps", str(steps)),
        *("--output", str(tmp_path / "out"), "--json", str(json_path), *options),
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured: dict[str, object] = json.loads(json_path.read_text())
    assert (tmp_path / "out" / "demo.png").stat().st_size > 0
    return measured


def check(measured: dict[str, object], steps: int = STEPS) -> None:
    """What every demo must show."""
    updates = measured["updates"]
    rollouts = measured["rollouts"]
    check = measured["torn_check"]
    assert isinstance(updates, list)
    assert isinstance(rollouts, dict)
    assert isinstance(check, dict)
    assert [u["version"] for u in updates] == list(range(steps + 1))
    assert all(u["digest_ok"] and u["nbytes"] > 0 for u in updates)
    assert measured["torn"] == 0
    assert check["checked"] > 0
    assert check["control_detected"] > 0.9, "the torn check would not have found anything"
    assert rollouts["lost"] == 0
    assert rollouts["submitted"] >= rollouts["completed"] > 0
    assert measured["problems"] == []
    updates_by_last = updates[-1]["engines"]
    assert sorted(updates_by_last) == ["engine-a", "engine-b"]


@pytest.mark.long
def test_ctrl_c_ends_a_demo_without_a_word(tmp_path: Path) -> None:
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
@pytest.mark.timeout(300)
def test_an_engine_killed_in_mid_update_catches_up_over_cma_in_place(tmp_path: Path) -> None:
    measured = run_demo(tmp_path, "--kill-engine-at", "3")
    check(measured)
    updates = measured["updates"]
    assert isinstance(updates, list)
    assert "engine-b" in updates[3]["left_out"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_staged_updates_over_mooncake(tmp_path: Path) -> None:
    need_transport("mooncake")
    options = ("--transport", "mooncake", "--mode", "staged")
    check(run_demo(tmp_path, *options, steps=FEW_STEPS), steps=FEW_STEPS)


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())
@pytest.mark.timeout(300)
def test_every_process_as_a_step_of_a_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        check(run_demo(tmp_path, "--scheduler", "slurm", steps=FEW_STEPS), steps=FEW_STEPS)


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.timeout(300)
def test_every_process_in_a_ray_placement_group(tmp_path: Path) -> None:
    check(run_demo(tmp_path, "--scheduler", "ray", steps=FEW_STEPS), steps=FEW_STEPS)
