"""A scheduler for one host that runs a limited number of cores' worth of processes; the others wait in a queue.

    [scheduler]
    kind = "plugin"
    name = "slots"
    options = { num_cpus = 8 }

A cluster differs only in the bodies of the methods: `reserve` submits a job, `launch` waits for the grant and starts a
process in it, and `release` cancels it. `windlass.jobs.Scheduler` does the rest.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from windlass import ConfigError
from windlass.jobs import ClusterBackend, ProcessSpec, SchedulerPlugin


class SlotsBackend(ClusterBackend):
    """Operations of this host. The id of a reservation is the name of the process that made it.

    Args:
        options: `num_cpus`, the number of cores that all reservations may have together.
        log_dir: folder for the output of the processes.

    Raises:
        ConfigError: there is another option, or `num_cpus` is not a positive integer.
    """

    queues = True

    def __init__(self, options: Mapping[str, object], log_dir: Path) -> None:
        num_cpus = options.get("num_cpus")
        if set(options) != {"num_cpus"} or not isinstance(num_cpus, int) or num_cpus < 1:
            raise ConfigError(
                f"scheduler.options must be a num_cpus of 1 or more, got {dict(options)!r}"
            )
        self._num_cpus = num_cpus
        self._log_dir = log_dir
        self._wanted: dict[str, int] = {}
        self._granted: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._processes: dict[str, tuple[str, asyncio.subprocess.Process]] = {}

    async def open(self) -> None:
        """Create the folder of the logs."""
        self._log_dir.mkdir(parents=True, exist_ok=True)

    async def reserve(self, spec: ProcessSpec) -> str:
        """Put the request at the end of the queue."""
        if spec.num_nodes > 1 or spec.num_gpus or spec.num_cpus > self._num_cpus:
            raise ConfigError(
                f"process {spec.name!r}: must ask for one node, no GPU and at most {self._num_cpus} cores, "
                f"got num_nodes={spec.num_nodes}, num_gpus={spec.num_gpus}, num_cpus={spec.num_cpus}"
            )
        self._wanted[spec.name] = spec.num_cpus
        return spec.name

    async def launch(self, reservation: str, spec: ProcessSpec) -> int:
        """Wait until the reservation is first in the queue and its cores are free, and start the process."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._grant(reservation))
        with (self._log_dir / f"{spec.name.replace('/', '-')}.log").open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env={**os.environ, **spec.environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"process {spec.name!r}: {error}") from error
        self._processes[spec.name] = reservation, process
        return process.pid

    def _grant(self, reservation: str) -> bool:
        """Grant the reservation if it is its turn; return whether it is granted."""
        if reservation in self._granted:
            return True
        free = self._num_cpus - sum(self._granted.values())
        is_first = next(iter(self._wanted), "") == reservation
        if is_first and self._wanted[reservation] <= free:
            self._granted[reservation] = self._wanted.pop(reservation)
            self._changed.notify_all()
        return reservation in self._granted

    async def wait(self, name: str) -> int:
        """Wait until a process has ended."""
        return await self._processes[name][1].wait()

    async def signal(self, name: str, signal_number: int) -> None:
        """Signal a process and the processes that it started."""
        _signal_group(self._processes[name][1], signal_number)

    async def log_tail(self, name: str, num_lines: int) -> str:
        """Return the last lines of a log."""
        path = self._log_dir / f"{name.replace('/', '-')}.log"
        with path.open(errors="replace") as log:
            return "".join(deque(log, maxlen=num_lines))

    async def release(self, reservation: str) -> None:
        """Kill the processes of a reservation, and let the next one in the queue start."""
        for name, (owner, process) in list(self._processes.items()):
            if owner == reservation:
                _signal_group(process, signal.SIGKILL)
                del self._processes[name]
        async with self._changed:
            self._wanted.pop(reservation, None)
            self._granted.pop(reservation, None)
            self._changed.notify_all()

    async def close(self) -> None:
        """Kill all processes."""
        for _, process in self._processes.values():
            _signal_group(process, signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, signal_number: int) -> None:
    """Signal the group of a process. The group of a process that has ended may still have other members."""
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        return


SCHEDULER = SchedulerPlugin(make_backend=SlotsBackend, is_one_host=True)
