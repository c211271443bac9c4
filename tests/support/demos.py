"""The main job as `windlass demo` runs it, and checks of its result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.envs import inherited_environment

__all__ = ["check_demo", "run_demo"]


def run_demo(
    tmp_path: Path, *options: str, steps: int, environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Run the demo and return its measurements. Its output is then in `demo.txt`."""
    json_path = tmp_path / "demo.json"
    command = (
        *(sys.executable, "-m", "windlass.cli.main", "demo", "--plain", "--steps", str(steps)),
        *("--output", str(tmp_path / "out"), "--json", str(json_path), *options),
    )
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
        env={**inherited_environment(), **(environment or {})},
    )
    (tmp_path / "demo.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    measured: dict[str, object] = json.loads(json_path.read_text())
    return measured


def check_demo(
    measured: dict[str, object],
    steps: int,
    engines: Sequence[str] = ("engine-a", "engine-b"),
    *,
    least_control: float = 0.9,
) -> None:
    """Check the result of any demo.

    Args:
        measured: result of `run_demo`.
        steps: requested steps.
        engines: engines that serve the last version.
        least_control: least share of answers that would reveal a wrong version. It is lower for wide
            models, which take small steps in bfloat16.
    """
    updates = measured["updates"]
    rollouts = measured["rollouts"]
    check = measured["torn_check"]
    pace = measured["pace"]
    assert isinstance(updates, list)
    assert isinstance(rollouts, dict)
    assert isinstance(check, dict)
    assert isinstance(pace, dict)
    assert [u["version"] for u in updates] == list(range(steps + 1))
    assert all(u["digest_ok"] and u["measures"]["nbytes"] > 0 for u in updates)
    assert measured["torn"] == 0
    assert check["checked"] > 0
    assert check["control_detected"] > least_control, "the torn check would not have found anything"
    assert rollouts["lost"] == 0
    assert rollouts["submitted"] >= rollouts["completed"] > 0
    assert measured["problems"] == []
    assert sorted(updates[-1]["engines"]) == list(engines)
    assert pace["samples_per_hour"] == check["checked"] * 3600 / pace["seconds"]
    assert 0 < pace["paused_share"] < 1
    assert 0 < pace["idle_share"] + pace["step_share"] < 1
