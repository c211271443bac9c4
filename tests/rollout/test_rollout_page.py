"""The script of docs/rollout.md, as somebody who copies it runs it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from fake_engine import FakeEngine
from pages import blocks

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8100"


async def test_the_script_of_the_page_runs_against_an_engine(tmp_path: Path) -> None:
    code = next(block for block in blocks(ROOT / "docs/rollout.md") if ADDRESS in block)
    script = tmp_path / "rollouts.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": "a-token"}
    async with FakeEngine("engine-a") as engine, asyncio.timeout(60):
        script.write_text(code.replace(ADDRESS, engine.url))
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, env=environment, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
    lines = [f"step {step}: 32 samples to train on" for step in range(3)]
    assert (process.returncode, said.decode().splitlines()) == (0, lines)
