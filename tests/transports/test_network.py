from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, resource
from windlass.errors import RegionError
from windlass.transports.network import check_lockable
check_lockable(1, "a few")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock what it likes
check_lockable(4096, "a page")
try:
    check_lockable(1 << 20, "register: 0x1000")
except RegionError as error:
    print(error)
"""


def test_more_than_the_limit_of_lockable_memory_is_refused_by_name() -> None:
    done = subprocess.run(
        (sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(
        "register: 0x1000: the limit of locked memory must be >= 1048576 bytes"
    )
    assert "ulimit -l" in done.stdout
