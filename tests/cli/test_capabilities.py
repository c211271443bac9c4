"""Tables in the documentation agree with the committed results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "tool", [("render_capabilities.py", "--check"), ("features.py", "render", "--check")]
)
def test_the_tools_render_tables_from_results(tool: tuple[str, ...]) -> None:
    command = (sys.executable, str(ROOT / "tools" / tool[0]), *tool[1:])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
