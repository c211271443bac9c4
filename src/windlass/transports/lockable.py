"""Whether this process may lock (pin) more memory: asked before a library that hangs when it may not.

UCX tries again without end when the kernel refuses to pin, so the kernel is not left to refuse.
"""

from __future__ import annotations

import resource
from pathlib import Path

from windlass.errors import RegionError

_CAP_IPC_LOCK = 14


def locks_without_limit() -> bool:
    """Whether this process has CAP_IPC_LOCK, for which RLIMIT_MEMLOCK does not hold."""
    return bool(int(_status("CapEff"), 16) >> _CAP_IPC_LOCK & 1)


def check_lockable(nbytes: int, purpose: str) -> None:
    """Refuse what the kernel would refuse: pinned memory above RLIMIT_MEMLOCK.

    Args:
        nbytes: bytes to be pinned beside those that are.
        purpose: what for, at the head of the message.

    Raises:
        RegionError: the limit is too small, and this process has no CAP_IPC_LOCK.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or locks_without_limit():
        return
    needed = int(_status("VmPin")) * 1024 + nbytes
    if needed > limit:
        raise RegionError(
            f"{purpose}: lockable memory must be >= {needed} bytes, got {limit}; see ulimit -l"
        )


def _status(key: str) -> str:
    """The number at `key` in what the kernel says of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return text.partition(f"\n{key}:")[2].split(maxsplit=1)[0]
