"""The page of capabilities is what the recorded rows give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_capabilities_is_made_from_the_records() -> None:
    command = (sys.executable, str(ROOT / "tools" / "render_capabilities.py"), "--check")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
