"""The scripts of the pages on rollouts run unchanged."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from pages import blocks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHOWN = [block for page in ("tutorials/rollouts.md", "rollout.md") for block in blocks(DOCS / page)]
ADDRESS = "http://127.0.0.1:8100"
SAID = {
    "next_batch(GROUPS": [f"step {step}: 32 samples to train on" for step in range(3)],
    "submit_workflow_group": ["2 turns: {'reward': 1.0}"] * 4,
}
"""Text of one script -> its output with an engine that counts upwards."""


@pytest.mark.parametrize("own", SAID)
async def test_a_script_of_the_page_runs_against_an_engine(own: str, tmp_path: Path) -> None:
    (code,) = (block for block in SHOWN if own in block)
    script = tmp_path / "rollouts.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": "a-token"}
    async with FakeEngine("engine-a", version=-1) as engine, asyncio.timeout(60):
        script.write_text(code.replace(ADDRESS, engine.url))
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, env=environment, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
    assert (process.returncode, said.decode().splitlines()) == (0, SAID[own])


def test_every_script_of_the_page_is_run() -> None:
    scripts = [block for block in SHOWN if block.startswith("import ")]
    assert [sum(own in script for own in SAID) for script in scripts] == [1] * len(SAID)
