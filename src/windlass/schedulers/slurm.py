"""Processes as Slurm job steps.

A reservation is one `salloc --no-shell` allocation: unlike with `sbatch`, whose grant can only be
asked for again and again, the client's end says that it was granted. Processes are `srun` steps
in it, so that colocated ones share node, cores and devices. The `srun` client of a step runs
here: its end is the step's end, at once and with the return code, and its output is the step's,
without a shared file system. The environment, and with it the token, travels through `srun` and never
stands on a command line.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import final

from windlass.envs import inherited_environment
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, TransportUnavailable
from windlass.schedulers.base import ProcessSpec
from windlass.schedulers.local import LocalScheduler
from windlass.schedulers.queued import ClusterBackend, QueuedScheduler

__all__ = ["SlurmBackend", "slurm_scheduler"]

COMMAND_DEADLINE_S = 30.0
ALLOCATION = re.compile(r"job allocation (\d+)")
TOOLS = ("salloc", "srun", "squeue", "scancel", "scontrol")


def slurm_scheduler(
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    *,
    salloc_options: tuple[str, ...] = (),
) -> QueuedScheduler:
    """A scheduler that submits to the Slurm cluster of this host.

    Args:
        log_dir: where `NAME.log` is written, on this host.
        environment: variables for every process.
        salloc_options: passed on: partition, account, time limit.
    """
    return QueuedScheduler(SlurmBackend(log_dir, salloc_options=salloc_options), environment)


@final
class SlurmBackend(ClusterBackend):
    """See the module. A place is a job id."""

    def __init__(self, log_dir: Path, *, salloc_options: tuple[str, ...] = ()) -> None:
        self._clients = LocalScheduler(log_dir)
        self._options = salloc_options
        self._salloc: dict[str, asyncio.subprocess.Process] = {}

    async def open(self) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise TransportUnavailable(
                f"slurm: {', '.join(missing)} not found; install slurm-client"
            )
        await _run("scontrol", "ping")

    async def reserve(self, spec: ProcessSpec) -> str:
        devices = (f"--gres=gpu:{spec.num_gpus}",) if spec.num_gpus else ()
        client = await asyncio.create_subprocess_exec(
            *("salloc", "--no-shell", "--nodes=1", "--ntasks=1", f"--job-name={spec.name}"),
            *(f"--cpus-per-task={spec.num_cpus}", *devices, *self._options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=inherited_environment(),
            start_new_session=True,
        )
        said: list[str] = []
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                async for line in _lines(client):
                    said.append(line)
                    if found := ALLOCATION.search(line):
                        self._salloc[found[1]] = client
                        return found[1]
        except TimeoutError:
            client.kill()
            raise PeerTimeout(
                f"slurm: salloc gave no answer within {COMMAND_DEADLINE_S} s"
            ) from None
        finally:
            if said and not ALLOCATION.search(said[-1]):
                await client.wait()
        raise ConfigError(f"slurm: {spec.name}: salloc refused: {'; '.join(said)}")

    async def granted(self, place: str) -> None:
        # How long a job may queue is the caller's deadline on `wait_healthy`.
        _, said = await self._salloc[place].communicate()
        if code := self._salloc[place].returncode:
            raise PeerUnreachable(
                f"slurm: job {place} was not granted, salloc ended with {code}: "
                f"{said.decode(errors='replace').strip()}"
            )

    async def launch(self, place: str, spec: ProcessSpec) -> int:
        client = ProcessSpec(
            name=spec.name,
            command=(
                *("srun", f"--jobid={place}", "--overlap", "--nodes=1", "--ntasks=1"),
                *(f"--cpus-per-task={spec.num_cpus}", f"--job-name={spec.name}"),
                *("--kill-on-bad-exit=1", "--export=ALL", "--unbuffered", "--", *spec.command),
            ),
            environment=spec.environment,
        )
        return (await self._clients.start(client)).pid

    async def wait(self, place: str, name: str) -> int:  # noqa: ARG002
        code = (await self._clients.wait(name)).returncode
        # srun reports a signal as a shell does.
        return 0 if code is None else code if code <= 128 else 128 - code

    async def signal(self, place: str, name: str, signal_number: int) -> None:
        listed = await _run("squeue", "--noheader", "--steps", f"--jobs={place}", "--format=%i|%j")
        for line in listed.splitlines():
            step, _, step_name = line.strip().partition("|")
            if step_name == name:
                await _run("scancel", f"--signal={signal_number}", step, tolerate=True)

    async def log_tail(self, place: str, name: str, num_lines: int) -> str:  # noqa: ARG002
        return await self._clients.log_tail(name, num_lines)

    async def release(self, place: str) -> None:
        await _run("scancel", place, tolerate=True)
        client = self._salloc.pop(place, None)
        if client is not None and client.returncode is None:
            client.send_signal(signal.SIGTERM)
            await client.wait()

    async def close(self) -> None:
        await self._clients.close()


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    if process.stderr is not None:
        async for line in process.stderr:
            yield line.decode(errors="replace").strip()


async def _run(*command: str, tolerate: bool = False) -> str:
    """Run one of Slurm's commands; its output.

    Args:
        command: argument list.
        tolerate: the job or step may be gone already.

    Raises:
        ConfigError: it failed. PeerTimeout: no answer in time.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inherited_environment(),
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
            process.kill()
            await process.wait()
    if process.returncode and not tolerate:
        said = errors.decode(errors="replace").strip().replace("\n", "; ")
        raise ConfigError(f"slurm: {command[0]} ended with {process.returncode}: {said}")
    return output.decode(errors="replace")
