"""The demo with live, unmodified servers of vLLM and SGLang: rollout controller, worker and updates together.

With `WINDLASS_VLLM_OWN_VERSIONS=1`, vLLM 0.32 answers and pauses like 0.24, the release that runs on GPUs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from demo_checkpoint import write_checkpoint
from demos import check_demo, run_demo
from needs import need_package, need_transport
from servers import VENVS

pytestmark = pytest.mark.engines
STEPS = 8


def need_engine(kind: str) -> None:
    """Skip the test unless an environment has the engine."""
    if not (VENVS[kind] / "bin/python").exists():
        pytest.skip(f"{kind} is not installed: {VENVS[kind]}")


@pytest.mark.parametrize(
    ("own_versions", "mode"), [("1", "in_place"), ("1", "staged"), ("", "in_place")]
)
def test_every_answer_of_a_live_vllm_names_the_versions_that_made_it(
    tmp_path: Path, own_versions: str, mode: str
) -> None:
    need_engine("vllm")
    measured = run_demo(
        tmp_path,
        *("--engine", "vllm", "--mode", mode),
        steps=STEPS,
        environment={"WINDLASS_VLLM_OWN_VERSIONS": own_versions},
    )
    check_demo(measured, STEPS, ["engine-a"])


@pytest.mark.parametrize(
    "options",
    [
        ("--engine", "sglang"),
        ("--engine", "sglang", "--trainer", "megatron"),
        ("--engine", "vllm", "--trainer", "megatron"),
        ("--engine", "sglang", "--backend", "xccl"),
        ("--engine", "vllm", "--backend", "disk"),
        ("--engine", "vllm", "--transport", "mooncake"),
        ("--engine", "vllm", "--transport", "auto"),
    ],
    ids=" ".join,
)
def test_every_answer_names_the_versions_that_made_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    need_engine(options[1])
    if "megatron" in options:
        need_package("megatron")
    if "mooncake" in options:
        need_transport("mooncake")
    check_demo(run_demo(tmp_path, *options, steps=STEPS), STEPS, ["engine-a"])


@pytest.mark.parametrize(
    "options",
    [
        ("--engine", "vllm", "--backend", "xccl", "--trainer", "megatron"),
        ("--engine", "sglang", "--trainer", "megatron"),
    ],
    ids=" ".join,
)
def test_a_checkpoint_and_the_engines_own_transfer(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Trainer and engine load a checkpoint, prompts are text, and a second job uses the engine's own transfer."""
    need_engine(options[1])
    if "megatron" in options:
        need_package("megatron")
    folder = write_checkpoint(tmp_path / "checkpoint")
    measured = run_demo(
        tmp_path,
        *(*options, "--checkpoint", str(folder), "--learning-rate", "2e-3", "--compare"),
        steps=4,
    )
    check_demo(measured, 4, ["engine-a"])
    own = measured["own_transfer"]
    assert isinstance(own, dict)
    assert (own["torn"]["torn"], own["lost"]) == (0, 0)
    assert own["torn"]["checked"] > 0
    assert own["torn"]["control_detected"] > 0.9
    assert len(own["update_s"]) == len(own["pause_s"]) == 4
    shown = (tmp_path / "demo.txt").read_text().partition("the same job with")[2]
    assert re.findall(r"^v(\d) +update", shown, re.MULTILINE) == ["0", "1", "2", "3", "4"]


def test_a_vllm_server_killed_during_an_update_serves_the_last_version(tmp_path: Path) -> None:
    need_engine("vllm")
    measured = run_demo(tmp_path, "--engine", "vllm", "--kill-engine-at", "3", steps=6)
    check_demo(measured, 6)
    assert any("was published without engine-b" in str(event) for event in measured["events"])  # type: ignore[attr-defined]
