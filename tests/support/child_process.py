"""A Python program that runs during a test and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["running"]


@contextmanager
def running(*command: str, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python COMMAND` with both pipes open and the controller's token; kill it at the end."""
    process = subprocess.Popen(
        (sys.executable, *command),
        env={**os.environ, "WINDLASS_TOKEN": token, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()
