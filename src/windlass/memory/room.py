"""Size of the memory that contains a rank's weights, and the number of bytes in use there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from windlass.errors import WindlassError
from windlass.memory.cuda.driver import Device

HOST = "host"
"""Name of host memory in `Room.name`; a GPU's memory has the UUID of the GPU."""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of this process's control group (version 2, version 1)."""


class Room(NamedTuple):
    """Memory of the host or of one GPU.

    Attributes:
        name: `HOST`, or the UUID of the GPU; empty if it is not known.
        nbytes: size in bytes.
    """

    name: str
    nbytes: int


def room_of(ordinal: int) -> Room:
    """Return the total memory of GPU `ordinal`, or of the host if `ordinal` is -1.

    If the driver does not answer, the memory has an empty name and size 0. The size of host memory is at most the limit
    of this process's control group.
    """
    if ordinal >= 0:
        try:
            device = Device(ordinal)
            return Room(device.uuid, device.memory()[1])
        except WindlassError:
            return Room("", 0)
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        # Without a limit, the file contains the text "max".
        with suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    return Room(HOST, min(sizes))


def used_nbytes(ordinal: int) -> int:
    """Return the bytes of GPU `ordinal` that all processes use; for -1, the resident host memory of this process.

    If this number cannot be read, for example because this process has no file descriptor left, return 0. Do not raise,
    because the number is only for a report.
    """
    try:
        if ordinal < 0:
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        free, total = Device(ordinal).memory()
    except (OSError, WindlassError):
        return 0
    return total - free
