"""What one link can reach at best, by wire: how binding tells the faster of two transports.

The order counts, not the last digit. A transport of another distribution states its own number.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CEILING_BYTES_PER_S"]

CEILING_BYTES_PER_S: Mapping[str, float] = {
    "cuda-ipc": 397e9,  # copy engine from one H200 to another, benchmarks/gpu/bench_nvlink.py
    "cuda-ipc-pieces": 270e9,  # the same by UCX, which issues a copy per piece
    "rdma": 50e9,  # a NIC of 400 Gbit/s
    "memory": 9e9,  # memcpy by one thread of a 2-core EPYC guest, as the next three
    "posix-shm": 8.6e9,  # 0.95 of memcpy, benchmarks/bench_transports.py
    "process_vm_writev": 6e9,  # 0.66 of memcpy
    "process_vm_writev-ucx": 3e9,  # one thread copies
    "tcp": 1.2e9,  # a NIC of 10 Gbit/s
}
"""Bytes per second."""
