"""Processes of a proof write the stacks of their threads to their logs, so that a hang tells its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
WAITS = "def waits_here():\n print('up', flush=True)\n input()\nwaits_here()"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}], check=True)"


def test_a_process_below_another_writes_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    from live_engine.stacks import write_stacks

    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTS],
            env={**os.environ, "PYTHONPATH": str(GPU / "live_engine/at_start")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    write_stacks(process.pid)
    ends = time.monotonic() + 30
    while "waits_here" not in log.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    assert "waits_here" in log.read_text()
    # Both processes still run.
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
