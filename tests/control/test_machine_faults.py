"""Faults of the machine: clocks jump, and memory, descriptors and disks run out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from machine_faults import (
    BALLAST,
    DAY_S,
    clock_environment,
    needs_faketime,
    no_descriptors_left,
    no_memory_left,
    slow_disk,
    small_disk,
)
from test_faults import Process, drain, fleet_of
from weight_fleet import TOKEN, Fleet, Rank, running_fleet

import windlass
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode

SUPPORT = Path(__file__).parents[1] / "support"
CONFIG = ControlConfig(deadlines=PhaseDeadlines(connect_s=20, fleet_s=20))
OFFSETS = ("+0", "+1d", "-2d", "+3650d", "+0")
PUBLISHED = [("published", "", ())] * 2


@pytest.mark.long
@needs_faketime
@pytest.mark.parametrize("whose", ["all", "controller", "engine"])
def test_versions_are_published_while_the_clock_of_the_day_jumps(
    tmp_path: Path, whose: str
) -> None:
    """The clock jumps back and forth, by days and years, for all processes or for one.

    Heartbeats continue.
    """
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environment = {**os.environ, **clock_environment(clock)}
    if whose == "engine":
        del environment["LD_PRELOAD"]
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / "clock_fleet.py"), str(clock), whose],
        env=environment,
        input="".join(f"{offset}\n" for offset in OFFSETS),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) == len(OFFSETS), ended.stderr[-3000:]
    today = time.time() // DAY_S
    for version, (offset, line) in enumerate(zip(OFFSETS, lines, strict=True)):
        for role in ("controller", "engine"):
            jumped = int(offset.rstrip("d")) if whose in (role, "all") else 0
            assert abs(line[role] - today - jumped) <= 1, "the clock was not set"
        assert line["outcome"] == "published"
        assert line["held"] == [[version, str(version), False]]


async def use_up_memory(victim: Rank | Process) -> None:
    """Send a message that is larger than the victim's memory."""
    # The kernel kills the victim while it reads.
    with suppress(OSError):
        await asyncio.to_thread(victim.tell, BALLAST)


async def test_an_engine_killed_for_memory_is_the_only_engine_left_out() -> None:
    async with running_fleet(CONFIG, 1) as fleet:
        for name in ("a", "b"):
            fleet.add_engine(name)
        fleet.add_trainers()
        await fleet.ready()
        assert (await fleet.publish(0)).outcome == "published"
        (victim,) = fleet.engines["b"]
        assert victim.process.pid is not None
        with no_memory_left(victim.process.pid):
            using_up = asyncio.create_task(use_up_memory(victim))
            version = 0
            while version == 0 or victim.process.is_alive():
                version += 1
                assert (await fleet.publish(version)).outcome == "published"
                assert await fleet.held("a") == [(version, str(version), False)]
            await using_up
            victim.process.join(30)
        assert victim.process.exitcode == -signal.SIGKILL
        fleet.add_engine("b")
        assert await fleet.engines["b"][0].read() == "ready"
        version += 1
        assert (await fleet.publish(version)).outcome == "published"
        victim.close()


async def test_a_controller_killed_for_memory_continues_from_its_journals(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, "p2p", UpdateMode.STAGED) as fleet:
        victim = fleet.processes["controller"]
        assert victim.process.pid is not None
        with no_memory_left(victim.process.pid):
            publishing = asyncio.create_task(fleet.publish())
            await use_up_memory(victim)
            assert await victim.ended() == -signal.SIGKILL
        await fleet.start("controller")
        assert {answer[0] for answer in await publishing} <= {"published", "aborted"}
        await fleet.complete()
        assert await fleet.publish() == PUBLISHED
        await fleet.assert_serves()
        await drain(fleet)


@pytest.mark.parametrize("who", ["engine", "trainer"])
async def test_a_rank_without_descriptors_is_updated_or_reports_it_and_recovers(who: str) -> None:
    """A trainer without descriptors cannot check that its peer lives.

    It writes nothing, so no engine is quarantined.
    """
    async with running_fleet(CONFIG, 1) as fleet:
        fleet.add_engine("a")
        fleet.add_trainers()
        await fleet.ready()
        assert (await fleet.publish(0)).outcome == "published"
        (rank,) = fleet.trainers if who == "trainer" else fleet.engines["a"]
        assert rank.process.pid is not None
        with no_descriptors_left(rank.process.pid):
            outcome, reasons, _ = await fleet.publish(1)
        if who == "trainer":
            assert outcome == "RoundAborted"
            assert "Too many open files" in reasons[0]
        else:
            assert outcome == "published"
        assert (await fleet.publish(2)).outcome == "published"
        assert await fleet.held("a") == [(2, "2", False)]


async def test_a_full_disk_fails_only_versions_that_it_cannot_record(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path) as disk:
        async with windlass.Controller(
            token=TOKEN, config=CONFIG, journal_path=disk / "journal"
        ) as controller:
            fleet = Fleet(controller.url, 1)
            try:
                fleet.add_engine("a")
                fleet.add_trainers()
                await fleet.ready()
                assert (await fleet.publish(0)).outcome == "published"
                ballast = disk / "ballast"
                with pytest.raises(OSError, match="No space left"):
                    ballast.write_bytes(bytes(1 << 20))
                version, outcome, reasons = 0, "published", [""]
                # The last page of the file still has room for some entries.
                while outcome == "published" and version < 100:
                    version += 1
                    outcome, reasons, _ = await fleet.publish(version)
                assert outcome == "RoundAborted"
                assert "No space left" in reasons[0]
                ballast.unlink()
                version += 1
                assert (await fleet.publish(version)).outcome == "published"
                assert await fleet.held("a") == [(version, str(version), False)]
            finally:
                fleet.close()


def wait_for_more(path: Path, nbytes: int) -> None:
    """Return when the file is longer than `nbytes`."""
    while path.stat().st_size <= nbytes:
        time.sleep(0.02)


@pytest.mark.parametrize("sync_s", [1.0, pytest.param(12.0, marks=pytest.mark.long)])
async def test_a_disk_slower_than_a_heartbeat_delays_rounds_and_loses_nothing(
    tmp_path: Path, sync_s: float
) -> None:
    """The test also kills the controller while it waits for a sync."""
    async with fleet_of(tmp_path, "p2p", UpdateMode.STAGED, heartbeat_s=0.5) as fleet:
        victim = fleet.processes["controller"]
        assert victim.process.pid is not None
        with slow_disk(victim.process.pid, sync_s):
            assert await fleet.publish() == PUBLISHED
            await fleet.assert_serves()
            journal = tmp_path / "rounds.journal"
            nbytes = journal.stat().st_size
            publishing = asyncio.create_task(fleet.publish())
            # When the file has grown, the sync of the new entry has not ended.
            await asyncio.to_thread(wait_for_more, journal, nbytes)
            victim.process.kill()
            assert await victim.ended() == -signal.SIGKILL
        await fleet.start("controller")
        assert {answer[0] for answer in await publishing} <= {"published", "aborted"}
        await fleet.complete()
        assert await fleet.publish() == PUBLISHED
        await fleet.assert_serves()
        await drain(fleet)
