"""The scheduler seam: start processes, watch them, end them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

__all__ = ["ProcessSpec", "ProcessStatus", "Scheduler"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start.

    Attributes:
        name: unique within the scheduler; log file and messages carry it.
        command: argument list; never passed through a shell.
        environment: variables added to the scheduler's own environment.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a process.

    Attributes:
        name: of its spec.
        pid: process id on its host.
        returncode: None while it runs; negative is a signal.
    """

    name: str
    pid: int
    returncode: int | None


class Scheduler(Protocol):
    """Starts and watches processes; roles and ranks are the caller's business."""

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        """Start a process.

        Raises:
            ConfigError: the name is taken by a live process, or the program does not exist.
        """
        ...

    async def wait(self, name: str) -> ProcessStatus:
        """Return once the process has ended."""
        ...

    def status(self, name: str) -> ProcessStatus:
        """What is known now.

        Raises:
            ConfigError: no such process.
        """
        ...

    def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to the process and everything it started."""
        ...

    def log_tail(self, name: str, num_lines: int = 40) -> str:
        """The last lines that the process printed."""
        ...

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End every process: terminate, wait `grace_s`, kill. Idempotent."""
        ...
