"""What this machine can do at best, measured now, to compare with."""

from __future__ import annotations

import statistics
import time

import numpy as np

__all__ = ["memcpy_gbps"]


def memcpy_gbps(nbytes: int = 128 << 20, repeats: int = 5) -> float:
    """Median GB/s of one thread copying `nbytes` between pre-touched buffers (bytes copied)."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    np.copyto(target, source)  # touches every page of both before anything is timed
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds) / 1e9
