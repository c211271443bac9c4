"""A fleet on several hosts: each process uses its host's network, with real wires and real bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
from hosts import Network

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

PROGRAM = Path(__file__).with_name("host_process.py")
TRANSPORT = '{"type": "mooncake", "protocol": "tcp"}'
STEP_S = 90.0
ROWS = 340
"""Rows of each tensor; the three tensors have about 2 MB."""
HOSTS = ("control", "trainer", "a", "b")
DEADLINES = PhaseDeadlines(
    connect_s=15, prepare_s=8, pause_s=8, write_s=10, verify_s=8, apply_s=8, publish_s=8, fleet_s=30
)


class Refused(Exception):
    """Error that a process reported by name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text


class Member:
    """A process on a host."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self._count = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.about: dict[str, Any] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            if "event" in answer:
                self._events.put_nowait(answer)
                continue
            future = self._answers.pop(answer["id"])
            if future.done():
                continue
            if "error" in answer:
                future.set_exception(Refused(*answer["error"]))
            else:
                future.set_result(answer["value"])
        ended = ConnectionError(f"{self.name} ended with {await self.process.wait()}")
        for future in self._answers.values():
            if not future.done():
                future.set_exception(ended)
                future.exception()
        self._events.put_nowait({"event": "ended"})

    async def event(self, name: str) -> dict[str, Any]:
        async with asyncio.timeout(STEP_S):
            found = await self._events.get()
        assert found["event"] == name, (self.name, found)
        return found

    def order(self, *order: Any) -> asyncio.Future[Any]:
        self._count += 1
        future = asyncio.get_running_loop().create_future()
        self._answers[self._count] = future
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([self._count, *order]).encode() + b"\n")
        return future

    async def ask(self, *order: Any) -> Any:
        async with asyncio.timeout(STEP_S):
            return await self.order(*order)

    async def end(self) -> None:
        """Kill the process without notice."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reader


class Fleet:
    """Members by name. Engines run on the host of their name, trainers on `trainer`, or as `hosts` says."""

    def __init__(
        self,
        network: Network,
        config: ControlConfig,
        transport: str,
        rows: int,
        hosts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.network, self.config, self.hosts = network, config, hosts
        self.transport, self.rows = transport, rows
        self.members: dict[str, Member] = {}
        self.version = -1
        self.url = ""

    async def start(
        self, name: str, host: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> Member:
        process = await asyncio.create_subprocess_exec(
            *self.network.host(self.hosts.get(name, host)).command(
                sys.executable, str(PROGRAM), *arguments
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "MC_LOG_LEVEL": "FATAL", **(environment or {})},
            limit=1 << 22,
        )
        self.members[name] = Member(name, process)
        return self.members[name]

    async def ready(self, name: str) -> dict[str, Any]:
        self.members[name].about = await self.members[name].event("ready")
        return self.members[name].about

    async def start_controller(
        self, host: str = "control", *, address: str = "", port: int = 0, journal: str = ""
    ) -> None:
        bound = address or self.network.host(host).address
        config = msgspec.json.encode(self.config).decode()
        await self.start("controller", host, "controller", bound, str(port), config, journal)
        self.url = (await self.ready("controller"))["url"]

    async def start_engine(
        self,
        name: str,
        host: str = "",
        *,
        transport: str = "",
        advertised: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        given = (name, self.url, transport or self.transport, str(self.rows), advertised)
        await self.start(name, host or name, "engine", *given, environment=environment)

    async def start_trainers(self, parts: int = 1, host: str = "trainer") -> None:
        for index in range(parts):
            given = (self.url, self.transport, str(self.rows), str(index), str(parts))
            await self.start(f"trainer{index}", host, "trainer", *given)

    @property
    def trainers(self) -> list[Member]:
        return [m for n, m in self.members.items() if n.startswith("trainer")]

    async def complete(self, engines: Sequence[str], num_trainers: int = 1) -> None:
        await self.members["controller"].ask("fleet", num_trainers, list(engines), STEP_S - 5)

    def begin(self, version: int = -1, deadline_s: float = 60.0) -> asyncio.Future[list[Any]]:
        """Let all trainer ranks publish the next version; the result has an answer or an error of each."""
        self.version = version if version >= 0 else self.version + 1
        told = [t.order("publish", self.version, deadline_s) for t in self.trainers]
        return cast("asyncio.Future[list[Any]]", asyncio.gather(*told, return_exceptions=True))

    async def publish(self) -> list[str]:
        """Publish the next version and return the engines that were left out."""
        answers = await self.begin()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast("list[str]", answers[0]["left_out"])

    async def serves(
        self,
        engines: Sequence[str],
        version: int | None = None,
        *,
        whole: Sequence[str] | None = None,
    ) -> None:
        """Wait until exactly these engines are routable at the version. Check that each (or each
        of `whole`) stores it."""
        wanted = self.version if version is None else version
        await self.members["controller"].ask("serving", wanted, sorted(engines), STEP_S - 5)
        for name in engines if whole is None else whole:
            state = await self.state(name)
            assert (state["served"], state["held"], state["mixed_weights"]) == (
                wanted,
                wanted,
                False,
            ), state

    async def served_by(self, *engines: str) -> list[int]:
        """Return the version that each engine claims to serve."""
        return [(await self.state(name))["served"] for name in engines]

    async def state(self, name: str) -> dict[str, Any]:
        """Return the state of an engine. Check that it never found another version than it claimed."""
        state = cast("dict[str, Any]", await self.members[name].ask("state"))
        assert state["wrong"] == [], (name, state)
        return state

    async def status(self) -> dict[str, Any]:
        return cast("dict[str, Any]", await self.members["controller"].ask("status"))

    async def end(self, name: str) -> None:
        await self.members.pop(name).end()

    async def close(self) -> None:
        for name in list(self.members):
            await self.end(name)


@asynccontextmanager
async def fleet_on(
    network: Network,
    mode: UpdateMode = UpdateMode.STAGED,
    *,
    engines: Sequence[str] = ("a", "b"),
    transport: str = TRANSPORT,
    rows: int = ROWS,
    num_trainers: int = 1,
    config: ControlConfig | None = None,
    hosts: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Fleet]:
    """Run a controller, trainers and engines, each on its host, with version 0 published."""
    made = config or ControlConfig(mode=mode, deadlines=DEADLINES, heartbeat_s=8.0, max_rewrites=1)
    fleet = Fleet(network, made, transport, rows, hosts)
    try:
        await fleet.start_controller()
        await fleet.start_trainers(num_trainers)
        for name in engines:
            await fleet.start_engine(name)
        for name in (*engines, *(t.name for t in fleet.trainers)):
            await fleet.ready(name)
        await fleet.complete(engines, num_trainers)
        assert await fleet.publish() == []
        await fleet.serves(engines)
        yield fleet
    finally:
        await fleet.close()
