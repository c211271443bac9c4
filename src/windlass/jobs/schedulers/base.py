"""Scheduler that starts, watches and ends processes on this host or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from windlass.config import check_numbers
from windlass.envs import FIRST_NODE_VARIABLE
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.plugins import Registry

_log = logging.getLogger(__name__)
LOST_RETURNCODE = -int(signal.SIGKILL)
"""Exit status of a process if the cluster did not report its end."""
END_DEADLINE_S = 30.0
"""Longest time to wait for the end of a killed process."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start.

    Attributes:
        name: name of the process, unique within the scheduler; its log file and messages have this name.
        command: program and arguments; never passed through a shell.
        environment: variables added to the scheduler's own environment. A process of a reservation with several
            nodes also gets WINDLASS_FIRST_NODE, the address of the first node.
        num_nodes: number of nodes to reserve; the cluster grants all of them at once.
        num_cpus: number of cores to reserve on each node, if the scheduler reserves cores.
        num_gpus: number of GPUs to reserve on each node.
        colocate_with: name of another process: share the reservation (nodes, cores and GPUs) of this other process,
            which must not be deleted yet. Empty for a separate reservation.
        node: index of the node in the reservation, from 0.
        gpus: GPUs that the process sees, as indices (from 0) into the GPUs reserved on the node; empty for all.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}
    num_nodes: int = 1
    num_cpus: int = 1
    num_gpus: int = 0
    colocate_with: str = ""
    node: int = 0
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(f"process {self.name!r}: command must not be empty")
        least = {"num_nodes": 1, "num_cpus": 1, "num_gpus": 0, "node": 0}
        check_numbers(self, least, (), where=f"process {self.name!r}: ")
        if not self.colocate_with:
            self.check_place(self)

    def check_place(self, reserved: ProcessSpec) -> None:
        """Check that a reservation contains this process's node and GPUs.

        Args:
            reserved: spec of the process for which the reservation was made.

        Raises:
            ConfigError: the node or a GPU is not in the reservation.
        """
        if self.node >= reserved.num_nodes:
            raise ConfigError(
                f"process {self.name!r}: node must be below {reserved.num_nodes}, got {self.node}"
            )
        if missing := [gpu for gpu in self.gpus if not 0 <= gpu < reserved.num_gpus]:
            raise ConfigError(
                f"process {self.name!r}: gpus must be in [0, {reserved.num_gpus}), got {missing[0]}: "
                f"{reserved.num_gpus} GPUs are reserved on each node"
            )


def first_node(spec: ProcessSpec, address: str) -> dict[str, str]:
    """Return the variable WINDLASS_FIRST_NODE with `address`; no variable if `spec.num_nodes` is 1."""
    return {FIRST_NODE_VARIABLE: address} if spec.num_nodes > 1 else {}


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a process.

    Attributes:
        name: `ProcessSpec.name` of the process.
        pid: process id on the node; with Slurm, process id of the `srun` client on this host. 0 while the process is
            queued.
        returncode: exit status; None until the process has ended, and negative if a signal ended the process.
    """

    name: str
    pid: int
    returncode: int | None


class ClusterBackend(Protocol):
    """Operations of a host or a cluster that a scheduler uses.

    Attributes:
        queues: whether a process may have to wait in a queue before it runs.
    """

    queues: bool

    async def open(self) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: the cluster cannot be reached.
            TransportUnavailable: software of the cluster is missing on this host.
        """
        ...

    async def reserve(self, spec: ProcessSpec) -> str:
        """Request the spec's nodes, cores and GPUs. Return the reservation's id; the reservation may still be queued.

        Raises:
            ConfigError: the cluster refused the request.
        """
        ...

    async def launch(self, reservation: str, spec: ProcessSpec) -> int:
        """Wait until the reservation is granted, start the process in it, and return its pid.

        Raises:
            ConfigError: the program does not exist.
            PeerUnreachable: the reservation ended before it was granted, or its node died.
            PeerTimeout: the node did not answer.
        """
        ...

    async def wait(self, name: str) -> int:
        """Wait until a launched process has ended; return its exit status, -N if signal N ended the process."""
        ...

    async def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to a launched process and all its child processes; do nothing if the process has ended."""
        ...

    async def log_tail(self, name: str, num_lines: int) -> str:
        """Return the last `num_lines` lines that the process printed to stdout and stderr."""
        ...

    async def release(self, reservation: str) -> None:
        """Give the reservation back to the cluster, and kill all processes that still run in it. Idempotent."""
        ...

    async def close(self) -> None:
        """Disconnect from the cluster. Idempotent."""
        ...


class SchedulerConfig(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class of scheduler configurations, the table `[scheduler]` of a job file."""

    @property
    def is_one_host(self) -> bool:
        """Whether all processes run on this host, so that their programs and files can be checked before the start."""
        return False

    @property
    def crosses_hosts(self) -> bool:
        """Whether processes on other hosts connect to this host, so that loopback addresses do not work."""
        return not self.is_one_host

    def check(self, specs: Sequence[ProcessSpec]) -> None:
        """Check that the configuration fits the processes of a job. The base class checks nothing.

        Raises:
            ConfigError: a setting matches no process, or the processes need more resources than exist.
        """

    def make_backend(self, log_dir: Path) -> ClusterBackend:
        """Return the `ClusterBackend` that reserves nodes, cores and GPUs, and starts and ends the processes.

        Args:
            log_dir: folder on this host. The output of process NAME goes to `NAME.log` in this folder, or to a log on
                the node of the process.

        Raises:
            ConfigError: a setting has an invalid value.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlugin:
    """Scheduler of another package: the object that an entry point of the group `windlass.schedulers` names.

    Attributes:
        make_backend: function that gets the options in the job file and the folder for logs. It returns the backend
            (see `SchedulerConfig.make_backend`) or raises ConfigError for a wrong option.
        is_one_host: see `SchedulerConfig.is_one_host`.
    """

    make_backend: Callable[[Mapping[str, object], Path], ClusterBackend]
    is_one_host: bool = False


SCHEDULER_PLUGINS: Registry[SchedulerPlugin] = Registry(
    noun="scheduler", kind=SchedulerPlugin, group="windlass.schedulers"
)
"""Registry of schedulers that other packages define."""


class PluginSchedulerConfig(SchedulerConfig, frozen=True, tag="plugin"):
    """A scheduler that an installed package registers as an entry point of `windlass.schedulers`.

    Attributes:
        name: name of the entry point.
        options: plain values that the package's scheduler receives.
    """

    name: str
    options: dict[str, Any] = {}

    @property
    def is_one_host(self) -> bool:
        """Whether all processes run on this host. The package that registered the scheduler declares this.

        Raises:
            ConfigError: no installed package has registered the name.
        """
        return SCHEDULER_PLUGINS.find(self.name).is_one_host

    def make_backend(self, log_dir: Path) -> ClusterBackend:
        """Return the backend that the package creates; see `SchedulerConfig.make_backend`."""
        return SCHEDULER_PLUGINS.find(self.name).make_backend(self.options, log_dir)


@dataclass(slots=True)
class _Process:
    """A started process.

    Attributes:
        spec: spec of the process, including the scheduler's environment variables.
        reservation: id of the reservation of the process.
        reserved: spec of the process that made the reservation.
        pid: see `ProcessStatus`.
        returncode: see `ProcessStatus`.
        failure: why the process was not started, or why its exit status is unknown; otherwise empty.
        left_queue: event that is set when the process runs, or will never run.
        ended: event that is set when the process has ended, or will never run.
        task: asyncio task that starts the process and waits for its end.
    """

    spec: ProcessSpec
    reservation: str
    reserved: ProcessSpec
    pid: int = 0
    returncode: int | None = None
    failure: str = ""
    left_queue: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)

    @property
    def is_running(self) -> bool:
        """Whether the process has left the queue and has not ended."""
        return self.pid > 0 and not self.ended.is_set()

    def status(self) -> ProcessStatus:
        """Return the current state of the process."""
        return ProcessStatus(name=self.spec.name, pid=self.pid, returncode=self.returncode)


class Scheduler:
    """Processes on a host or cluster: starts them, and waits for their end.

    Enter it with `async with`, or call `open` and `close`. Not thread-safe. Every method with the argument `name` raises
    ConfigError if no process has this name. `close` also closes the backend.

    Args:
        backend: operations of the host or cluster.
        environment: variables added to the environment of every process.
    """

    def __init__(
        self, backend: ClusterBackend, environment: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        self._environment = dict(environment or {})
        self._processes: dict[str, _Process] = {}

    async def open(self) -> None:
        """Connect to the cluster. Raises the errors of `ClusterBackend.open`."""
        await self._backend.open()

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        """Start a process. On a cluster, the process may still be queued when this method returns.

        First delete an ended process of the same name. If a process with `colocate_with` still runs in the reservation of
        the ended process, keep this reservation, and start the new process in it.

        Raises:
            ConfigError: a process of the same name is queued or runs; the program does not exist; the host has too few
                free GPUs, or the cluster refuses the reservation; `colocate_with` names no known process; or the
                reservation does not contain the spec's node or GPUs.
        """
        known = self._processes.get(spec.name)
        if known is not None:
            if not known.ended.is_set():
                raise ConfigError(
                    f"scheduler: a process named {spec.name!r} is queued or runs; delete it first"
                )
            await self.delete(spec.name)
        environment = {**self._environment, **spec.environment}
        wanted = msgspec.structs.replace(spec, environment=environment)
        process = await self._reserve(wanted)
        self._processes[spec.name] = process
        process.task = asyncio.create_task(self._drive(process))
        if not self._backend.queues:
            await process.left_queue.wait()
            if not process.pid:
                await self.delete(spec.name)
                raise ConfigError(process.failure)
        return self.status(spec.name)

    async def _reserve(self, spec: ProcessSpec) -> _Process:
        """Make a reservation for a process, or choose an existing one; see `start`. Do not start the process."""
        if not spec.colocate_with:
            for other in self._processes.values():
                # `other` runs in the reservation of an earlier process of this name. Use this reservation again.
                if other.reserved.name == spec.name and not other.ended.is_set():
                    spec.check_place(other.reserved)
                    return _Process(spec, other.reservation, other.reserved)
            return _Process(spec, await self._backend.reserve(spec), spec)
        host = self._process(spec.colocate_with)
        spec.check_place(host.reserved)
        return _Process(spec, host.reservation, host.reserved)

    async def _drive(self, process: _Process) -> None:
        """Start a process, wait for its end, and record its pid, exit status and failure.

        Set `left_queue` when the process has started. Set both `left_queue` and `ended` when it has ended or failed to
        start.
        """
        try:
            process.pid = await self._backend.launch(process.reservation, process.spec)
            process.left_queue.set()
            process.returncode = await self._backend.wait(process.spec.name)
        except WindlassError as error:
            process.failure = str(error)
        finally:
            if process.returncode is None:
                process.returncode = LOST_RETURNCODE
            process.left_queue.set()
            process.ended.set()

    async def wait_healthy(self, name: str, *, deadline_s: float) -> ProcessStatus:
        """Wait until the process has left the queue and runs. Do not wait until its program serves.

        Raises:
            PeerTimeout: the process is still queued after `deadline_s`.
            PeerUnreachable: the process has ended, or was never started. The message contains the last lines of its
                log, or the reason why it was not started.
            ConfigError: the scheduler has no process of this name.
        """
        process = self._process(name)
        try:
            async with asyncio.timeout(deadline_s):
                await process.left_queue.wait()
        except TimeoutError:
            raise PeerTimeout(f"scheduler: {name} is still queued after {deadline_s} s") from None
        if process.ended.is_set():
            tail = await self.log_tail(name)
            raise PeerUnreachable(
                f"scheduler: {name} ended with exit status {process.returncode}; its log ends:\n{tail}"
            )
        return self.status(name)

    async def wait(self, name: str) -> ProcessStatus:
        """Wait until the current process of this name has ended, and return its last state.

        Return the state of this process even if the name is given to a new process during the wait.

        Raises:
            ConfigError: the scheduler has no process of this name.
        """
        process = self._process(name)
        await process.ended.wait()
        return process.status()

    def status(self, name: str) -> ProcessStatus:
        """Return the current state of a process.

        Raises:
            ConfigError: the scheduler has no process of this name.
        """
        return self._process(name).status()

    def list(self) -> tuple[ProcessStatus, ...]:
        """Return the state of all processes that were started and not deleted, oldest first."""
        return tuple(map(self.status, self._processes))

    async def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to the process and all its child processes; do nothing if the process has ended.

        Raises:
            ConfigError: the scheduler has no process of this name.
        """
        process = self._process(name)
        if process.is_running:
            await self._backend.signal(name, signal_number)

    async def log_tail(self, name: str, num_lines: int = 40) -> str:
        """Return the last lines that the process printed, or why it was not started, or why its log cannot be read.

        Raises:
            ConfigError: the scheduler has no process of this name.
        """
        process = self._process(name)
        if not process.pid:
            return process.failure
        try:
            tail = await self._backend.log_tail(name, num_lines)
        except (PeerUnreachable, PeerTimeout) as error:
            return str(error)
        return f"{tail}{process.failure}"

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        """End one process (SIGTERM, wait `grace_s`, SIGKILL) and remove it from `list`.

        Release the process's reservation, unless another listed process shares the reservation. If the killed process
        has not ended after `END_DEADLINE_S`, log an error and return.

        Raises:
            ConfigError: the scheduler has no process of this name.
        """
        process = self._process(name)
        if process.is_running:
            # A stopped process handles SIGTERM only after SIGCONT.
            for number in (signal.SIGTERM, signal.SIGCONT):
                await self._try_signal(name, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.ended.wait()
        self._processes.pop(name, None)
        if all(other.reservation != process.reservation for other in self._processes.values()):
            await self._backend.release(process.reservation)
        elif process.pid:
            await self._try_signal(name, signal.SIGKILL)
        if not process.pid:
            # The process was never launched, so do not wait until it ends.
            process.task.cancel()
        # A killed process may hang in a system call, for example on a network file system without a server.
        _, pending = await asyncio.wait([process.task], timeout=END_DEADLINE_S)
        if pending:
            _log.error("%s was killed and has not ended within %s s", name, END_DEADLINE_S)
            process.task.cancel()
            await asyncio.wait(pending)

    async def _try_signal(self, name: str, number: int) -> None:
        """Send a signal to a process. If this fails, log the error, because the process or its node may be gone."""
        try:
            await self._backend.signal(name, number)
        except WindlassError as error:
            _log.warning("%s did not get signal %d: %s", name, number, error)

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End all processes at the same time (SIGTERM, wait `grace_s`, SIGKILL), and close the backend. Idempotent.

        If ending a process fails, first end the other processes and close the backend, then raise the first error.
        """
        try:
            deletes = (self.delete(name, grace_s=grace_s) for name in list(self._processes))
            # Wait for every deletion before raising an error, because closing the backend kills all other processes.
            for error in await asyncio.gather(*deletes, return_exceptions=True):
                if error is not None:
                    raise error
        finally:
            self._processes.clear()
            await self._backend.close()

    def _process(self, name: str) -> _Process:
        """Return the process `name`; raise `ConfigError` if the scheduler has no such process."""
        if name not in self._processes:
            raise ConfigError(f"scheduler: no process named {name!r}")
        return self._processes[name]

    async def __aenter__(self) -> Self:
        """Call `open`."""
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Call `close`."""
        await self.close()
