"""Peers from a fork server. An emulated processor takes 10 s to start an interpreter with numpy."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, final

import msgspec

from windlass.testing.peer_process import serve
from windlass.transports.registry import TransportConfig, parse_transport

__all__ = ["ForkedChild", "memory_limited", "start_fork_server"]

ANSWER_S = 120.0
_CAP_IPC_LOCK = 14
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522


def start_fork_server(*modules: str) -> ForkServerContext:
    """Start a server that imports these modules of this folder and ends with this process."""
    here = str(Path(__file__).parent)
    if here not in os.environ.get("PYTHONPATH", "").split(":"):
        os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    return context


def _nothing() -> None:
    """Do nothing: the first fork waits for the imports."""


@final
class ForkedChild:
    """`windlass.testing.peer_process.Child` that is forked instead of started."""

    def __init__(
        self,
        context: ForkServerContext,
        config: TransportConfig,
        nbytes: int,
        environment: Mapping[str, str],
    ) -> None:
        (source, to_child), (from_child, sink) = context.Pipe(False), context.Pipe(False)
        encoded = msgspec.json.encode(config)
        self._process = context.Process(
            target=_serve, args=(encoded, nbytes, dict(environment), source, sink), daemon=True
        )
        self._process.start()
        source.close()
        sink.close()
        self.stdin: IO[bytes] | None = os.fdopen(os.dup(to_child.fileno()), "wb")
        self.stdout: IO[bytes] | None = os.fdopen(os.dup(from_child.fileno()), "rb")
        to_child.close()
        from_child.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int, /) -> None:
        """Send a signal if the process runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the process runs."""
        if self.returncode is None:
            self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked peer", timeout or 0.0)
        return self.returncode


def _serve(
    config: bytes, nbytes: int, environment: dict[str, str], source: Connection, sink: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(source.fileno(), 0)
    os.dup2(sink.fileno(), 1)
    source.close()
    sink.close()
    sys.stdin = open(0, encoding="ascii", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115
    serve(parse_transport(config.decode()), nbytes)


def memory_limited(
    context: ForkServerContext, run: Callable[[Callable[[str], None]], None], nbytes: int
) -> str:
    """Run `run` in a fork that may lock at most `nbytes`, even as root, and return its answer."""
    answers, answer = context.Pipe(False)
    process = context.Process(target=_limited, args=(run, nbytes, answer), daemon=True)
    process.start()
    answer.close()
    try:
        if not answers.poll(ANSWER_S):
            raise TimeoutError(f"a fork with little lockable memory: silent for {ANSWER_S} s")
        return str(answers.recv())
    finally:
        process.kill()
        process.join(60)


def _limited(run: Callable[[Callable[[str], None]], None], nbytes: int, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    # The three sets are effective, permitted and inheritable.
    for index in range(3):
        sets[index] &= ~(1 << _CAP_IPC_LOCK)
    if libc.prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0) or libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    run(answer.send)
