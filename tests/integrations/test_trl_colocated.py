"""On CPUs, a real `GRPOTrainer(vllm_mode="colocate")` of TRL updates the vLLM in its own processes through Windlass.

After every sync, every tensor of vLLM equals a fresh load of the trainer's weights; `trl_colocated_run.py` compares them,
and describes what it replaces on CPUs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT
from trl_fleet import command, environment, make_model

from windlass.engines.vllm.spec import ENGINE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

RUN_S = 800.0
SCRIPT = ROOT / "tests" / "integrations" / "trl_colocated_run.py"
LAST_BIT = 1e-5
"""Largest difference of log-probabilities that vLLM and the trainer compute in float32 with the same weights."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trl") / "model")


def train(folder: Path, model: Path, *, num_ranks: int = 1, **settings: Any) -> dict[str, Any]:
    """Run `trl_colocated_run.py`, and return its results. `settings` are fields of its `Settings`."""
    file, out = folder / "settings.json", folder / "out.json"
    file.write_text(json.dumps({"model": str(model), "out": str(out), **settings}))
    places = (ROOT / "src", ROOT / "tests" / "support", ROOT / "tests" / "integrations")
    ended = subprocess.run(
        command(str(file), num_ranks=num_ranks, script=SCRIPT),
        env={
            **environment(), **ENGINE.cpu_environment, "PYTHONPATH": ":".join(map(str, places)),
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=RUN_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def assert_synced(found: dict[str, Any], num_syncs: int) -> None:
    """Check that each sync was compared, that vLLM's loader ran in none, and that vLLM samples by the trainer's weights."""
    assert len(found["compared"]) == num_syncs
    assert min(found["compared"]) > 20
    assert found["loads"] == 0
    steps = [row for row in found["log"] if "reward" in row]
    assert len(steps) == num_syncs
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < LAST_BIT
    assert min(row["grad_norm"] for row in steps) > 0


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "sleep"])
def test_colocated_vllm_gets_every_tensor_and_refuses_to_generate_after_a_failed_sync(
    sleep: bool, model: Path, tmp_path: Path
) -> None:
    found = train(tmp_path, model, steps=4, sleep=sleep, fails_at=3)
    assert_synced(found, 4)
    # The failed sync was version 3.
    assert found["version"] == "5"
    failed, refused = found["refused"].split(" / ")
    assert "version 3 was not published" in failed
    assert refused == (
        "generate: the weights of the engine sleep, are lost or may be of two versions; send a version first"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_fsdp_ranks_fill_their_engines_and_gather_nothing(
    tp: int, model: Path, tmp_path: Path
) -> None:
    found = train(tmp_path, model, num_ranks=2, steps=3, tensor_parallel_size=tp)
    assert_synced(found, 3)
    assert found["num_sharded"] == found["num_parameters"] > 0
    assert found["version"] == "3"


def test_colocated_vllm_serves_a_merged_adapter(model: Path, tmp_path: Path) -> None:
    assert_synced(train(tmp_path, model, steps=3, lora=True), 3)
