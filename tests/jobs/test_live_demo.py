"""The demo with live, unmodified vLLM servers: rollout controller, worker and updates together.

With `WINDLASS_VLLM_OWN_VERSIONS=1`, vLLM 0.32 answers and pauses like 0.24, the release that runs on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from demos import check_demo, run_demo
from servers import VENVS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (VENVS["vllm"] / "bin/python").exists(),
        reason=f"vLLM is not installed: {VENVS['vllm']}",
    ),
]


@pytest.mark.parametrize(
    ("own_versions", "mode"), [("1", "in_place"), ("1", "staged"), ("", "in_place")]
)
def test_every_answer_of_a_live_vllm_names_the_versions_that_made_it(
    tmp_path: Path, own_versions: str, mode: str
) -> None:
    measured = run_demo(
        tmp_path,
        *("--engine", "vllm", "--mode", mode),
        steps=8,
        environment={"WINDLASS_VLLM_OWN_VERSIONS": own_versions},
    )
    check_demo(measured, 8, ["engine-a"])


def test_a_vllm_server_killed_during_an_update_serves_the_last_version(tmp_path: Path) -> None:
    measured = run_demo(tmp_path, "--engine", "vllm", "--kill-engine-at", "3", steps=6)
    check_demo(measured, 6)
    assert any("was published without engine-b" in str(event) for event in measured["events"])  # type: ignore[attr-defined]
