"""Every update backend, between real processes: the same bytes, the same transaction."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import backend_rank  # type: ignore[import-not-found]
import pytest
from safetensors import safe_open

import windlass
from windlass.config import (
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PhaseDeadlines,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)
from windlass.execution.disk_files import file_digest, read_index

TOKEN = "secret of the test"
PROCESSES = multiprocessing.get_context("forkserver")
# torch is imported once, not once per rank
PROCESSES.set_forkserver_preload(["torch", "windlass.training.client", "windlass.execution.disk"])
NUM_TRAINERS = 3
DEADLINES = PhaseDeadlines(connect_s=25, write_s=8, fleet_s=20)


class Rank:
    """A process that answers a message with a message."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    async def read(self) -> Any:
        assert await asyncio.to_thread(self._pipe.poll, 60)
        return self._pipe.recv()

    async def ask(self, message: object) -> Any:
        self._pipe.send(message)
        return await self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.join(30)
        self.process.close()
        self._pipe.close()


class Fleet:
    """Three trainer ranks, and engines that come one by one."""

    def __init__(self, controller: windlass.Controller) -> None:
        self._url = controller.url
        self.trainers: list[Rank] = []
        self.engines: dict[str, list[Rank]] = {}

    def add_engine(self, name: str, num_ranks: int, fault: str = "") -> None:
        self.engines[name] = [
            Rank(
                backend_rank.run_engine,
                *(name, index, num_ranks, self._url, TOKEN, "" if index else fault),
            )
            for index in range(num_ranks)
        ]

    def add_trainers(self) -> None:
        self.trainers = [
            Rank(backend_rank.run_trainer, index, NUM_TRAINERS, self._url, TOKEN)
            for index in range(NUM_TRAINERS)
        ]

    async def ready(self) -> None:
        for rank in (*self.trainers, *(r for ranks in self.engines.values() for r in ranks)):
            assert await rank.read() == "ready"

    async def publish(self, version: int) -> Any:
        answers = await asyncio.gather(*(t.ask(version) for t in self.trainers))
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    async def held(self, name: str) -> list[Any]:
        """(served version, version that every byte of memory belongs to, tainted) per rank."""
        return [await rank.ask(True) for rank in self.engines[name]]

    def close(self) -> None:
        for rank in (*self.trainers, *(r for ranks in self.engines.values() for r in ranks)):
            rank.close()


@asynccontextmanager
async def fleet_of(
    backend: UpdateBackend, mode: UpdateMode, min_engines: int = 1
) -> AsyncIterator[Fleet]:
    config = ControlConfig(
        mode=mode, backend=backend, deadlines=DEADLINES, min_engines=min_engines, max_rewrites=1
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        fleet = Fleet(controller)
        try:
            yield fleet
        finally:
            fleet.close()


def backend_called(name: str, folder: Path) -> UpdateBackend:
    made: dict[str, UpdateBackend] = {
        "p2p": P2pBackend(),
        "xccl": XcclBackend(bucket_nbytes=1024),  # cuts rows of every tensor
        "disk": DiskBackend(folder=str(folder)),
    }
    return made[name]


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("name", ["p2p", "xccl", "disk"])
async def test_every_backend_delivers_every_byte(
    tmp_path: Path, name: str, mode: UpdateMode
) -> None:
    async with fleet_of(backend_called(name, tmp_path), mode, min_engines=2) as fleet:
        fleet.add_trainers()
        fleet.add_engine("halves", 2)
        fleet.add_engine("whole", 1)
        await fleet.ready()
        for version in range(2):
            assert await fleet.publish(version) == ("published", [])
            assert await fleet.held("halves") == [(version, str(version), False)] * 2
            assert await fleet.held("whole") == [(version, str(version), False)]


async def test_a_receiver_killed_in_mid_collective_releases_the_others_and_the_update_goes_on() -> (
    None
):
    async with fleet_of(XcclBackend(bucket_nbytes=1024), UpdateMode.IN_PLACE, 2) as fleet:
        fleet.add_trainers()
        fleet.add_engine("stays", 2)
        fleet.add_engine("dies", 1, "die")
        await fleet.ready()
        began = time.monotonic()
        # Two engines are asked for: the update waits for a newcomer, which needs no restart.
        update = asyncio.create_task(fleet.publish(0))
        await asyncio.to_thread(fleet.engines["dies"][0].process.join, 30)
        fleet.add_engine("comes", 1)
        outcome = await update
        assert outcome == ("published", []), outcome
        assert time.monotonic() - began < 30
        assert await fleet.engines["comes"][0].read() == "ready"
        assert await fleet.held("stays") == [(0, "0", False)] * 2
        assert await fleet.held("comes") == [(0, "0", False)]
        assert await fleet.publish(1) == ("published", [])
        assert await fleet.held("stays") == [(1, "1", False)] * 2


async def test_a_failed_broadcast_is_sent_again_through_a_new_group_and_none_serves_a_mixture() -> (
    None
):
    async with fleet_of(XcclBackend(bucket_nbytes=1024), UpdateMode.STAGED, 2) as fleet:
        fleet.add_trainers()
        fleet.add_engine("good", 1)
        fleet.add_engine("late", 1, "skip")
        await fleet.ready()
        assert await fleet.publish(0) == ("published", [])
        assert await fleet.held("good") == [(0, "0", False)]
        assert await fleet.held("late") == [(0, "0", False)]


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_damaged_files_are_refused_and_nothing_of_them_is_applied(
    tmp_path: Path, mode: UpdateMode
) -> None:
    async with fleet_of(DiskBackend(folder=str(tmp_path)), mode) as fleet:
        fleet.add_trainers()
        fleet.add_engine("engine", 1, f"damage:{tmp_path}")
        await fleet.ready()
        outcome, reason = await fleet.publish(0)
        assert outcome == "RoundAborted", reason
        assert await fleet.held("engine") == [(-1, "untouched", False)]


async def test_files_hold_boxes_under_checkpoint_names_and_old_versions_go(tmp_path: Path) -> None:
    backend = DiskBackend(folder=str(tmp_path), keep_versions=1)
    async with fleet_of(backend, UpdateMode.STAGED) as fleet:
        fleet.add_trainers()
        fleet.add_engine("engine", 1)
        await fleet.ready()
        for version in range(4):
            assert await fleet.publish(version) == ("published", [])
    check_files(tmp_path)


def check_files(tmp_path: Path) -> None:
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v00000002", "v00000003"]
    index = read_index(tmp_path, 3, "trainer/1")
    path = tmp_path / "v00000003" / index.file
    assert file_digest(path) == index.digest
    assert not list(tmp_path.rglob("*.tmp"))
    with safe_open(str(path), framework="np") as file:
        for entry in index.entries:
            assert tuple(file.get_tensor(entry.key).shape) == entry.sizes
