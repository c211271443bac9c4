"""`windlass bench`: the benchmarks that this machine can run, one after the other."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from windlass.cli import Command
from windlass.engines.launch import exit_at_signal
from windlass.envs import inherited_environment
from windlass.errors import ConfigError

SCRIPTS_DEADLINE_S = 3600.0
STOP_DEADLINE_S = 60.0
"""For what a benchmark has started to be ended by it, before it is killed."""


_ON_CPU = (
    *("planner", "transports", "update", "replica", "control", "xccl", "relay", "engines"),
    *("rollout", "journal", "simulation"),
)
_SUITES = {
    **{name: (f"bench_{name}.py", 0) for name in _ON_CPU},
    "nvlink": ("gpu/bench_nvlink.py", 2),
    "live-engine": ("gpu/bench_live_engine.py", 4),
}
"""Name of a suite -> its script, and the GPUs that it needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Benchmarks are scripts of the source tree, and no part of the installed package."""
    parser.add_argument("suite", nargs="*", help=f"of {', '.join(_SUITES)}; all that can run here")
    parser.add_argument(
        "--scripts", type=Path, default=Path("benchmarks"), help="folder of the source tree"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/local"))


def run(args: argparse.Namespace) -> int:
    """Run them, keep their rows as JSON, print what each took; 1 if one failed.

    Raises:
        ConfigError: an unknown suite, or no scripts there.
    """
    unknown = [name for name in args.suite if name not in _SUITES]
    if unknown:
        raise ConfigError(f"bench: suite must be one of {list(_SUITES)}, got {unknown}")
    if not (args.scripts / "harness.py").is_file():
        raise ConfigError(f"bench: --scripts must be Windlass's benchmarks folder: {args.scripts}")
    args.out.mkdir(parents=True, exist_ok=True)
    num_gpus = count_gpus()
    summary = Table("suite", "result", "seconds", "rows", box=None)
    failed = False
    for name in args.suite or _SUITES:
        script, least_gpus = _SUITES[name]
        if least_gpus > num_gpus:
            summary.add_row(name, f"needs {least_gpus} GPUs, found {num_gpus}", "", "")
            continue
        target = args.out / f"{Path(script).stem}.json"
        start = time.monotonic()
        command = [sys.executable, str(args.scripts / script), "--json", str(target)]
        status = _run_script(command)
        failed |= status != 0
        rows = len(json.loads(target.read_text())) if status == 0 else 0
        result = str(target) if status == 0 else f"failed with {status}"
        summary.add_row(name, result, f"{time.monotonic() - start:.0f}", str(rows))
    Console(markup=False).print(summary)
    return int(failed)


def _run_script(command: Sequence[str]) -> int:
    """Its exit status. What it started ends with it when this process is interrupted or ended."""
    before = signal.signal(signal.SIGTERM, exit_at_signal)
    try:
        script = subprocess.Popen(command, env=inherited_environment(), start_new_session=True)
        try:
            return script.wait(SCRIPTS_DEADLINE_S)
        except BaseException:
            _stop(script)
            raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(script: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would; launchers of engines end servers then, which are not of the script's group."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(script.pid, signal.SIGINT)
            script.wait(STOP_DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def count_gpus() -> int:
    """NVIDIA GPUs that the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


COMMAND = Command("the benchmarks that this machine can run", add_arguments, run)
