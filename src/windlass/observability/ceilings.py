"""Measurements of this machine's limits, as a reference for throughput figures."""

from __future__ import annotations

import mmap
import time

import numpy as np


def measure_memcpy_gbps(nbytes: int = 256 << 20, repeats: int = 7) -> float:
    """Return the median memcpy rate of one thread between two buffers in host memory.

    Args:
        nbytes: size of each buffer. Buffers that fit into the last-level cache give the rate of the cache.
        repeats: number of measured copies, after one copy to warm up.

    Returns:
        Rate in 10^9 bytes per second.
    """
    # `mmap` aligns both buffers to pages: memcpy between different alignments takes up to three times as
    # long. Write to both first: until the first write, the kernel maps all pages to one page of zeros.
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
