"""Scheduler of subprocesses on this host."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, final

from windlass.envs import environment_outside_jobs, environment_value, inherited_environment
from windlass.errors import ConfigError, PeerTimeout
from windlass.jobs.schedulers import parent_watchdog
from windlass.jobs.schedulers.base import ClusterBackend, ProcessSpec, Scheduler, SchedulerConfig

START_DEADLINE_S = 60.0
"""Deadline for the start of the watchdog."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the GPUs that a process sees, separated by commas."""


class LocalSchedulerConfig(SchedulerConfig, frozen=True, tag="local"):
    """Configuration for subprocesses on this host. The subprocesses end when this process ends.

    Attributes:
        gpus: GPUs that processes may reserve, named as in CUDA_VISIBLE_DEVICES; omitted for all GPUs that this process
            sees.
    """

    gpus: tuple[str, ...] | None = None

    @property
    def is_one_host(self) -> bool:
        """Whether all processes run on this host: always True."""
        return True

    def check(self, specs: Sequence[ProcessSpec]) -> None:
        """Check that all processes together reserve no more GPUs than the scheduler has.

        Raises:
            ConfigError: the processes need more GPUs than `gpus` lists. If `gpus` is None, the limit is the number of
                GPUs that this process sees.
        """
        gpus = visible_gpus() if self.gpus is None else self.gpus
        num_gpus = sum(spec.num_gpus for spec in specs if not spec.colocate_with)
        if num_gpus > len(gpus):
            raise ConfigError(
                f"trainer.num_gpus: trainers and engines must reserve at most {len(gpus)} GPUs in total, the number "
                f"that the scheduler has, got {num_gpus}"
            )

    def make_backend(self, log_dir: Path) -> ClusterBackend:
        """Return the backend of this host. A watchdog kills the backend's processes if this process dies."""
        return LocalBackend(log_dir, watched=True, gpus=self.gpus)


@final
class LocalScheduler(Scheduler):
    """Scheduler of subprocesses. Process NAME has its own process group and writes its output to `log_dir/NAME.log`.

    A signal goes to the whole process group, so that no child remains after `close`. A process with `num_gpus` gets free
    GPUs, and sees only these through CUDA_VISIBLE_DEVICES. A process without `num_gpus` sees the same GPUs as this
    process. Cores are not reserved.

    Args:
        log_dir: folder of the logs; created if it is missing.
        environment: variables for every process.
        watched: whether to kill the processes if this process dies without `close`. If False, the processes continue
            to run, and connect to a restarted controller.
        gpus: GPUs that processes may reserve, named as in CUDA_VISIBLE_DEVICES; None for `visible_gpus()`.
    """

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
        *,
        watched: bool = False,
        gpus: Sequence[str] | None = None,
    ) -> None:
        super().__init__(LocalBackend(log_dir, watched=watched, gpus=gpus), environment)


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that a new process on this host would see, named as in CUDA_VISIBLE_DEVICES."""
    if (listed := environment_value(VISIBLE)) or VISIBLE in inherited_environment():
        return tuple(name for each in listed.split(",") if (name := each.strip()))
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return tuple(map(str, range(sum(found is not None for found in numbers))))


@final
class LocalBackend(ClusterBackend):
    """Backend of `LocalScheduler`. The id of a reservation is the name of the process that made it.

    Args:
        log_dir: folder of the logs, created if it is missing; None for a temporary folder.
        watched, gpus: see `LocalScheduler`; `gpus` is empty if another scheduler reserves GPUs.
    """

    queues = False

    def __init__(
        self, log_dir: Path | None, *, watched: bool, gpus: Sequence[str] | None = None
    ) -> None:
        self._temporary = None if log_dir else tempfile.TemporaryDirectory(prefix="windlass-")
        self._log_dir = log_dir or Path(self._temporary.name if self._temporary else "")
        self._processes: dict[str, tuple[str, asyncio.subprocess.Process]] = {}
        self._mark = secrets.token_hex(8) if watched else ""
        self._watchdog: int | None = None
        self._gpus = visible_gpus() if gpus is None else tuple(gpus)
        self._reserved: dict[str, tuple[str, ...]] = {}
        self._log_dir.mkdir(parents=True, exist_ok=True)

    async def open(self) -> None:
        """Do nothing: this host needs no connection."""
        return

    async def reserve(self, spec: ProcessSpec) -> str:
        """Reserve the first free GPUs under the name of the process, and return this name.

        Raises:
            ConfigError: the process needs more than one node, or too few GPUs are free.
        """
        if spec.num_nodes > 1:
            raise ConfigError(
                f"process {spec.name!r}: num_nodes must be 1 on this host, got {spec.num_nodes}"
            )
        taken = {gpu: owner for owner, gpus in self._reserved.items() for gpu in gpus}
        free = [gpu for gpu in self._gpus if gpu not in taken]
        if spec.num_gpus > len(free):
            held = ", ".join(f"GPU {gpu} ({owner})" for gpu, owner in taken.items())
            raise ConfigError(
                f"process {spec.name!r}: num_gpus must be at most {len(free)}, the number of free GPUs on "
                f"this host, got {spec.num_gpus}" + (f"; reserved: {held}" * bool(held))
            )
        self._reserved[spec.name] = tuple(free[: spec.num_gpus])
        return spec.name

    async def launch(self, reservation: str, spec: ProcessSpec) -> int:
        """Start the process in a new process group, append its output to its log, and return its pid.

        Raises:
            ConfigError: the program does not exist.
        """
        gpus = self._reserved.get(reservation, ())
        if spec.gpus:
            of_node = gpus or visible_gpus()
            gpus = tuple(of_node[gpu] for gpu in spec.gpus)
        environment = {
            **environment_outside_jobs(),
            **spec.environment,
            **({VISIBLE: ",".join(gpus)} if gpus else {}),
            **await self.mark(),
        }
        with self._opened_log(spec.name) as log:
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
        self._processes[spec.name] = reservation, process
        return process.pid

    async def wait(self, name: str) -> int:
        """See `ClusterBackend.wait`."""
        return await self._processes[name][1].wait()

    async def signal(self, name: str, signal_number: int) -> None:
        """See `ClusterBackend.signal`."""
        _signal_group(self._processes[name][1], signal_number)

    async def log_tail(self, name: str, num_lines: int) -> str:
        """See `ClusterBackend.log_tail`. If the log cannot be read, for example because it was deleted, return the reason."""
        try:
            with self._log_path(name).open(errors="replace") as log:
                return "".join(deque(log, maxlen=num_lines))
        except OSError as error:
            return f"the log cannot be read: {error}"

    async def release(self, reservation: str) -> None:
        """Kill the processes of the reservation and their children, and free its GPUs."""
        self._reserved.pop(reservation, None)
        for name, (owner, process) in list(self._processes.items()):
            if owner == reservation:
                _signal_group(process, signal.SIGKILL)
                del self._processes[name]

    async def close(self) -> None:
        """Kill all processes and their children, end the watchdog, and delete the temporary log folder. Idempotent."""
        for _, process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        self._processes.clear()
        if self._watchdog is not None:
            os.close(self._watchdog)
            self._watchdog = None
        if self._temporary is not None:
            self._temporary.cleanup()

    async def mark(self) -> Mapping[str, str]:
        """Start the watchdog if it does not run yet; return the environment variable that marks processes.

        The watchdog kills every process that has this variable. Return an empty mapping if the backend has no watchdog.

        Raises:
            PeerTimeout: the watchdog did not start within `START_DEADLINE_S`.
        """
        if not self._mark:
            return {}
        if self._watchdog is None:
            self._watchdog = await _start_watchdog(self._mark)
        return {parent_watchdog.MARK_VARIABLE: self._mark}

    def _opened_log(self, name: str) -> BinaryIO:
        """Open the log of a process for appending. Create the folder of the logs again if it was deleted.

        Raises:
            ConfigError: the file cannot be written.
        """
        path = self._log_path(name)
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            return path.open("ab")
        except OSError as error:
            raise ConfigError(f"scheduler: {name}: cannot write the log {path}: {error}") from error

    def _log_path(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self._log_dir / f"{name.replace('/', '-')}.log"


async def _start_watchdog(mark: str) -> int:
    """Start the watchdog; return the write end of the pipe that the watchdog reads.

    Only this process has the write end. When the write end closes, the watchdog kills all processes with `mark`.

    Raises:
        PeerTimeout: the watchdog did not start within `START_DEADLINE_S`.
    """
    # Child processes do not inherit Python's pipes, so the write end closes when this process dies.
    read_end, write_end = os.pipe()
    try:
        starter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_watchdog.__file__, "marked", mark),
            stdin=read_end,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # If another scheduler started this process, the environment contains that scheduler's mark. Pass no
            # environment, because that scheduler's watchdog kills every process that has the mark.
            env={},
        )
    finally:
        os.close(read_end)
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            await starter.wait()
    except TimeoutError:
        starter.kill()
        os.close(write_end)
        raise PeerTimeout(
            f"scheduler: the watchdog did not start within {START_DEADLINE_S} s"
        ) from None
    return write_end


def _signal_group(process: asyncio.subprocess.Process, signal_number: int) -> None:
    """Send a signal to a process and its children, which form one process group.

    If the process has ended, send SIGKILL to its remaining children, and ignore every other signal.

    Send nothing if a process now has the id of the ended process: the signal would hit another program. No children of
    the ended process remain in this case, because the kernel does not reuse the id of a group that has members.
    """
    if process.returncode is not None and (
        signal_number != signal.SIGKILL or os.path.exists(f"/proc/{process.pid}")
    ):
        return
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        return
