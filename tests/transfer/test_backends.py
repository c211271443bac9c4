"""Every update backend between real processes: all give the same bytes in the same transaction."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from weight_fleet import running_fleet

from windlass.backends.disk_files import file_digest, read_index
from windlass.config import (
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PhaseDeadlines,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)

NUM_TRAINERS = 3
DEADLINES = PhaseDeadlines(connect_s=25, write_s=8, fleet_s=20)


def fleet_of(
    backend: UpdateBackend, mode: UpdateMode, min_engines: int = 1
) -> AbstractAsyncContextManager[Any]:
    """Return a fleet with three trainer ranks. Engines are added one by one."""
    config = ControlConfig(
        mode=mode, backend=backend, deadlines=DEADLINES, min_engines=min_engines, max_rewrites=1
    )
    return running_fleet(config, NUM_TRAINERS)


def backend_called(name: str, folder: Path) -> UpdateBackend:
    made: dict[str, UpdateBackend] = {
        "p2p": P2pBackend(),
        # The buckets cut rows of every tensor.
        "xccl": XcclBackend(bucket_nbytes=1024),
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
            assert (await fleet.publish(version))[:2] == ("published", [])
            assert await fleet.held("halves") == [(version, str(version), False)] * 2
            assert await fleet.held("whole") == [(version, str(version), False)]


async def test_a_receiver_killed_during_a_collective_releases_the_others() -> None:
    async with fleet_of(XcclBackend(bucket_nbytes=1024), UpdateMode.IN_PLACE, 2) as fleet:
        fleet.add_trainers()
        fleet.add_engine("stays", 2)
        fleet.add_engine("dies", 1, "die")
        await fleet.ready()
        began = time.monotonic()
        # The update needs two engines, so it waits for a new one. No restart is needed.
        update = asyncio.create_task(fleet.publish(0))
        await asyncio.to_thread(fleet.engines["dies"][0].process.join, 30)
        fleet.add_engine("comes", 1)
        outcome = await update
        assert outcome[:2] == ("published", []), outcome
        assert time.monotonic() - began < 30
        assert await fleet.engines["comes"][0].read() == "ready"
        assert await fleet.held("stays") == [(0, "0", False)] * 2
        assert await fleet.held("comes") == [(0, "0", False)]
        assert (await fleet.publish(1))[:2] == ("published", [])
        assert await fleet.held("stays") == [(1, "1", False)] * 2


async def test_a_failed_broadcast_is_repeated_in_a_new_group_without_mixed_weights() -> None:
    async with fleet_of(XcclBackend(bucket_nbytes=1024), UpdateMode.STAGED, 2) as fleet:
        fleet.add_trainers()
        fleet.add_engine("good", 1)
        fleet.add_engine("late", 1, "skip")
        await fleet.ready()
        assert (await fleet.publish(0))[:2] == ("published", [])
        assert await fleet.held("good") == [(0, "0", False)]
        assert await fleet.held("late") == [(0, "0", False)]


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_damaged_files_are_refused_and_not_applied(tmp_path: Path, mode: UpdateMode) -> None:
    async with fleet_of(DiskBackend(folder=str(tmp_path)), mode) as fleet:
        fleet.add_trainers()
        fleet.add_engine("engine", 1, f"damage:{tmp_path}")
        await fleet.ready()
        outcome, reason, _ = await fleet.publish(0)
        assert outcome == "RoundAborted", reason
        # Before the engine has got the end of the round, it reports that its weights may be mixed.
        assert await fleet.engines["engine"][0].ask("aborted")
        assert await fleet.held("engine") == [(-1, "untouched", False)]


async def test_files_contain_boxes_by_checkpoint_name_and_old_versions_are_removed(
    tmp_path: Path,
) -> None:
    backend = DiskBackend(folder=str(tmp_path), keep_versions=1)
    async with fleet_of(backend, UpdateMode.STAGED) as fleet:
        fleet.add_trainers()
        fleet.add_engine("engine", 1)
        await fleet.ready()
        for version in range(4):
            assert (await fleet.publish(version))[:2] == ("published", [])
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
