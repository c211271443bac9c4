"""Processes on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from windlass.envs import inherited_environment
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable
from windlass.jobs.schedulers import parent_watchdog
from windlass.jobs.schedulers.base import ProcessSpec, ProcessStatus, Scheduler

__all__ = ["LocalScheduler"]

_log = logging.getLogger(__name__)
START_DEADLINE_S = 60.0
KILL_DEADLINE_S = 30.0


@final
class LocalScheduler(Scheduler):
    """Subprocesses, each in a process group of its own, logging to `log_dir/NAME.log`.

    A process and everything it started are signalled together, so that nothing outlives
    `close`. Use from one asyncio loop.

    Args:
        log_dir: made if it is missing.
        environment: variables for every process.
        watched: whether the processes also end when this process dies without `close`. Without
            it they go on, and a controller that is started again finds them.
    """

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
        *,
        watched: bool = False,
    ) -> None:
        self._log_dir = log_dir
        self._environment = dict(environment or {})
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._mark = secrets.token_hex(8) if watched else ""
        self._watchdog: int | None = None
        log_dir.mkdir(parents=True, exist_ok=True)

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        known = self._processes.get(spec.name)
        if known is not None and known.returncode is None:
            raise ConfigError(f"scheduler: process name {spec.name!r} is taken by pid {known.pid}")
        if spec.colocate_with and self.status(spec.colocate_with).returncode is not None:
            raise ConfigError(
                f"scheduler: {spec.name}: colocate_with {spec.colocate_with!r} has ended"
            )
        environment = {
            **inherited_environment(),
            **self._environment,
            **spec.environment,
            **await self.mark(),
        }
        with self.log_path(spec.name).open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"scheduler: {spec.name}: cannot start {spec.command[0]!r}: {error}"
                ) from error
        self._processes[spec.name] = process
        return self.status(spec.name)

    async def wait_healthy(self, name: str, *, deadline_s: float) -> ProcessStatus:  # noqa: ARG002
        status = self.status(name)
        if status.returncode is not None:
            tail = await self.log_tail(name)
            raise PeerUnreachable(
                f"scheduler: {name} ended with {status.returncode}; its log ends:\n{tail}"
            )
        return status

    async def wait(self, name: str) -> ProcessStatus:
        await self._process(name).wait()
        return self.status(name)

    def status(self, name: str) -> ProcessStatus:
        process = self._process(name)
        return ProcessStatus(name=name, pid=process.pid, returncode=process.returncode)

    def list(self) -> tuple[ProcessStatus, ...]:
        return tuple(map(self.status, self._processes))

    async def signal(self, name: str, signal_number: int) -> None:
        process = self._process(name)
        if process.returncode is None:
            _signal_group(process.pid, signal_number)

    async def log_tail(self, name: str, num_lines: int = 40) -> str:
        path = self.log_path(name)
        if not path.exists():
            return ""
        with path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=num_lines))

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        await _end([self._process(name)], grace_s)
        self._processes.pop(name, None)

    async def close(self, *, grace_s: float = 5.0) -> None:
        await _end([*self._processes.values()], grace_s)
        if self._watchdog is not None:
            os.close(self._watchdog)
            self._watchdog = None

    async def mark(self) -> Mapping[str, str]:
        """Variables of a process that shall end when this one dies; none if not watched."""
        if not self._mark:
            return {}
        if self._watchdog is None:
            self._watchdog = await _start_watchdog(self._mark)
        return {parent_watchdog.MARK_VARIABLE: self._mark}

    def log_path(self, name: str) -> Path:
        """Where the process called `name` logs."""
        return self._log_dir / f"{name.replace('/', '-')}.log"

    def _process(self, name: str) -> asyncio.subprocess.Process:
        if name not in self._processes:
            raise ConfigError(f"scheduler: no process named {name!r}")
        return self._processes[name]

    async def __aenter__(self) -> LocalScheduler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _start_watchdog(mark: str) -> int:
    """Start what follows a pipe whose other end only this process holds; returns that end."""
    read_end, write_end = os.pipe()  # not inherited by what is started later
    try:
        starter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_watchdog.__file__, "marked", mark),
            stdin=read_end,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={},  # it must not carry the mark of a scheduler that started this process
        )
    finally:
        os.close(read_end)
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await starter.wait()
    except TimeoutError:
        starter.kill()
        os.close(write_end)
        raise PeerTimeout(f"scheduler: no watchdog within {START_DEADLINE_S} s") from None
    return write_end


async def _end(processes: Sequence[asyncio.subprocess.Process], grace_s: float) -> None:
    live = [p for p in processes if p.returncode is None]
    for process in live:
        _signal_group(process.pid, signal.SIGTERM)
        _signal_group(process.pid, signal.SIGCONT)  # a stopped process cannot end itself
    waits = [asyncio.ensure_future(p.wait()) for p in live]
    if waits:
        await asyncio.wait(waits, timeout=grace_s)
    for process in processes:
        if process.returncode is None or not _is_alive(process.pid):
            _signal_group(process.pid, signal.SIGKILL)  # also what a dead leader left behind
    if waits:
        # One that hangs in the kernel (a file system that is gone) ends when that lets it.
        _, left = await asyncio.wait(waits, timeout=KILL_DEADLINE_S)
        for wait in left:
            wait.cancel()
            _log.error("a process has been killed and has not ended for %s s", KILL_DEADLINE_S)


def _is_alive(pid: int) -> bool:
    """Of a process that has ended: whether its number is another's now, and so is its group's.

    The kernel gives a number away again only when no process is left in the group of that number.
    """
    return os.path.exists(f"/proc/{pid}")


def _signal_group(pid: int, signal_number: int) -> None:
    try:
        os.killpg(pid, signal_number)
    except ProcessLookupError:
        return
