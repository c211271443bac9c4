"""What this machine can do at best, measured now: a throughput means little without it."""

from __future__ import annotations

import mmap
import time

import numpy as np


def measure_memcpy_gbps(nbytes: int = 256 << 20, repeats: int = 7) -> float:
    """The median memcpy rate of one thread between two touched buffers.

    Args:
        nbytes: size of each buffer; well above the last-level cache, or it measures that.
        repeats: runs; the first one is not counted.

    Returns:
        10^9 bytes copied per second.
    """
    # Page-aligned, because memcpy between unlike alignments takes up to three times as long;
    # written, because pages that were never touched are all the same page.
    source = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    target = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    source[:], target[:] = 1, 2
    np.copyto(target, source)
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return nbytes / sorted(seconds)[len(seconds) // 2] / 1e9
