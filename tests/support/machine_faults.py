"""What a machine does to one process: its clock jumps, its memory, descriptors or disk run out.

What needs root, `strace` or libfaketime skips the test where it is missing.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
DAY_S = 86400
BALLAST = bytes(64 << 20)
"""No allocator has so much at hand: whoever is sent it needs new pages."""
_CGROUPS = Path("/sys/fs/cgroup/memory")

needs_faketime = pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")


def clock_environment(clock: Path) -> dict[str, str]:
    """Of a process whose clock of the day is off by what the file says: `+1d`."""
    return {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@contextmanager
def no_memory_left(pid: int) -> Iterator[None]:
    """The process may have 16 pages more; the kernel kills it for the next.

    One that finds all it needs among what it has freed goes on without any: it has to be given
    something to hold.
    """
    group = _CGROUPS / f"windlass-test-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("65536")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield
    finally:
        with suppress(OSError):  # a process in it ends a little later than it is dead
            group.rmdir()


@contextmanager
def no_descriptors_left(pid: int) -> Iterator[None]:
    """The process can open none more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    num_open = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """256 KiB of it."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=256k", "windlass-test", str(folder))
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)


@contextmanager
def slow_disk(pid: int, sync_s: float) -> Iterator[None]:
    """Whatever the process brings to disk takes `sync_s` longer."""
    if (strace := shutil.which("strace")) is None:
        pytest.skip("strace is not installed")
    tracer = subprocess.Popen(
        (
            *(strace, "-f", "-p", str(pid), "-o", "/dev/null", "-e", "trace=fsync,fdatasync"),
            *("-e", f"inject=fsync,fdatasync:delay_exit={round(sync_s * 1e6)}"),
        ),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    try:
        line = tracer.stderr.readline()
        if "attached" not in line:
            pytest.skip(f"no process can be traced here: {line}")
        yield
    finally:
        tracer.terminate()
        tracer.communicate(timeout=30)
