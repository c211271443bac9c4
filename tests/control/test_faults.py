"""`kill -9` of every kind of process in every phase of an update, while rollouts are outstanding.

One fleet per case goes through all its phases. It has two trainer ranks, two engines, two rollout
workers and the controller, each in its own process. After each kill the test starts the dead
process again, and all engines must serve the next version. At the end every requested rollout must
have been delivered once, without a token from mixed weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fault_processes
import pytest
from kept_port import free_port

from windlass.config import (
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PhaseDeadlines,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)

PROCESSES = multiprocessing.get_context("forkserver")
DEADLINES = PhaseDeadlines(connect_s=20, write_s=8, fleet_s=20)
STEP_S = 90.0
"""Longer than any deadline above: a longer wait is a hang."""
ENGINES, WORKERS = ("a", "b"), ("worker-0", "worker-1")
COMMAND_OF = {
    "PREPARE": "Prepare",
    "PAUSE": "Pause",
    "WRITE": "Write",
    "VERIFY": "Verify",
    "APPLY": "Apply",
    "RELEASE": "Release",
    "PUBLISH": "Publish",
}
ALL = tuple(phase for phase in COMMAND_OF if phase != "RELEASE")
TO_TRAINERS = {"Prepare", "Write", "Release"}
VICTIMS = {"worker": "worker-0", "engine": "a", "trainer": "trainer/1", "controller": "controller"}


class Process:
    """Process that answers each message with a message."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    async def read(self, deadline_s: float = STEP_S) -> Any:
        assert await asyncio.to_thread(self._pipe.poll, deadline_s), "no answer in time"
        return self._pipe.recv()

    def tell(self, message: object) -> None:
        self._pipe.send(message)

    async def ask(self, *message: object, deadline_s: float = STEP_S) -> Any:
        self.tell(message)
        return await self.read(deadline_s)

    async def ended(self) -> int | None:
        await asyncio.to_thread(self.process.join, STEP_S)
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.process.close()
        self._pipe.close()


class Fleet:
    """All processes by name. `start(name)` starts a process, the first time or again."""

    def __init__(
        self,
        folder: Path,
        config: ControlConfig,
        outstanding_groups: int,
        token_s: float,
        *,
        turns: bool = False,
    ) -> None:
        self.turns, self.transport = turns, "pull" if turns else "cma"
        self.folder, self.config = folder, config
        self.outstanding_groups, self.token_s = outstanding_groups, token_s
        self.processes: dict[str, Process] = {}
        self.url = ""
        self.port = free_port()
        self.version = -1

    async def start(self, name: str) -> None:
        old = self.processes.pop(name, None)
        if old is not None:
            old.close()
        self.processes[name] = process = self._made(name)
        if name == "controller":
            self.url = await process.read()
        elif name not in WORKERS:
            assert await process.read() == "ready"

    def _made(self, name: str) -> Process:
        if name == "controller":
            return Process(
                fault_processes.run_controller,
                self.port,
                self.folder,
                self.config,
                self.outstanding_groups,
            )
        if name in ENGINES:
            return Process(fault_processes.run_engine, name, self.url, self.token_s, self.transport)
        if name in WORKERS:
            return Process(fault_processes.run_worker, name, self.url)
        return Process(fault_processes.run_trainer, int(name[-1]), self.url, self.transport)

    async def complete(self) -> None:
        assert await self.processes["controller"].ask("fleet", ENGINES, len(WORKERS)) == "there"

    async def begin_turn(self) -> None:
        """Let the engines sleep, if trainer and engines take turns. They lose their weights."""
        for name in ENGINES if self.turns else ():
            assert await self.processes[name].ask("sleep") == "asleep"

    async def publish(self) -> list[Any]:
        """Announce the next version in every rank and return their answers."""
        await self.begin_turn()
        self.version += 1
        ranks = [p for n, p in self.processes.items() if n.startswith("trainer")]
        return await asyncio.gather(*(p.ask("publish", self.version) for p in ranks))

    async def assert_serves(self) -> None:
        """Check that both engines hold and serve only the newest version."""
        assert await self.processes["controller"].ask("serving", self.version, ENGINES)
        for name in ENGINES:
            held = await self.processes[name].ask("held")
            assert held == (self.version, self.version, False), name

    def close(self) -> None:
        for process in self.processes.values():
            process.close()


@asynccontextmanager
async def fleet_of(
    folder: Path,
    backend: str,
    mode: UpdateMode,
    *,
    outstanding_groups: int = 12,
    token_s: float = 0.02,
    heartbeat_s: float = 20.0,
) -> AsyncIterator[Fleet]:
    made: dict[str, UpdateBackend] = {
        "p2p": P2pBackend(),
        "turns": P2pBackend(),
        "xccl": XcclBackend(bucket_nbytes=1024),
        "disk": DiskBackend(folder=str(folder / "weights")),
    }
    config = ControlConfig(
        mode=mode, backend=made[backend], deadlines=DEADLINES, heartbeat_s=heartbeat_s
    )
    turns = backend == "turns"
    fleet = Fleet(folder, config, outstanding_groups, token_s, turns=turns)
    try:
        await fleet.start("controller")
        names = (*ENGINES, *WORKERS, *(f"trainer/{i}" for i in range(2)))
        await asyncio.gather(*(fleet.start(name) for name in names))
        await fleet.complete()
        assert {answer[0] for answer in await fleet.publish()} == {"published"}
        await fleet.assert_serves()
        yield fleet
    finally:
        fleet.close()


async def kill_in(fleet: Fleet, victim: str, phase: str, *, num_outstanding: int = 1) -> list[Any]:
    """Publish a version, kill and restart `victim` in it, and return the answers of the ranks."""
    command, name = COMMAND_OF[phase], VICTIMS[victim]
    killer = "trainer/0" if command in TO_TRAINERS else "b"
    if victim == "engine" and command not in TO_TRAINERS:
        killer = name
    if victim == "trainer" and command in TO_TRAINERS:
        killer = name
    doomed = fleet.processes[name]
    stats = await fleet.processes["controller"].ask("stats")
    assert stats["outstanding"] >= num_outstanding, "rollouts are under way"
    assert stats["lost"] == 0
    assert await fleet.processes[killer].ask("arm", command, doomed.process.pid) == "armed"
    ranks = {n: p for n, p in fleet.processes.items() if n.startswith("trainer")}
    await fleet.begin_turn()
    fleet.version += 1
    telling = {n: asyncio.create_task(p.ask("publish", fleet.version)) for n, p in ranks.items()}
    assert await doomed.ended() == -9
    if victim == "trainer":
        telling.pop(name).cancel()
    await fleet.start(name)
    told = list(await asyncio.gather(*telling.values()))
    await fleet.complete()
    return told


def expected(victim: str, phase: str, mode: UpdateMode) -> set[str]:
    """Return the outcomes that the other ranks may get for the version with the kill."""
    if victim == "controller":
        # The next controller repeats the version or gives its number up.
        return {"published", "aborted"}
    if victim != "trainer":
        return {"published"}
    before_the_end = {"PREPARE", "WRITE"} | ({"PAUSE"} if mode is UpdateMode.IN_PLACE else set())
    return {"aborted"} if phase in before_the_end else {"published"}


def assert_delivered_once(folder: Path) -> int:
    lines = fault_processes.stored(folder / "store")
    num_wanted = (folder / "wanted").stat().st_size
    assert sorted(line["serial"] for line in lines) == list(range(num_wanted))
    tasks = [task for line in lines for task in line["tasks"]]
    assert len(tasks) == len(set(tasks)) == num_wanted * fault_processes.GROUP_SIZE
    for line in lines:
        assert line["tokens"] == line["versions"], "a token is not of the version that it names"
        assert all(len(tokens) == fault_processes.NUM_TOKENS for tokens in line["tokens"])
    return len(tasks)


P2P = [("p2p", mode, victim, ALL) for mode in UpdateMode for victim in VICTIMS]
TURNS = [
    ("turns", UpdateMode.IN_PLACE, victim, (*ALL[:-1], "RELEASE", ALL[-1])) for victim in VICTIMS
]
OTHERS = [
    (backend, mode, victim, ("WRITE", "VERIFY"))
    for backend in ("xccl", "disk")
    for mode in UpdateMode
    for victim in VICTIMS
]
IN_DEFAULT_SUITE: list[tuple[str, UpdateMode, str, tuple[str, ...]]] = [
    ("p2p", UpdateMode.IN_PLACE, "engine", ("WRITE", "VERIFY", "PUBLISH")),
    ("p2p", UpdateMode.STAGED, "trainer", ("WRITE", "APPLY")),
    ("p2p", UpdateMode.IN_PLACE, "controller", ("WRITE", "PUBLISH")),
    ("p2p", UpdateMode.STAGED, "worker", ("PAUSE",)),
    ("turns", UpdateMode.IN_PLACE, "trainer", ("PREPARE", "WRITE", "RELEASE")),
    ("turns", UpdateMode.IN_PLACE, "engine", ("PREPARE", "WRITE", "PUBLISH")),
]


def named(case: tuple[str, UpdateMode, str, tuple[str, ...]]) -> str:
    backend, mode, victim, phases = case
    is_all = set(ALL) <= set(phases)
    return f"{backend}-{mode}-{victim}-{'all' if is_all else '-'.join(phases).lower()}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=named(case)) for case in IN_DEFAULT_SUITE),
        *(
            pytest.param(case, id=named(case), marks=pytest.mark.long)
            for case in P2P + TURNS + OTHERS
        ),
    ],
)
async def test_a_kill_in_any_phase_loses_no_rollout_and_the_next_update_works(
    tmp_path: Path, case: tuple[str, UpdateMode, str, tuple[str, ...]]
) -> None:
    backend, mode, victim, phases = case
    async with fleet_of(tmp_path, backend, mode) as fleet:
        for phase in phases:
            await survive(fleet, victim, phase, expected(victim, phase, mode))
        await drain(fleet)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_kill_of_each_kind_of_process_loses_none_of_a_thousand_rollouts(
    tmp_path: Path,
) -> None:
    mode = UpdateMode.STAGED
    async with fleet_of(tmp_path, "p2p", mode, outstanding_groups=520, token_s=0.6) as fleet:
        for victim in VICTIMS:
            told = expected(victim, "WRITE", mode)
            await survive(fleet, victim, "WRITE", told, num_outstanding=1000)
        await drain(fleet)


async def survive(
    fleet: Fleet, victim: str, phase: str, expected_outcomes: set[str], *, num_outstanding: int = 1
) -> None:
    """Kill the victim and check that all engines serve the next version in time."""
    began = time.monotonic()
    told = await kill_in(fleet, victim, phase, num_outstanding=num_outstanding)
    assert {answer[0] for answer in told} <= expected_outcomes, (phase, told)
    answers = await fleet.publish()
    assert answers == [("published", "", ())] * 2, (phase, answers)
    await fleet.assert_serves()
    assert time.monotonic() - began < STEP_S, phase


async def drain(fleet: Fleet) -> None:
    """Stop requesting rollouts and check that all requested ones arrive."""
    stats = await fleet.processes["controller"].ask(
        "drain", deadline_s=fault_processes.DRAIN_S + STEP_S
    )
    assert (stats["lost"], stats["outstanding"], stats["failed"]) == (0, 0, 0), stats
    assert assert_delivered_once(fleet.folder) > 0
