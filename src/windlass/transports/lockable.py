"""Whether this process may lock (pin) more memory: asked before a library that hangs when it may not.

UCX tries again without end when the kernel refuses to pin, so the kernel is not left to refuse.
"""

from __future__ import annotations

import resource
from pathlib import Path

from windlass.errors import RegionError

__all__ = ["check_lockable"]

_CAP_IPC_LOCK = 14


def check_lockable(nbytes: int, purpose: str) -> None:
    """Refuse what the kernel would refuse: pinned memory above RLIMIT_MEMLOCK.

    Args:
        nbytes: bytes to be pinned beside those that are.
        purpose: what for, at the head of the message.

    Raises:
        RegionError: the limit is too small, and this process has no CAP_IPC_LOCK.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    )
    if limit == resource.RLIM_INFINITY or int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
        return
    needed = int(status["VmPin"].split()[0]) * 1024 + nbytes
    if needed > limit:
        raise RegionError(
            f"{purpose}: lockable memory must be >= {needed} bytes, got {limit}; see ulimit -l"
        )
