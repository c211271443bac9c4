"""Scheduler of processes as Slurm job steps.

A reservation is one `sbatch` job; Slurm grants all nodes of the job together. The batch script (`parent_watchdog.py`)
connects to this process and sends a secret, the lease. The connection shows that Slurm has started the job, so this
process never polls Slurm. When this process dies, the connection ends. The script then ends too, and Slurm ends the job
with all its processes.

Each process is an `srun` step in the job, so that colocated processes share nodes, cores and GPUs. A step may use all
cores and GPUs of the job on its node. CUDA_VISIBLE_DEVICES selects the GPUs that a step sees. No cgroup limits the
step to these GPUs, so CUDA can map the memory of other GPUs of the job. The `srun` client of a step runs on this host,
prints the step's output, and returns the exit status, so no shared file system is needed. The token is in the
environment, which `srun` passes on, and never on a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import inspect
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec

from windlass.envs import environment_outside_jobs
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, TransportUnavailable
from windlass.jobs.schedulers import parent_watchdog
from windlass.jobs.schedulers.base import (
    ClusterBackend,
    ProcessSpec,
    SchedulerConfig,
    first_node,
)
from windlass.jobs.schedulers.local import LocalBackend
from windlass.net.addresses import is_loopback

COMMAND_DEADLINE_S = 30.0
"""Longest time of a Slurm command, and of a connected node until it has sent its lease."""
MAX_UNPROVEN = 64
"""Largest number of connections that have not sent a lease yet. If more connect, the oldest of them is closed."""
JOB_ID = re.compile(r"(\d+)(;.*)?$")
"""Output of `sbatch --parsable`: the id of a job."""
OWNED_OPTIONS = (
    *("array", "cpus-per-task", "error", "export", "gpus", "gpus-per-node", "gpus-per-socket"),
    *("gpus-per-task", "gres", "hold", "jobid", "job-name", "nodes", "ntasks", "ntasks-per-node"),
    *("output", "overlap", "parsable", "relative", "requeue", "wait", "wrap"),
)
"""Long options that the scheduler sets itself, for a job or for a step."""
OWNED_LETTERS = "aceGHJNnorW"
"""Short forms of `OWNED_OPTIONS`."""
SEE_GPUS = (
    'CUDA_VISIBLE_DEVICES=$(printf %s "$CUDA_VISIBLE_DEVICES" | cut -d, -f "$1"); '
    'export CUDA_VISIBLE_DEVICES; shift; exec "$@"'
)
"""Shell command that sets CUDA_VISIBLE_DEVICES inside the step. Slurm would overwrite a value that is set outside it."""
TOOLS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
"""Programs of Slurm that the scheduler runs."""


class SlurmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The user's options for Slurm jobs and steps.

    Attributes:
        options: options of `sbatch`, such as partition, account, QOS, time limit, constraint and memory.
        srun_options: options of the `srun` of every process, such as `--container-image` of pyxis.
        prefix: command that starts every process, such as `apptainer exec --nv IMAGE`.
        gpu_type: type of GPU on a cluster with several types: `h100` requests `gpu:h100:8`.
    """

    options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    gpu_type: str = ""

    def __post_init__(self) -> None:
        for key, options in (("options", self.options), ("srun_options", self.srun_options)):
            for option in options:
                rule = ""
                if not re.match(r"--?[A-Za-z]", option):
                    rule = "have one option per string, such as --time=2:00:00"
                elif _is_owned(option):
                    rule = "not contain options that Windlass sets from other keys of the job file"
                if rule:
                    raise ConfigError(f"scheduler.{key} must {rule}, got {option!r}")


def _is_owned(option: str) -> bool:
    """Return whether the scheduler sets this option itself. Slurm accepts prefixes: `--nod=4` is `--nodes=4`."""
    name = option.removeprefix("--").partition("=")[0]
    if not option.startswith("--"):
        return option[1] in OWNED_LETTERS
    return any(owned.startswith(name) for owned in OWNED_OPTIONS)


class SlurmSchedulerConfig(SlurmOptions, SchedulerConfig, frozen=True, tag="slurm"):
    """Configuration of the Slurm cluster that this host belongs to.

    Attributes:
        options, srun_options, prefix, gpu_type: options of every process, see `SlurmOptions`.
        host: address at which the nodes reach this host; empty for this host's name.
        processes: pattern of process names (`trainer-*`, `engine-a`, `worker-*`) -> additional options of these
            processes.
    """

    host: str = ""
    processes: Mapping[str, SlurmOptions] = {}

    @property
    def crosses_hosts(self) -> bool:
        """Whether `host` is not a loopback address."""
        return not is_loopback(self.host)

    def check(self, specs: Sequence[ProcessSpec]) -> None:
        """Check that every pattern of `processes` matches a process.

        Raises:
            ConfigError: a pattern matches no process.
        """
        names = [spec.name for spec in specs]
        for pattern in self.processes:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"scheduler.processes: each pattern must match a process of the job ({', '.join(names)}), "
                    f"got {pattern!r}"
                )

    def make_backend(self, log_dir: Path) -> ClusterBackend:
        """Return the backend of the Slurm cluster."""
        return SlurmBackend(log_dir, self)

    def options_of(self, name: str) -> SlurmOptions:
        """Return the options of a process: first the options for all processes, then those of each matching pattern.

        Slurm uses the last value of an option, so an option of a pattern overrides an option for all processes. A
        `prefix` or `gpu_type` of a pattern replaces the earlier value.
        """
        found: SlurmOptions = self
        for pattern, added in self.processes.items():
            if fnmatch.fnmatchcase(name, pattern):
                found = SlurmOptions(
                    found.options + added.options,
                    found.srun_options + added.srun_options,
                    added.prefix or found.prefix,
                    added.gpu_type or found.gpu_type,
                )
        return found


@dataclass(slots=True)
class _Job:
    """A Slurm job.

    Attributes:
        client: process of `sbatch --wait`, which ends after the job.
        num_cpus: number of cores of the job on each node.
        lease: connection of the first node after the node has sent the lease; None before. The job ends when this
            connection is closed.
        address: address of the first node, which has sent the lease.
        failure: text about the end of the job; empty while `sbatch` runs.
        is_known: event that is set when the first node has sent the lease, or when the job has ended without a lease.
        watch: asyncio task that waits for the end of `client`; None before `sbatch` has printed the id of the job.
    """

    client: asyncio.subprocess.Process
    num_cpus: int
    lease: asyncio.StreamWriter | None = None
    address: str = ""
    failure: str = ""
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None


@final
class SlurmBackend(ClusterBackend):
    """Backend of a Slurm cluster. The id of a reservation is the id of a Slurm job."""

    queues = True

    def __init__(self, log_dir: Path, config: SlurmSchedulerConfig) -> None:
        self._clients = LocalBackend(log_dir, watched=True, gpus=())
        self._script = log_dir / "slurm-lease.sh"
        self._config = config
        self._host = config.host or socket.gethostname()
        self._server: asyncio.Server | None = None
        self._address: tuple[str, int] = ("", 0)
        self._unclaimed: dict[str, _Job] = {}
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        self._jobs: dict[str, _Job] = {}
        self._job_of: dict[str, str] = {}

    async def open(self) -> None:
        """Check that Slurm answers, listen for connections from nodes of jobs, and write the batch script.

        For the errors see `ClusterBackend.open`.
        """
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise TransportUnavailable(
                f"slurm: {', '.join(missing)} not found; install slurm-client"
            )
        await _run("scontrol", "ping")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, 0, type=socket.SOCK_STREAM
            )
            self._server = await asyncio.start_server(self._admit, str(found[0][4][0]), 0)
        except OSError as error:
            raise ConfigError(
                f"slurm: host must be an address of this host, got {self._host!r}: {error}"
            ) from error
        self._address = self._server.sockets[0].getsockname()[:2]
        source = await asyncio.to_thread(inspect.getsource, parent_watchdog)
        program = shlex.join((sys.executable, "-I", "-S", "-c", source))
        self._script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')

    async def reserve(self, spec: ProcessSpec) -> str:
        """Submit a Slurm job, and return the job's id. The job may still be queued.

        The job gets a new lease: a secret that the job's first node sends when it connects to this host.

        Raises:
            ConfigError: `sbatch` refused the job.
            PeerTimeout: `sbatch` did not answer within `COMMAND_DEADLINE_S`.
        """
        lease, mark = secrets.token_hex(16), await self._clients.mark()
        options = self._config.options_of(spec.name)
        kind = f"gpu:{options.gpu_type}" if options.gpu_type else "gpu"
        gpus = (f"--gres={kind}:{spec.num_gpus}",) if spec.num_gpus else ()
        client = await asyncio.create_subprocess_exec(
            *("sbatch", "--wait", "--parsable", "--no-requeue", "--output=/dev/null"),
            *(f"--nodes={spec.num_nodes}", f"--ntasks={spec.num_nodes}", "--ntasks-per-node=1"),
            *(f"--job-name={spec.name}", "--export=ALL", f"--cpus-per-task={spec.num_cpus}"),
            *(*gpus, *options.options),
            *(str(self._script), "lease", self._address[0], str(self._address[1])),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment_outside_jobs(), **mark, parent_watchdog.LEASE_VARIABLE: lease},
            start_new_session=True,
        )
        job = self._unclaimed[lease] = _Job(client, spec.num_cpus)
        said: list[str] = []
        reservation = ""
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                async for line in _lines(client):
                    said.append(line)
                    if found := JOB_ID.match(line):
                        reservation = found[1]
                        job.watch = asyncio.create_task(_watch_client(reservation, job))
                        self._jobs[reservation] = job
                        return reservation
        except TimeoutError:
            raise PeerTimeout(
                f"slurm: sbatch gave no answer within {COMMAND_DEADLINE_S} s"
            ) from None
        finally:
            if not reservation:
                del self._unclaimed[lease]
                await _end_client(client)
        raise ConfigError(f"slurm: {spec.name}: sbatch refused: {'; '.join(said)}")

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the lease from a new connection, and record the connection in the job that has this lease.

        The connection shows that the job runs. Close a connection that does not send the lease of a waiting job.
        """
        self._unproven[writer] = None
        if len(self._unproven) > MAX_UNPROVEN:
            # A node of a job sends its lease as soon as it connects. So a connection that has sent nothing while
            # MAX_UNPROVEN newer connections arrived comes from another program.
            next(iter(self._unproven)).transport.abort()
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                said = (await reader.readline()).decode(errors="replace").strip()
        except (TimeoutError, ValueError, ConnectionError):
            said = ""
        finally:
            del self._unproven[writer]
        job = self._unclaimed.pop(said, None)
        if job is None:
            writer.close()
            return
        parent_watchdog.keep_alive(writer.get_extra_info("socket"))
        job.lease, job.address = writer, writer.get_extra_info("peername")[0]
        job.is_known.set()

    async def launch(self, reservation: str, spec: ProcessSpec) -> int:
        """Wait until the job runs, and start the process as an `srun` step; return the pid of `srun` on this host.

        Raises:
            PeerUnreachable: the job ended before Slurm started it.
        """
        # No deadline: the job may stay queued, and only the scheduler's background task waits here. A caller waits in
        # `Scheduler.wait_healthy`, which has a deadline.
        job = self._jobs[reservation]
        await job.is_known.wait()
        if job.lease is None:
            raise PeerUnreachable(job.failure)
        self._job_of[spec.name] = reservation
        options = self._config.options_of(spec.name)
        # The command `cut` in `SEE_GPUS` counts fields from 1.
        fields = ",".join(str(gpu + 1) for gpu in spec.gpus)
        sees = ("/bin/sh", "-c", SEE_GPUS, "sh", fields) if spec.gpus else ()
        client = ProcessSpec(
            name=spec.name,
            command=(
                *("srun", f"--jobid={reservation}", "--overlap", "--nodes=1", "--ntasks=1"),
                *(f"--relative={spec.node}", f"--job-name={spec.name}", "--export=ALL"),
                # Give each step all cores of the job. If steps asked for fewer cores, Slurm would bind every step to the
                # same first cores.
                f"--cpus-per-task={job.num_cpus}",
                *(*options.srun_options, "--", *sees, *options.prefix, *spec.command),
            ),
            environment={**spec.environment, **first_node(spec, job.address)},
        )
        return await self._clients.launch(reservation, client)

    async def wait(self, name: str) -> int:
        """See `ClusterBackend.wait`."""
        code = await self._clients.wait(name)
        # Like a shell, srun reports a signal as 128 plus its number.
        return code if code <= 128 else 128 - code

    async def signal(self, name: str, signal_number: int) -> None:
        """Send a signal to the process `name`: to every step with this name in its Slurm job.

        Do nothing if there is no such step.
        """
        jobs = f"--jobs={self._job_of[name]}"
        listed = await _run("squeue", "--noheader", "--steps", jobs, "--format=%i|%j")
        for line in listed.splitlines():
            step, _, step_name = line.strip().partition("|")
            if step_name == name:
                await _run("scancel", f"--signal={signal_number}", step, tolerate=True)

    async def log_tail(self, name: str, num_lines: int) -> str:
        """See `ClusterBackend.log_tail`."""
        return await self._clients.log_tail(name, num_lines)

    async def release(self, reservation: str) -> None:
        """Cancel the Slurm job, and end its `sbatch` client. Idempotent."""
        job = self._jobs.pop(reservation, None)
        await _run("scancel", reservation, tolerate=True)
        if job is not None:
            await _end_job(job)

    async def close(self) -> None:
        """End all steps and jobs, stop listening, and delete the batch script. Idempotent."""
        await self._clients.close()
        for job in self._jobs.values():
            await _end_job(job)
        self._jobs.clear()
        self._unclaimed.clear()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        self._script.unlink(missing_ok=True)


async def _watch_client(reservation: str, job: _Job) -> None:
    """Wait until `sbatch --wait` ends, and then set `job.failure` and `job.is_known`.

    `sbatch --wait` ends some seconds after the job. If the job's first node has not sent its lease, `launch` raises an
    error with the text `job.failure`.
    """
    said = [line async for line in _lines(job.client)]
    code = await job.client.wait()
    job.failure = (
        f"slurm: job {reservation} ended with exit status {code} before its node connected to this host; "
        f"output of sbatch: {'; '.join(said) or 'none'}"
    )
    job.is_known.set()


async def _end_job(job: _Job) -> None:
    """Close the connection of a job, so that the job ends, and end its `sbatch` client."""
    if job.lease is not None:
        job.lease.close()
    if job.watch is not None:
        job.watch.cancel()
        await asyncio.gather(job.watch, return_exceptions=True)
    await _end_client(job.client)


async def _end_client(client: asyncio.subprocess.Process) -> None:
    """Kill a process of this host, and wait at most `COMMAND_DEADLINE_S` for its end."""
    if client.returncode is None:
        client.kill()
    # A killed process that hangs in a system call does not end. So stop waiting after the deadline.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COMMAND_DEADLINE_S):
            await client.wait()


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """Yield the lines that a process prints, until it closes its output."""
    if process.stdout is not None:
        async for line in process.stdout:
            yield line.decode(errors="replace").strip()


async def _run(*command: str, tolerate: bool = False) -> str:
    """Run a Slurm command; return its output. With `tolerate`, ignore a failure: the job may have ended already.

    Raises:
        ConfigError: the command failed.
        PeerTimeout: the command did not end within `COMMAND_DEADLINE_S`.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment_outside_jobs(),
    )
    try:
        async with asyncio.timeout(COMMAND_DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise PeerTimeout(
            f"slurm: {command[0]} gave no answer within {COMMAND_DEADLINE_S} s"
        ) from None
    finally:
        if process.returncode is None:
            await _end_client(process)
    if process.returncode and not tolerate:
        said = errors.decode(errors="replace").strip().replace("\n", "; ")
        raise ConfigError(
            f"slurm: {command[0]} ended with exit status {process.returncode}: {said}"
        )
    return output.decode(errors="replace")
