"""The scheduler seam: start processes, watch them, end them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from windlass.errors import ConfigError

__all__ = ["ProcessSpec", "ProcessStatus", "Scheduler"]


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start.

    Attributes:
        name: unique within the scheduler; log file and messages carry it.
        command: argument list; never passed through a shell.
        environment: variables added to the scheduler's own environment.
        num_cpus: cores to reserve where the scheduler reserves anything.
        num_gpus: devices to reserve there.
        colocate_with: name of a live process whose reservation (node, cores and devices) this
            one shares; empty for a reservation of its own.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}
    num_cpus: int = 1
    num_gpus: int = 0
    colocate_with: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(f"process {self.name!r}: command must not be empty")
        if self.num_cpus < 1 or self.num_gpus < 0:
            raise ConfigError(
                f"process {self.name!r}: num_cpus must be >= 1 and num_gpus >= 0, "
                f"got {self.num_cpus} and {self.num_gpus}"
            )


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a process.

    Attributes:
        name: of its spec.
        pid: process id on its host (Slurm: of its srun client here); 0 while it is queued.
        returncode: None until it has ended; negative is a signal.
    """

    name: str
    pid: int
    returncode: int | None


class Scheduler(Protocol):
    """Starts and watches processes; roles and ranks are the caller's business.

    Used from one asyncio loop. Every method that takes a name raises ConfigError when no such
    process is known.
    """

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        """Create a process; it may be queued when this returns.

        Raises:
            ConfigError: the name is taken by a live process, the program does not exist, or
                `colocate_with` names no live process.
        """
        ...

    async def wait_healthy(self, name: str, *, deadline_s: float) -> ProcessStatus:
        """Return once the process has left the queue and runs.

        Whether the program inside is ready is for the program to say: it connects.

        Raises:
            PeerTimeout: still queued after `deadline_s`.
            PeerUnreachable: it ended, or could not be placed; carries its log's tail.
        """
        ...

    async def wait(self, name: str) -> ProcessStatus:
        """Return once the process has ended."""
        ...

    def status(self, name: str) -> ProcessStatus:
        """What is known now."""
        ...

    def list(self) -> tuple[ProcessStatus, ...]:
        """All processes that were started and not deleted, oldest first."""
        ...

    async def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to the process and everything it started; nothing when it has ended."""
        ...

    async def log_tail(self, name: str, num_lines: int = 40) -> str:
        """The last lines that the process printed."""
        ...

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        """End one process (terminate, wait `grace_s`, kill), free its reservation, forget it."""
        ...

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End every process: terminate, wait `grace_s`, kill. Idempotent."""
        ...
