"""Processes that wait in a cluster's queue before they run: what Slurm and Ray have in common."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.jobs.schedulers.base import ProcessSpec, ProcessStatus, Scheduler

__all__ = ["ClusterBackend", "QueuedScheduler"]

_log = logging.getLogger(__name__)
LOST_RETURNCODE = -int(signal.SIGKILL)
END_DEADLINE_S = 30.0


class ClusterBackend(Protocol):
    """A cluster's own commands. `place` is its name for a reservation."""

    async def open(self) -> None:
        """Reach the cluster.

        Raises:
            ConfigError: it cannot be reached. TransportUnavailable: its software is missing.
        """
        ...

    async def reserve(self, spec: ProcessSpec) -> str:
        """Ask for the spec's cores and devices; returns the place, granted or queued.

        Raises:
            ConfigError: refused.
        """
        ...

    async def granted(self, place: str) -> None:
        """Return once the place may be used.

        Raises:
            PeerUnreachable: it never will be.
        """
        ...

    async def launch(self, place: str, spec: ProcessSpec) -> int:
        """Start the process there; returns its pid."""
        ...

    async def wait(self, place: str, name: str) -> int:
        """The process's return code, once it has ended."""
        ...

    async def signal(self, place: str, name: str, signal_number: int) -> None:
        """Signal the process and everything it started; nothing when it has ended."""
        ...

    async def log_tail(self, place: str, name: str, num_lines: int) -> str:
        """The last lines printed."""
        ...

    async def release(self, place: str) -> None:
        """Give the reservation back and kill whatever is left in it. Idempotent."""
        ...

    async def close(self) -> None:
        """Leave the cluster. Idempotent."""
        ...


@dataclass(slots=True)
class _Entry:
    spec: ProcessSpec
    place: str
    pid: int = 0
    returncode: int | None = None
    failure: str = ""
    left_queue: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@final
class QueuedScheduler(Scheduler):
    """A `Scheduler` over a cluster. Enter it as a context, or call `open` and `close`.

    Args:
        backend: owned by the scheduler from here on.
        environment: variables for every process.
    """

    def __init__(
        self, backend: ClusterBackend, environment: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        self._environment = dict(environment or {})
        self._entries: dict[str, _Entry] = {}

    async def open(self) -> None:
        """See `ClusterBackend.open`."""
        await self._backend.open()

    async def start(self, spec: ProcessSpec) -> ProcessStatus:
        known = self._entries.get(spec.name)
        if known is not None:
            if not known.ended.is_set():
                raise ConfigError(f"scheduler: process name {spec.name!r} is taken")
            await self.delete(spec.name)
        place = await self._place_for(spec)
        environment = {**self._environment, **spec.environment}
        command = ProcessSpec(
            name=spec.name,
            command=spec.command,
            environment=environment,
            num_cpus=spec.num_cpus,
            num_gpus=spec.num_gpus,
        )
        entry = self._entries[spec.name] = _Entry(command, place)
        entry.task = asyncio.create_task(self._drive(entry))
        return self.status(spec.name)

    async def _place_for(self, spec: ProcessSpec) -> str:
        if not spec.colocate_with:
            return await self._backend.reserve(spec)
        host = self._entry(spec.colocate_with)
        if host.ended.is_set():
            raise ConfigError(
                f"scheduler: {spec.name}: colocate_with {spec.colocate_with!r} has ended"
            )
        return host.place

    async def _drive(self, entry: _Entry) -> None:
        name = entry.spec.name
        try:
            await self._backend.granted(entry.place)
            entry.pid = await self._backend.launch(entry.place, entry.spec)
            entry.left_queue.set()
            entry.returncode = await self._backend.wait(entry.place, name)
        except WindlassError as error:
            entry.failure = str(error)
            entry.returncode = LOST_RETURNCODE
        finally:
            if entry.returncode is None:
                entry.returncode = LOST_RETURNCODE
            entry.left_queue.set()
            entry.ended.set()

    async def wait_healthy(self, name: str, *, deadline_s: float) -> ProcessStatus:
        entry = self._entry(name)
        try:
            async with asyncio.timeout(deadline_s):
                await entry.left_queue.wait()
        except TimeoutError:
            raise PeerTimeout(f"scheduler: {name} is still queued after {deadline_s} s") from None
        if entry.ended.is_set():
            tail = await self.log_tail(name)
            raise PeerUnreachable(
                f"scheduler: {name} ended with {entry.returncode}; its log ends:\n{tail}"
            )
        return self.status(name)

    async def wait(self, name: str) -> ProcessStatus:
        await self._entry(name).ended.wait()
        return self.status(name)

    def status(self, name: str) -> ProcessStatus:
        entry = self._entry(name)
        return ProcessStatus(name=name, pid=entry.pid, returncode=entry.returncode)

    def list(self) -> tuple[ProcessStatus, ...]:
        return tuple(map(self.status, self._entries))

    async def signal(self, name: str, signal_number: int) -> None:
        entry = self._entry(name)
        if entry.pid and not entry.ended.is_set():
            await self._backend.signal(entry.place, name, signal_number)

    async def log_tail(self, name: str, num_lines: int = 40) -> str:
        entry = self._entry(name)
        if not entry.pid:
            return entry.failure
        try:
            tail = await self._backend.log_tail(entry.place, name, num_lines)
        except (PeerUnreachable, PeerTimeout) as error:
            return str(error)
        return f"{tail}{entry.failure}"

    async def delete(self, name: str, *, grace_s: float = 5.0) -> None:
        entry = self._entry(name)
        await self._terminate([entry], grace_s)
        del self._entries[name]
        if not any(other.place == entry.place for other in self._entries.values()):
            await self._backend.release(entry.place)
        else:
            await self._kill(entry)
        await self._join([entry])

    async def close(self, *, grace_s: float = 5.0) -> None:
        entries = [*self._entries.values()]
        try:
            await self._terminate(entries, grace_s)
            for place in dict.fromkeys(entry.place for entry in entries):
                await self._backend.release(place)
            await self._join(entries)
        finally:
            self._entries.clear()
            await self._backend.close()

    async def _terminate(self, entries: Sequence[_Entry], grace_s: float) -> None:
        live = [entry for entry in entries if entry.pid and not entry.ended.is_set()]
        for entry in live:
            for number in (signal.SIGTERM, signal.SIGCONT):
                try:
                    await self._backend.signal(entry.place, entry.spec.name, number)
                except WindlassError as error:  # its place is released all the same
                    _log.warning("%s: not signalled: %s", entry.spec.name, error)
        waits = [asyncio.ensure_future(entry.ended.wait()) for entry in live]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=grace_s)
            for task in pending:
                task.cancel()

    async def _kill(self, entry: _Entry) -> None:
        if entry.pid and not entry.ended.is_set():
            await self._backend.signal(entry.place, entry.spec.name, signal.SIGKILL)

    async def _join(self, entries: Sequence[_Entry]) -> None:
        """Released places end their processes; a cluster that does not say so is not waited for."""
        tasks = [entry.task for entry in entries if entry.task is not None]
        for entry in entries:
            if not entry.pid and entry.task is not None:
                entry.task.cancel()  # still queued
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=END_DEADLINE_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ConfigError(f"scheduler: no process named {name!r}")
        return self._entries[name]

    async def __aenter__(self) -> QueuedScheduler:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
