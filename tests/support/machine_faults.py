"""Faults of the machine for one process: its clock jumps, or its memory, descriptors or disk run
out.

A test that needs root, `strace` or libfaketime is skipped on machines without it.
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
"""More bytes than any allocator keeps free: a process that receives them needs new pages."""
_CGROUPS = Path("/sys/fs/cgroup/memory")

needs_faketime = pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")


def clock_environment(clock: Path) -> dict[str, str]:
    """Return the environment of a process with a clock that is off by the content of the file: `+1d`."""
    return {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@contextmanager
def no_memory_left(pid: int) -> Iterator[None]:
    """Limit the process to 16 more pages; the kernel kills it for the next page.

    A process that has freed enough memory continues without new pages. Give it something to store.
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
        # The kernel removes a process from its group a little after the process has died.
        with suppress(OSError):
            group.rmdir()


@contextmanager
def no_descriptors_left(pid: int) -> Iterator[None]:
    """Let the process open no more descriptors."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    num_open = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=256k", "windlass-test", str(folder))
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)


@contextmanager
def slow_disk(pid: int, sync_s: float) -> Iterator[None]:
    """Delay every sync of the process by `sync_s`."""
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
