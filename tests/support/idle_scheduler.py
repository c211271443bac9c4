"""A scheduler that starts nothing, for ranks that the test itself starts."""

from __future__ import annotations

import asyncio

from windlass.control.connect_messages import JOB_VARIABLE
from windlass.jobs.schedulers.base import ProcessSpec, ProcessStatus, Scheduler

__all__ = ["IdleScheduler"]


class IdleScheduler(Scheduler):
    """`Scheduler` with processes that seem to run for ever.

    Attributes:
        graces: the grace period that each `delete` got, in order.
    """

    def __init__(self) -> None:
        self.graces: list[float] = []
        self._started = asyncio.Event()
        self._job = ""

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        """See `Scheduler.start`."""
        self._job = spec.environment[JOB_VARIABLE]
        self._started.set()
        return self.status(spec.name)

    async def job(self) -> str:
        """Wait for the first start of a process and return the job that the process was given."""
        await self._started.wait()
        return self._job

    async def wait(self, name: str) -> ProcessStatus:
        """Wait for ever."""
        await asyncio.Event().wait()
        return self.status(name)

    async def wait_healthy(self, name: str, *, deadline_s: float) -> ProcessStatus:
        """Return at once; see `Scheduler.wait_healthy`."""
        return self.status(name)

    def status(self, name: str) -> ProcessStatus:
        """See `Scheduler.status`."""
        return ProcessStatus(name=name, pid=0, returncode=None)

    def list(self) -> tuple[ProcessStatus, ...]:
        """Return an empty tuple."""
        return ()

    async def signal(self, name: str, signal_number: int) -> None:
        """Send nothing, because no process exists."""

    async def log_tail(self, name: str, num_lines: int = 40) -> str:
        """Return an empty text."""
        return ""

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        """Record the grace period."""
        self.graces.append(grace_s)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """Do nothing, because no process runs."""
